/** Follows a stream, and writes down all that it is told: window.journal. */

const { client: source, stream, resume, options } = document.body.dataset;
const { connect } = await import(source);

const journal = [];
const client = connect(undefined, {
  // All shorter than for people: a test looks away for seconds, not for minutes.
  ...{ minDelay: 50, maxDelay: 500, connectTimeout: 5000 },
  ...{ pingInterval: 1000, pingTimeout: 1000, pauseAfter: 300 },
  onError: (error) => journal.push(["socket", error]),
});
const subscription = client.stream(stream, {
  resume,
  onRecords: (records) => {
    for (const { position, data } of records) journal.push(["record", position, data]);
  },
  onCursorExpired: (info) => void journal.push(["expired", info]),
  onSubscribed: (info) => journal.push(["subscribed", info]),
  onError: (error) => journal.push(["error", error]),
  ...JSON.parse(options || "{}"),
});
client.onState((state) => (document.body.dataset.state = state));

/** A browser without a screen shows all of its tabs at once, so this is played. */
const look = (visibilityState) => {
  Object.defineProperty(document, "visibilityState", { value: visibilityState, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
};

Object.assign(window, { journal, subscription, client, look });
document.body.dataset.ready = "";

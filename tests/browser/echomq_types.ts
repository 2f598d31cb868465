// Compiled, never run: that the declarations say what a page does. See test_echomq_js.py.

import { connect, delay, type Client, type State } from "../../echomq_app/static/echomq/echomq.js";
import { EchoStream } from "../../echomq_app/static/echomq/echomq-stream.js";

interface Order {
  total: number;
}

const client: Client = connect("/ws/echomq/", {
  getToken: async () => (await fetch("/token/")).text(),
  WebSocketImpl: WebSocket,
  pauseAfter: Infinity,
});

const orders = client.stream<Order>("orders", {
  resume: document.body.dataset.resume,
  types: ["placed"],
  onRecords: async (records, info) => {
    const totals: number[] = records.map((record) => record.data.total);
    const behind: number = info.head - info.cursor;
    console.log(totals, behind);
  },
  onCursorExpired: ({ reason }) => (reason === "trimmed" ? "first" : undefined),
});

// @ts-expect-error `from` is no position in the past by name
client.stream("orders", { from: "yesterday" });
// @ts-expect-error events keep no place
client.events("emails").resume;

const token: string | undefined = orders.resume;
const stop: () => void = client.onState((state: State, { retryIn }) => console.log(state, retryIn));
client.events<{ percent: number }>("emails", { onEvent: ({ data }) => data.percent });

for await (const record of orders) console.log(record.data.total, token);

document.querySelector("echomq-stream")?.addEventListener("echomq:records", ({ detail }) => {
  console.log(detail.records.length);
});
new EchoStream().client = client;
stop();
console.log(delay(3));

export {};

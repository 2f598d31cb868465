/** The job: start it, follow it, cancel it; and clearing the log. Plain HTTP. */

import { count, plural } from "./format.js";

const ACTIVE = new Set(["ready", "scheduled", "running"]);
const WATCHING = 1000; // between two looks at a job that goes on
const IDLE = 3000;
/** After this silence a request is given up: a line may be dead without a word. */
const PATIENCE = 5_000;
const SLIDER_TOP = 100;

/** The slider is logarithmic: from the slowest to the fastest in even ratios. */
export function speedOf(slider, slowest, fastest) {
  const speed = slowest * (fastest / slowest) ** (slider / SLIDER_TOP);
  return speed < 10 ? Math.round(speed * 10) / 10 : Math.round(speed);
}

/** Say in words how a job stands. */
export function describe(job) {
  if (!job) return "No replay yet.";
  const again = job.attempt > 1 ? ` Attempt ${job.attempt}: a worker was lost, another goes on.` : "";
  switch (job.state) {
    case "ready":
    case "scheduled":
      return `Waiting for a worker.${again}`;
    case "running":
      if (job.cancel_requested) return `Asked to stop: ${job.reason || "no reason given"}.`;
      return `Running${job.note ? `: ${job.note}` : ""}.${again}`;
    case "completed":
      if (job.result.added === 0) {
        return `Done. Nothing was added: all ${count(job.result.duplicates)} were in the log already.`;
      }
      return `Done: ${plural(job.result.added, "earthquake")} added${
        job.result.duplicates ? `, ${count(job.result.duplicates)} were there already` : ""
      }.`;
    case "cancelled":
      return `Cancelled: ${job.reason || "no reason given"}.`;
    default:
      return `Failed: ${job.error || "see the worker's output"}.`;
  }
}

export class Controls {
  #page;
  #say;
  #job = null;
  #timer = 0;
  #told = "";
  #busy = new WeakSet();

  /** `say(text)` tells the story; `page` is the root element. */
  constructor(page, say) {
    this.#page = page;
    this.#say = say;
    const { start, cancel, clear } = this.#forms();
    this.#showSpeed();
    start.elements.speed.addEventListener("input", () => this.#showSpeed());
    this.#onSubmit(start, () => ({ speed: this.#speed() }));
    this.#onSubmit(cancel, () => ({ job_id: this.#job?.id, reason: cancel.elements.reason.value }));
    this.#onSubmit(clear, () => ({}));
    this.look();
  }

  /** Look at the job now, and again after a while. */
  async look() {
    clearTimeout(this.#timer);
    try {
      const response = await fetch(this.#page.dataset.status, {
        cache: "no-store",
        signal: AbortSignal.timeout(PATIENCE),
      });
      if (response.ok) this.#show((await response.json()).job);
    } catch {
      // The server is away. The connection's state says so; the next look is soon.
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.look(), this.#active() ? WATCHING : IDLE);
  }

  /** Progress that the feed brought: sooner than the next look, if it is of our job. */
  progress(jobId, fraction, note) {
    if (this.#job?.id !== jobId || this.#job.state !== "running") return;
    if (fraction >= (this.#job.fraction ?? 0)) this.#show({ ...this.#job, fraction, note });
  }

  #forms() {
    const form = (name) => this.#page.querySelector(`#${name}`);
    return { start: form("start"), cancel: form("cancel"), clear: form("clear") };
  }

  #active() {
    return this.#job !== null && ACTIVE.has(this.#job.state);
  }

  #speed() {
    const { speed } = this.#forms().start.elements;
    return speedOf(speed.valueAsNumber, Number(speed.dataset.slowest), Number(speed.dataset.fastest));
  }

  #showSpeed() {
    const { speed } = this.#forms().start.elements;
    const seconds = Math.round(Number(speed.dataset.total) / this.#speed());
    const length = seconds < 90 ? `${Math.max(1, seconds)} s` : `${Math.round(seconds / 60)} min`;
    const text = `${count(this.#speed())} a second, the week in ${length}`;
    this.#page.querySelector("#speed-text").textContent = text;
    speed.setAttribute("aria-valuetext", text);
  }

  #show(job) {
    this.#job = job;
    const active = this.#active();
    const { start, cancel, clear } = this.#forms();
    start.querySelector("button").disabled = active;
    clear.querySelector("button").disabled = active;
    cancel.querySelector("fieldset").disabled = !active || job.cancel_requested;
    const text = describe(job);
    const line = this.#page.querySelector("#job-state");
    if (line.textContent !== text) line.textContent = text;
    line.dataset.state = job ? job.state : "none";
    const bar = this.#page.querySelector("#progress");
    bar.value = job?.state === "completed" ? 1 : (job?.fraction ?? 0);
    // The story gets the turns, not each step of the progress.
    const turn = job && `${job.id} ${job.state} ${job.attempt} ${job.cancel_requested}`;
    if (this.#told !== "" && turn !== this.#told && job) this.#say(`Replay: ${text}`);
    this.#told = turn ?? "none";
  }

  #onSubmit(form, body) {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (this.#busy.has(form)) return; // pressed twice
      this.#busy.add(form);
      const error = this.#page.querySelector("#error");
      error.textContent = "";
      try {
        const answer = await this.#post(form, body());
        if (answer.message) this.#say(answer.message);
      } catch (failure) {
        error.textContent = failure.message;
      }
      await this.look();
      this.#busy.delete(form);
    });
  }

  async #post(form, body) {
    let response;
    try {
      response = await fetch(form.action, {
        method: "POST",
        headers: {
          "Content-Type": "application/json",
          "X-CSRFToken": form.elements.csrfmiddlewaretoken.value,
        },
        body: JSON.stringify(body),
        signal: AbortSignal.timeout(PATIENCE),
      });
    } catch {
      // It may have been done, and the answer lost.
      throw new Error("The server doesn't answer. See how the job stands before you try again.");
    }
    const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
    const answer = isJson ? await response.json() : {};
    if (!response.ok) throw new Error(answer.error ?? `The server refused (${response.status}).`);
    return answer;
  }
}

// The stream of snapshots: server-sent events by fetch, since only fetch sends the key in a header and not in the URL.

const MOST_CHARS = 2_000_000;
const LEAST_RETRY_MS = 500;
const MOST_RETRY_MS = 10_000;
// The router sends a snapshot each second. A stream that is silent for this long is dead.
const SILENCE_MS = 15_000;

/** An error that the router answered with; `status` is the HTTP status. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function refusal(answer) {
  let message = `The router answered with status ${answer.status}.`;
  try {
    message = (await answer.json()).error.message ?? message;
  } catch {
    // Not every proxy writes JSON.
  }
  return new Refused(answer.status, message);
}

/** Yield the data of each event of an answer. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      if (text.length > MOST_CHARS) throw new Error("An event is too long.");
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Follows the router until `stop`. `heard(snapshot)` and `changed(state)` are called: live, lost or refused. */
export class LiveStream {
  #stopped = new AbortController();
  #connection = null;
  #retryMs = LEAST_RETRY_MS;

  constructor(headers, heard, changed) {
    this.headers = headers;
    this.heard = heard;
    this.changed = changed;
  }

  /** Resolves with the status of the first answer. The stream goes on after that. */
  async start() {
    const answer = await this.#open();
    this.#run(answer);
  }

  stop() {
    this.#stopped.abort();
    this.#connection?.abort();
  }

  async #open() {
    this.#connection = new AbortController();
    const options = { headers: this.headers(), cache: "no-store", signal: this.#connection.signal };
    const answer = await fetch("console/events", options);
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }

  async #run(answer) {
    while (!this.#stopped.signal.aborted) {
      try {
        answer ??= await this.#open();
        await this.#read(answer);
      } catch (error) {
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          this.changed("refused");
          return;
        }
      }
      answer = null;
      if (this.#stopped.signal.aborted) return;
      this.changed("lost");
      await new Promise((resolve) => setTimeout(resolve, this.#retryMs));
      this.#retryMs = Math.min(MOST_RETRY_MS, this.#retryMs * 2);
    }
  }

  async #read(answer) {
    const connection = this.#connection;
    let silence = setTimeout(() => connection.abort(), SILENCE_MS);
    try {
      for await (const event of eventsOf(answer)) {
        clearTimeout(silence);
        silence = setTimeout(() => connection.abort(), SILENCE_MS);
        this.#retryMs = LEAST_RETRY_MS;
        this.changed("live");
        this.heard(JSON.parse(event));
      }
    } finally {
      clearTimeout(silence);
      connection.abort();
    }
  }
}

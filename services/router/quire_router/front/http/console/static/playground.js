// The playground: a streamed chat or completion, with its timings and its replicas.

import { byId, duration, h, number, plural, setText, show } from "./dom.js";
import { eventsOf, refusal } from "./live_stream.js";
import { Waterfall } from "./requests.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** One answer: its text, the places where it moved to another replica, and its figures. */
class Answer {
  #shown = [];

  constructor() {
    this.text = "";
    this.tokens = 0;
    this.requestId = "";
    // Pairs of token count and text length, as the answer grew.
    this.marks = [{ tokens: 0, characters: 0 }];
    this.tail = document.createTextNode("");
    this.words = h("div", { class: "words" }, this.tail);
    this.figures = h("p", { class: "answer-figures" });
    this.waterfall = new Waterfall();
    this.times = h("details", { class: "times", hidden: true }, h("summary", { text: "Where the time went" }), this.waterfall.element);
    this.error = h("p", { class: "error", role: "alert" });
    this.thought = h("p", { class: "thought" });
    this.thinking = h("details", { class: "times", hidden: true, open: true }, h("summary", { text: "Reasoning" }), this.thought);
    this.calls = h("div", { class: "calls" });
    this.element = h("article", { class: "message assistant waits" }, this.thinking, this.words, this.calls, this.error, this.figures, this.times);
    this.started = performance.now();
    this.first = this.last = 0;
  }

  add(delta, tokens) {
    const text = delta.content ?? "";
    if (text || delta.reasoning || delta.tool_calls) {
      this.last = performance.now();
      this.first ||= this.last;
    }
    if (delta.reasoning) {
      show(this.thinking, true);
      this.thought.append(delta.reasoning);
    }
    for (const call of delta.tool_calls ?? []) this.#addCall(call);
    this.text += text;
    this.tokens = tokens ?? this.tokens;
    this.tail.appendData(text);
    this.marks.push({ tokens: this.tokens, characters: this.text.length });
    this.tell();
  }

  #addCall({ index, function: { name, arguments: text } }) {
    while (this.calls.children.length <= index) this.calls.append(h("code", { class: "call" }));
    this.calls.children[index].append(name ? `${name} ` : "", text);
  }

  /** Show where the answer ran: [{instance, from_token}], the first replica first. */
  ranAt(runs, anew = false) {
    if (!runs.length || (!anew && JSON.stringify(runs) === JSON.stringify(this.#shown))) return;
    this.#shown = runs;
    const pieces = [];
    let from = 0;
    for (const run of runs.slice(1)) {
      const mark = this.marks.findLast((one) => one.tokens <= run.from_token) ?? this.marks[0];
      pieces.push(document.createTextNode(this.text.slice(from, mark.characters)));
      const told = run.from_token ? `went on at ${run.instance}, from token ${number(run.from_token)}` : `went on at ${run.instance}`;
      pieces.push(h("span", { class: "moved", text: told }));
      from = Math.max(from, mark.characters);
    }
    this.tail = document.createTextNode(this.text.slice(from));
    this.words.replaceChildren(...pieces, this.tail);
    this.tell();
  }

  tell() {
    const parts = [];
    if (this.first) parts.push(`first token ${duration(this.first - this.started)}`);
    if (this.tokens) parts.push(plural(this.tokens, "token"));
    const rate = this.last > this.first ? (this.tokens - 1) / ((this.last - this.first) / 1000) : 0;
    if (rate > 0) parts.push(`${number(rate, 1)} tokens/s`);
    if (this.#shown.length) parts.push(this.#shown.at(-1).instance);
    if (this.#shown.length > 1) parts.push(plural(this.#shown.length - 1, "migration"));
    setText(this.figures, parts.join("  ·  "));
  }

  end(timings, runs, why) {
    this.element.classList.remove("waits");
    // A place may have been told of before its text had come.
    if (runs) this.ranAt(runs.filter((run) => run.index === 0), true);
    if (timings) {
      const total = timings.find((one) => one.service === "router" && one.phase === "total")?.us ?? 0;
      this.waterfall.update(laidOut(timings, (this.first && this.first - this.started) || 0), total / 1000);
      show(this.times, total > 0);
    }
    setText(this.error, why);
    setText(byId("announced"), this.text || why);
  }
}

/** Arrange the timings of an ended answer like those of the router's list of requests. */
function laidOut(timings, firstMs) {
  const ms = (service, phase) => timings.filter((one) => one.service === service && one.phase === phase).reduce((sum, one) => sum + one.us / 1000, 0);
  const placed = ms("router", "parse") + ms("router", "tokenize") + ms("router", "place");
  const prefill = placed + ms("scheduler", "queue");
  const decode = Math.max(prefill, Math.min(firstMs, prefill + ms("worker", "prefill")));
  const starts = {
    "router parse": 0,
    "router tokenize": ms("router", "parse"),
    "tokenizer encode": ms("router", "parse"),
    "router place": ms("router", "parse") + ms("router", "tokenize"),
    "worker prefill": prefill,
    "worker decode": decode,
    "tokenizer detokenize": decode,
    "router migrate": decode,
  };
  const hops = timings.filter((one) => one.phase !== "total").map((one) => ({
    service: one.service, phase: one.phase, instance: one.instance, count: one.count, ms: one.us / 1000,
    start_ms: starts[`${one.service} ${one.phase}`] ?? placed,
  }));
  return hops.sort((a, b) => a.start_ms - b.start_ms);
}

export class Playground {
  #history = [];
  #abort = null;
  #answer = null;

  constructor(headers) {
    this.headers = headers;
    this.messages = byId("messages");
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.prompt.addEventListener("input", () => this.#grow());
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("mode").addEventListener("change", () => this.#clear());
    this.#clear();
    if (matchMedia("(max-width: 860px)").matches) byId("settings").removeAttribute("open");
  }

  setModels(names) {
    byId("model").replaceChildren(...names.map((name) => h("option", { text: name })));
  }

  /** Note on which replica a request of the snapshots runs. */
  sawRequests(rows) {
    if (!this.#answer?.requestId) return;
    const row = rows.find((one) => one.request_id === this.#answer.requestId);
    if (row) this.#answer.ranAt(row.runs);
  }

  async send() {
    const text = this.prompt.value;
    if (!text.trim() || this.#abort) return;
    const chat = byId("mode").value === "chat";
    const system = byId("system").value.trim();
    const asked = chat ? [...this.#history, { role: "user", content: text }] : null;
    const body = { model: byId("model").value, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
    if (byId("stop_string").value) body.stop = byId("stop_string").value;
    if (chat) body.messages = system ? [{ role: "system", content: system }, ...asked] : asked;
    else body.prompt = text;
    try {
      if (chat && byId("tools").value.trim()) body.tools = JSON.parse(byId("tools").value);
      byId("tools").setCustomValidity("");
    } catch (error) {
      byId("tools").setCustomValidity(error.message);
      byId("settings").open = true;
      byId("tools").reportValidity();
      return;
    }
    this.prompt.value = "";
    this.#grow();
    this.messages.querySelector(".empty")?.remove();
    const answer = new Answer();
    this.messages.append(h("article", { class: "message user" }, h("div", { class: "words", text })), answer.element);
    this.#follow(true);
    this.#busy(answer);
    await this.#run(chat ? "v1/chat/completions" : "v1/completions", body, answer);
    if (chat && answer.text) this.#history = [...asked, { role: "assistant", content: answer.text }];
    this.#busy(null);
    this.#follow();
  }

  async #run(path, body, answer) {
    let timings, runs, why = "";
    try {
      const options = { method: "POST", body: JSON.stringify(body), signal: this.#abort.signal, cache: "no-store" };
      const headers = { ...this.headers(), "Content-Type": "application/json", "X-Quire-Timings": "1" };
      const got = await fetch(path, { ...options, headers });
      if (!got.ok) throw await refusal(got);
      answer.requestId = got.headers.get("x-request-id") ?? "";
      for await (const event of eventsOf(got)) {
        if (event === "[DONE]") break;
        const chunk = JSON.parse(event);
        if (chunk.error) throw new Error(chunk.error.message);
        const choice = chunk.choices[0];
        answer.add(choice?.delta ?? { content: choice?.text }, chunk.usage?.completion_tokens);
        [timings, runs] = [chunk.quire_timings ?? timings, chunk.quire_runs ?? runs];
        this.#follow();
      }
    } catch (error) {
      why = error.name === "AbortError" ? "Stopped." : error.message;
    }
    answer.end(timings, runs, why);
  }

  #busy(answer) {
    this.#answer = answer;
    this.#abort = answer ? new AbortController() : null;
    show(byId("send"), !answer);
    show(byId("stop"), Boolean(answer));
  }

  #clear() {
    this.#abort?.abort();
    this.#history = [];
    this.messages.replaceChildren(h("p", { class: "empty", text: "Ask something. The answer shows when its first token came, how fast it is, and which replica wrote it." }));
    for (const id of ["system-label", "tools-label"]) show(byId(id), byId("mode").value === "chat");
  }

  #grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(220, this.prompt.scrollHeight)}px`;
  }

  #follow(always = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.messages;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.messages.scrollTop = scrollHeight;
  }
}

// Requests: those that run, by tenant, and those that ended. Each opens to show where its time went.

import { KeyedList, byId, duration, h, number, percent, plural, setText, show } from "./dom.js";

const TONES = { "waiting for a replica": "bad", queued: "warn", prefill: "blue", decoding: "ok", finishing: "ok", ended: "plain" };
let rowNumber = 0;

/** Bars of a request's phases on its time line. */
export class Waterfall {
  constructor() {
    this.element = h("ol", { class: "waterfall" });
    this.list = new KeyedList(this.element, () => {
      const name = h("span", { class: "hop-name" });
      const where = h("span", { class: "muted" });
      const piece = h("i");
      const time = h("span", { class: "hop-time" });
      const element = h("li", {}, h("span", { class: "hop" }, name, where), h("span", { class: "track", "aria-hidden": "true" }, piece), time);
      return {
        element,
        update: ({ hop, total }) => {
          setText(name, `${hop.service} ${hop.phase}`);
          setText(where, hop.count > 1 ? `× ${number(hop.count)}` : "");
          setText(time, duration(hop.ms));
          element.dataset.service = hop.service;
          piece.style.left = `${(100 * hop.start_ms) / total}%`;
          piece.style.width = `${Math.max(0.4, (100 * hop.ms) / total)}%`;
          element.title = hop.instance;
        },
      };
    });
  }

  update(hops, totalMs) {
    const total = Math.max(totalMs, 1e-6);
    const shown = hops.filter((hop) => hop.ms > 0);
    this.list.update(shown.map((hop, index) => ({ hop, total, key: `${index} ${hop.service} ${hop.phase}` })), (item) => item.key);
  }
}

class RequestRow {
  constructor(request, cancel) {
    this.request = request;
    const id = `request-${(rowNumber += 1)}`;
    this.badge = h("span", { class: "badge" });
    this.tenant = h("span", { class: "tenant" });
    this.id = h("span", { class: "mono id" });
    this.age = h("span", { class: "num" });
    this.replica = h("span", { class: "mono where" });
    this.tokens = h("span", { class: "num" });
    this.fill = h("i");
    this.button = h("button", { type: "button", class: "row-head", "aria-expanded": "false", "aria-controls": id, on: { click: () => this.toggle() } },
      this.badge, h("span", { class: "who" }, this.tenant, this.id), this.replica,
      h("span", { class: "progress" }, this.tokens, h("span", { class: "track", "aria-hidden": "true" }, this.fill)), this.age);
    this.facts = h("p", { class: "row-facts" });
    this.way = h("p", { class: "row-facts" });
    this.waterfall = new Waterfall();
    this.cancel = h("button", { type: "button", class: "button small danger", text: "Cancel…", on: { click: () => cancel(this.request) } });
    this.body = h("div", { class: "row-body", id, hidden: true }, h("div", { class: "row-top" }, h("div", {}, this.facts, this.way), this.cancel), this.waterfall.element);
    this.element = h("article", { class: "row" }, this.button, this.body);
  }

  toggle() {
    const open = this.body.hidden;
    this.body.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
  }

  update({ request, actions }) {
    this.request = request;
    this.element.dataset.tone = TONES[request.state] ?? "plain";
    setText(this.badge, request.state);
    setText(this.tenant, request.tenant || "no key");
    setText(this.id, request.request_id);
    setText(this.age, duration(request.age_ms));
    const last = request.runs.at(-1);
    setText(this.replica, last ? last.instance : "–");
    setText(this.tokens, `${number(request.output_tokens)} / ${number(request.max_tokens)}`);
    this.fill.style.width = percent(request.output_tokens, request.max_tokens).replace("–", "0");
    const first = request.first_token_ms ? `first token after ${duration(request.first_token_ms)}` : "no token yet";
    const cached = `${number(request.cached_tokens)} of ${plural(request.prompt_tokens, "prompt token")} cached`;
    const several = request.sequences > 1 ? [plural(request.sequences, "sequence")] : [];
    setText(this.facts, [request.model, first, cached, ...several, plural(request.attempts, "attempt")].join(" · "));
    const way = request.runs.map((run) => (run.from_token ? `${run.instance} from token ${number(run.from_token)}` : run.instance));
    setText(this.way, way.length > 1 ? `Path: ${way.join(" → ")}` : "");
    show(this.way, way.length > 1);
    show(this.cancel, actions && request.state !== "ended");
    if (!this.body.hidden) this.waterfall.update(request.hops, request.age_ms);
  }
}

export class Requests {
  #tenant = null;

  constructor(cancel) {
    const make = ({ request }) => new RequestRow(request, cancel);
    this.running = new KeyedList(byId("running"), make, "No request is running.");
    this.recent = new KeyedList(byId("recent"), make, "No request has ended yet.");
    this.tenants = new KeyedList(byId("tenants"), ({ tenant }) => {
      const name = h("span");
      const count = h("b");
      const element = h("button", { type: "button", class: "chip", on: { click: () => this.#choose(tenant) } }, name, " ", count);
      return {
        element,
        update: (item) => {
          setText(name, item.tenant === null ? "All" : item.tenant || "no key");
          setText(count, number(item.running));
          element.setAttribute("aria-pressed", String(item.tenant === this.#tenant));
        },
      };
    });
  }

  #choose(tenant) {
    this.#tenant = tenant;
    if (this.last) this.update(this.last);
  }

  update(snapshot) {
    this.last = snapshot;
    const { requests, actions } = snapshot;
    if (!requests.tenants.some((one) => one.tenant === this.#tenant)) this.#tenant = null;
    const chips = requests.tenants.length > 1 ? [{ tenant: null, running: requests.running }, ...requests.tenants] : [];
    this.tenants.update(chips, (one) => (one.tenant === null ? "all" : `tenant ${one.tenant}`));
    const wanted = (request) => this.#tenant === null || request.tenant === this.#tenant;
    const rows = (all) => all.filter(wanted).map((request) => ({ request, actions }));
    this.running.update(rows(requests.rows), (row) => row.request.number);
    this.recent.update(rows(requests.recent), (row) => row.request.number);
    const left = requests.running - requests.rows.length;
    setText(byId("running-count"), left > 0 ? `${number(requests.running)}, the oldest ${number(requests.rows.length)} shown` : number(requests.running));
  }
}

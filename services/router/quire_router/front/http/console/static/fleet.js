// The fleet: problems first, then pools of replicas by model and role, then the other services.

import { Bar, Figure, KeyedList, brief, byId, bytes, duration, h, number, percent, plural, setText, show } from "./dom.js";

const GOOD = { ready: "ok" };
const BAD = new Set(["unreachable", "failed"]);

function tone(replica) {
  if (BAD.has(replica.phase) || (replica.phase === "ready" && !replica.session)) return "bad";
  return GOOD[replica.phase] ?? "warn";
}

/** One labelled fact of a card. */
function fact(name) {
  const value = h("dd", {}, "–");
  return { element: h("div", {}, h("dt", { text: name }), value), set: (text) => setText(value, text) };
}

function factsOf(names) {
  const facts = Object.fromEntries(names.map((name) => [name, fact(name)]));
  return { facts, element: h("dl", { class: `facts of-${names.length}` }, ...Object.values(facts).map((one) => one.element)) };
}

class ReplicaCard {
  constructor(replica, act) {
    this.replica = replica;
    this.name = h("h4", { text: replica.instance });
    this.badge = h("span", { class: "badge" });
    this.detail = h("p", { class: "detail" });
    this.batch = new Bar("Batch");
    this.batchText = h("span");
    this.pages = new Bar("KV pages");
    this.pagesText = h("span");
    const { facts, element } = factsOf(["Queue", "Oldest wait", "Step", "Decode", "Prefill", "Restarts"]);
    this.facts = facts;
    this.foot = h("p", { class: "foot" });
    this.drain = h("button", { type: "button", class: "button small", text: "Drain…", on: { click: () => act.drain(this.replica) } });
    const role = h("button", { type: "button", class: "button small", text: "Role…", on: { click: () => act.role(this.replica) } });
    this.drain.setAttribute("aria-label", `Drain ${replica.instance}`);
    role.setAttribute("aria-label", `Change the role of ${replica.instance}`);
    this.buttons = h("div", { class: "card-actions" }, this.drain, role);
    this.element = h("article", { class: "card replica" },
      h("header", {}, h("span", { class: "dot", "aria-hidden": "true" }), this.name, this.badge),
      this.detail,
      h("div", { class: "meter" }, h("div", { class: "meter-head" }, h("span", { text: "Batch" }), this.batchText), this.batch.element),
      h("div", { class: "meter" }, h("div", { class: "meter-head" }, h("span", { text: "KV pages" }), this.pagesText), this.pages.element),
      element,
      h("footer", {}, this.foot, this.buttons));
  }

  update({ replica, actions }) {
    this.replica = replica;
    this.element.dataset.tone = tone(replica);
    setText(this.badge, replica.phase === "loading" ? `loading ${number(replica.progress * 100)}%` : replica.phase);
    setText(this.detail, replica.detail);
    show(this.detail, Boolean(replica.detail) && !["ready", "draining"].includes(replica.phase));
    const batch = `${number(replica.running)} of ${number(replica.max_num_seqs)}`;
    setText(this.batchText, batch);
    this.batch.update([{ class: "fill accent", share: replica.running / replica.max_num_seqs }], batch);
    const { pages, free_pages: free, referenced_pages: used } = replica;
    const idle = Math.max(0, pages - free - used);
    const text = pages ? `${percent(used, pages)} in use, ${number(pages)} in all` : "none yet";
    setText(this.pagesText, text);
    this.pages.update([
      { class: used > 0.97 * pages ? "fill bad" : "fill blue", share: pages && used / pages },
      { class: "fill soft", share: pages && idle / pages },
    ], text);
    this.facts.Queue.set(number(replica.waiting));
    this.facts["Oldest wait"].set(replica.oldest_wait_ms ? duration(replica.oldest_wait_ms) : "none");
    this.facts.Step.set(replica.step_ms ? duration(replica.step_ms) : "–");
    this.facts.Decode.set(`${brief(replica.decode_tokens_per_s)} tok/s`);
    this.facts.Prefill.set(`${brief(replica.prefill_tokens_per_s)} tok/s`);
    this.facts.Restarts.set(number(replica.restarts));
    const parts = [replica.address === replica.instance ? "" : replica.address, replica.version && `version ${replica.version}`];
    setText(this.foot, parts.filter(Boolean).join(" · "));
    show(this.buttons, actions);
    show(this.drain, replica.phase !== "draining");
  }
}

class Pool {
  constructor(pool, act) {
    this.title = h("h3", { text: pool.model });
    this.role = h("span", { class: "tag" });
    this.summary = h("span", { class: "muted" });
    const cards = h("div", { class: "cards" });
    this.cards = new KeyedList(cards, ({ replica }) => new ReplicaCard(replica, act));
    this.element = h("section", { class: "pool" }, h("div", { class: "pool-head" }, this.title, this.role, this.summary), cards);
  }

  update(pool) {
    setText(this.role, pool.role === "both" ? "prefill and decode" : pool.role);
    const ready = pool.replicas.filter((replica) => replica.accepts).length;
    setText(this.summary, `${ready} of ${plural(pool.replicas.length, "replica")} ready`);
    const order = { bad: 0, warn: 1, ok: 2 };
    const sorted = [...pool.replicas].sort((a, b) => order[tone(a)] - order[tone(b)] || a.instance.localeCompare(b.instance));
    this.cards.update(sorted.map((replica) => ({ replica, actions: pool.actions })), (item) => item.replica.instance);
  }
}

class Problem {
  constructor(problem) {
    this.text = h("span");
    this.element = h("li", { class: `problem ${problem.severity}` }, h("b", { text: problem.subject }), " ", this.text);
  }

  update(problem) {
    setText(this.text, problem.text);
  }
}

export class Fleet {
  constructor(act) {
    const figures = byId("fleet-figures");
    this.ready = new Figure("Replicas ready");
    this.running = new Figure("Running", { spark: true });
    this.waiting = new Figure("Waiting", { spark: true });
    this.decode = new Figure("Output tokens/s", { spark: true });
    this.step = new Figure("Step time", { spark: true });
    figures.append(...[this.ready, this.running, this.waiting, this.decode, this.step].map((one) => one.element));
    this.calm = h("p", { class: "calm" }, h("span", { class: "dot", "aria-hidden": "true" }), h("span", { text: "Nothing is wrong." }));
    const list = h("ul", { class: "problems", "aria-label": "What is wrong" });
    byId("problems").append(this.calm, list);
    this.problems = new KeyedList(list, (problem) => new Problem(problem));
    this.pools = new KeyedList(byId("pools"), (pool) => new Pool(pool, act), "Discovery lists no scheduler.");
    this.around = new Around(act);
  }

  update(snapshot) {
    const { replicas, problems } = snapshot;
    show(this.calm, !problems.length);
    this.problems.update(problems, (problem) => `${problem.severity} ${problem.subject} ${problem.text.replace(/[\d.]+/g, "#")}`);
    const sum = (name) => replicas.reduce((total, replica) => total + replica[name], 0);
    const ready = replicas.filter((replica) => replica.accepts).length;
    this.ready.update(`${ready} / ${snapshot.replicas_total}`, plural(sum("restarts"), "restart"));
    this.running.update(number(sum("running")), `room for ${number(sum("max_num_seqs"))}`, sum("running"));
    const oldest = Math.max(0, ...replicas.map((replica) => replica.oldest_wait_ms));
    this.waiting.update(number(sum("waiting")), oldest ? `oldest ${duration(oldest)}` : "", sum("waiting"));
    this.decode.update(brief(sum("decode_tokens_per_s")), `prefill ${brief(sum("prefill_tokens_per_s"))}`, sum("decode_tokens_per_s"));
    const steps = replicas.map((replica) => replica.step_ms).filter(Boolean);
    const worst = Math.max(0, ...steps);
    this.step.update(worst ? duration(worst) : "–", steps.length > 1 ? "slowest replica" : "", worst);
    const pools = new Map();
    for (const replica of replicas) {
      const model = replica.model ?? "Model not known yet";
      const key = `${model}\n${replica.role}`;
      if (!pools.has(key)) pools.set(key, { key, model, role: replica.role, actions: snapshot.actions, replicas: [] });
      pools.get(key).replicas.push(replica);
    }
    this.pools.update([...pools.values()].sort((a, b) => a.key.localeCompare(b.key)), (pool) => pool.key);
    this.around.update(snapshot);
  }
}

/** The router itself, tokenizers, kvstores and certificates. */
class Around {
  constructor(act) {
    this.paused = false;
    this.pause = h("button", { type: "button", class: "button small", on: { click: () => (this.paused ? act.resume() : act.pause()) } });
    this.state = h("span", { class: "badge" });
    const { facts, element } = factsOf(["In flight", "Up for", "Version", "Process"]);
    this.facts = facts;
    this.router = h("article", { class: "card" },
      h("header", {}, h("span", { class: "dot", "aria-hidden": "true" }), h("h4", { text: "Router" }), this.state),
      element,
      h("footer", {}, h("p", { class: "foot" }), h("div", { class: "card-actions" }, this.pause)));
    this.tokenizers = peers("Tokenizers");
    this.stores = peers("KV stores");
    this.certificates = peers("Certificates");
    byId("around").append(this.router, this.tokenizers.element, this.stores.element, this.certificates.element);
  }

  update({ router, tokenizers, kv, certificates, actions }) {
    this.paused = router.paused;
    this.router.dataset.tone = router.paused ? "warn" : "ok";
    setText(this.state, router.paused ? "paused" : "serving");
    setText(this.pause, router.paused ? "Resume" : "Pause…");
    show(this.pause, actions);
    this.facts["In flight"].set(`${number(router.in_flight)} of ${number(router.limit)}`);
    this.facts["Up for"].set(duration(router.uptime_s * 1000));
    this.facts.Version.set(router.version);
    this.facts.Process.set(router.process);
    this.tokenizers.update(tokenizers.map((one) => ({ name: one.instance, text: one.phase, tone: one.phase === "ready" ? "ok" : "bad" })));
    this.stores.update(kv.stores.map((store) => {
      const used = store.tiers.reduce((total, tier) => total + tier.used_bytes, 0);
      return { name: store.instance, text: store.error ? "no answer" : bytes(used), tone: store.error ? "bad" : "ok" };
    }));
    this.certificates.update(certificates.map(({ subject, seconds_left: left }) => ({
      name: subject,
      text: left < 0 ? "expired" : `${duration(left * 1000)} left`,
      tone: left < 0 ? "bad" : left < 14 * 86400 ? "warn" : "ok",
    })));
  }
}

function peers(title) {
  const list = h("ul", { class: "peers" });
  const items = new KeyedList(list, () => {
    const name = h("span", { class: "mono" });
    const text = h("span", { class: "muted" });
    const element = h("li", {}, h("span", { class: "dot", "aria-hidden": "true" }), name, text);
    return {
      element,
      update: (peer) => {
        element.dataset.tone = peer.tone;
        setText(name, peer.name);
        setText(text, peer.text);
      },
    };
  });
  const element = h("article", { class: "card" }, h("header", {}, h("h4", { text: title })), list);
  return {
    element,
    update: (all) => {
      show(element, all.length > 0);
      items.update(all, (peer) => peer.name);
    },
  };
}

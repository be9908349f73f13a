// The KV cache: cache hits, pages by holder, the kvstores' tiers, transfers between replicas.

import { Bar, Figure, KeyedList, byId, bytes, h, number, percent, setText } from "./dom.js";

const MEDIA = { ram: "Memory", disk: "Disk", redis: "Redis" };

/** A row with a name, a bar and a figure. */
function line(label) {
  const name = h("span", { class: "mono line-name" });
  const note = h("span", { class: "tag" });
  const bar = new Bar(label);
  const value = h("span", { class: "num" });
  return {
    element: h("div", { class: "line" }, h("span", { class: "line-head" }, name, note), bar.element, value),
    update: (item) => {
      setText(name, item.name);
      setText(note, item.note);
      note.hidden = !item.note;
      bar.update([{ class: `fill ${item.tone}`, share: item.share }], item.text);
      setText(value, item.text);
    },
  };
}

class Tier {
  constructor() {
    this.name = h("h4");
    this.badge = h("span", { class: "badge" });
    this.store = h("p", { class: "foot mono" });
    this.bar = new Bar("Fill");
    this.fill = h("span");
    this.facts = ["Pages", "Hit share", "Evicted", "Damaged"].map((name) => ({ name, value: h("dd") }));
    this.element = h("article", { class: "card" },
      h("header", {}, h("span", { class: "dot", "aria-hidden": "true" }), this.name, this.badge),
      h("div", { class: "meter" }, h("div", { class: "meter-head" }, h("span", { text: "Fill" }), this.fill), this.bar.element),
      h("dl", { class: "facts of-4" }, ...this.facts.map(({ name, value }) => h("div", {}, h("dt", { text: name }), value))),
      h("footer", {}, this.store));
  }

  update({ store, tier }) {
    this.element.dataset.tone = tier.available ? "ok" : "bad";
    setText(this.name, MEDIA[tier.medium] ?? tier.medium);
    setText(this.badge, tier.available ? "available" : "not available");
    setText(this.store, store.instance);
    const size = tier.capacity_bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}` : bytes(tier.used_bytes);
    setText(this.fill, size);
    this.bar.update([{ class: "fill blue", share: tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0 }], size);
    const values = [number(tier.pages), percent(tier.hits, tier.hits + tier.misses), number(tier.evictions), number(tier.corrupt + tier.errors)];
    this.facts.forEach(({ value }, index) => setText(value, values[index]));
  }
}

export class Kv {
  constructor() {
    this.share = new Figure("Prompt tokens from caches");
    this.pages = new Figure("Pages on devices");
    this.stored = new Figure("Pages in kvstores");
    this.transfers = new Figure("Open transfers", { spark: true });
    byId("kv-figures").append(...[this.share, this.pages, this.stored, this.transfers].map((one) => one.element));
    this.hits = new KeyedList(byId("hits"), () => line("Hit share"), "No request has ended yet.");
    this.holders = new KeyedList(byId("holders"), () => line("Pages"), "No service has reported pages yet.");
    this.tiers = new KeyedList(byId("stores"), () => new Tier(), "Discovery lists no kvstore.");
  }

  update({ replicas, kv }) {
    const ended = replicas.filter((replica) => replica.ended);
    const sum = (name) => ended.reduce((total, replica) => total + replica.ended[name], 0);
    this.share.update(percent(sum("cached_tokens"), sum("prompt_tokens")), `${number(sum("cached_tokens"))} of ${number(sum("prompt_tokens"))} tokens`);
    const held = (service) => kv.holders.filter((one) => one.service === service).reduce((total, one) => total + one.pages, 0);
    const referenced = replicas.reduce((total, replica) => total + replica.referenced_pages, 0);
    this.pages.update(number(held("scheduler")), `${number(referenced)} in use by requests`);
    this.stored.update(number(held("kvstore")));
    const open = replicas.reduce((total, replica) => total + replica.open_transfers, 0);
    const rate = Math.max(0, ...replicas.map((replica) => Math.max(replica.pull_bytes_per_s, replica.near_pull_bytes_per_s)));
    this.transfers.update(number(Math.max(open, kv.open_transfers)), rate ? `fastest pull ${bytes(rate)}/s` : "no pull yet", open);
    this.hits.update(ended.map((replica) => ({
      name: replica.instance,
      note: replica.role === "both" ? "" : replica.role,
      tone: "accent",
      share: replica.ended.prompt_tokens ? replica.ended.cached_tokens / replica.ended.prompt_tokens : 0,
      text: `${percent(replica.ended.cached_tokens, replica.ended.prompt_tokens)} of ${number(replica.ended.prompt_tokens)} tokens`,
    })), (item) => item.name);
    const most = Math.max(1, ...kv.holders.map((one) => one.pages));
    this.holders.update(kv.holders.map((one) => ({
      name: one.instance,
      note: one.service === "kvstore" ? "kvstore" : "device",
      tone: one.service === "kvstore" ? "violet" : "blue",
      share: one.pages / most,
      text: `${number(one.pages)} pages`,
    })), (item) => `${item.note} ${item.name}`);
    const tiers = kv.stores.flatMap((store) => store.tiers.map((tier) => ({ store, tier })));
    this.tiers.update(tiers, ({ store, tier }) => `${store.instance} ${tier.medium}`);
  }
}

// The console: access, sections and actions. The key is only in this module's memory.

import { byId, setText, show } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Kv } from "./kv.js";
import { LiveStream, Refused, refusal } from "./live_stream.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";

const SECTIONS = ["fleet", "requests", "kv", "playground"];
let key = "";
let stream = null;
let open = [];
let toastTimer = 0;

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
const act = {
  cancel: (request) =>
    confirmAction({
      title: "Cancel this request?",
      text: `${request.request_id} of ${request.tenant || "a client without a key"} ends now. Its client gets an error.`,
      verb: "Cancel the request",
      run: () => post("cancel", { number: request.number, request_id: request.request_id }, "The request was cancelled."),
    }),
  drain: (replica) =>
    confirmAction({
      title: `Drain ${replica.instance}?`,
      text: "It refuses new requests and finishes those that it has. It serves again only after its scheduler is restarted.",
      verb: "Drain the replica",
      run: () => post("drain", { instance: replica.instance }, `${replica.instance} is draining.`),
    }),
  role: (replica) =>
    confirmAction({
      title: `Change the role of ${replica.instance}`,
      text: "It refuses requests that the new role does not serve, finishes those that it has, and then changes its role.",
      verb: "Change the role",
      role: replica.role,
      run: (role) => post("role", { instance: replica.instance, role }, `${replica.instance} becomes ${role}.`),
    }),
  pause: () =>
    confirmAction({
      title: "Pause this router?",
      text: "It refuses new requests until it resumes. Running requests go on.",
      verb: "Pause the router",
      run: () => post("pause", {}, "The router is paused."),
    }),
  resume: () =>
    confirmAction({ title: "Resume this router?", text: "It admits requests again.", verb: "Resume", run: () => post("resume", {}, "The router admits requests.") }),
};

const fleet = new Fleet(act);
const requests = new Requests(act.cancel);
const kv = new Kv();
const playground = new Playground(headers);

function heard(snapshot) {
  setText(byId("where"), snapshot.router.instance);
  fleet.update(snapshot);
  requests.update(snapshot);
  kv.update(snapshot);
  playground.sawRequests([...snapshot.requests.rows, ...snapshot.requests.recent]);
  const bad = snapshot.problems.length;
  count("count-fleet", bad, snapshot.problems.some((one) => one.severity === "bad") ? "bad" : "warn", "problems");
  count("count-requests", snapshot.requests.running, "plain", "requests run");
}

function count(id, value, tone, noun) {
  const element = byId(id);
  show(element, value > 0);
  element.dataset.tone = tone;
  element.title = `${value} ${noun}`;
  setText(element, value > 999 ? "999+" : value);
}

function changed(state) {
  const link = byId("link");
  show(link, true);
  link.dataset.tone = { live: "ok", lost: "warn" }[state] ?? "bad";
  setText(link, { live: "Live", lost: "Reconnecting" }[state] ?? "Key refused");
  document.body.classList.toggle("stale", state !== "live");
}

/** Find out which sections the key opens, and show them. */
async function enter() {
  const next = new LiveStream(headers, heard, changed);
  let why = null;
  const watches = await next.start().then(
    () => true,
    (error) => {
      why = error;
      return false;
    },
  );
  const models = await fetch("v1/models", { headers: headers(), cache: "no-store" }).catch(() => null);
  if (!watches && !models?.ok) {
    if (models && why instanceof Refused && why.status === 403) why = await refusal(models);
    signIn(key && why ? why.message : "");
    return;
  }
  stream = watches ? next : null;
  if (why instanceof Refused && why.status === 429) toast(why.message);
  open = watches ? SECTIONS.filter((name) => name !== "playground" || models?.ok) : ["playground"];
  if (models?.ok) playground.setModels((await models.json()).data.map((model) => model.id));
  show(byId("sign-in"), false);
  show(byId("tabs"), open.length > 1);
  show(byId("sign-out"), Boolean(key));
  document.querySelectorAll("#tabs button").forEach((button) => show(button, open.includes(button.dataset.tab)));
  select();
}

function signIn(why) {
  show(byId("sign-in"), true);
  setText(byId("sign-in-error"), why);
  byId("key").focus();
}

function select() {
  const wanted = location.hash.slice(2);
  const chosen = open.includes(wanted) ? wanted : open[0];
  for (const name of SECTIONS) show(byId(name), name === chosen);
  document.querySelectorAll("#tabs button").forEach((button) => {
    if (button.dataset.tab === chosen) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  });
  document.body.dataset.section = chosen ?? "";
  scrollTo(0, 0);
}

async function post(action, body, done) {
  const answer = await fetch(`console/${action}`, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    cache: "no-store",
  });
  if (!answer.ok) throw await refusal(answer);
  toast(done);
}

/** Ask the operator to confirm an action. `run` gets the chosen role, if the action has one. */
function confirmAction({ title, text, verb, run, role }) {
  const dialog = byId("confirm");
  const button = byId("confirm-do");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-error"), "");
  setText(button, verb);
  show(byId("confirm-choice"), Boolean(role));
  if (role) byId("confirm-role").value = role;
  button.onclick = async () => {
    button.disabled = true;
    try {
      await run(byId("confirm-role").value);
      dialog.close();
    } catch (error) {
      setText(byId("confirm-error"), error.message);
    } finally {
      button.disabled = false;
    }
  };
  dialog.showModal();
}

function toast(text) {
  const element = byId("toast");
  setText(element, text);
  show(element, true);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => show(element, false), 5000);
}

byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  enter();
});
byId("sign-out").addEventListener("click", () => {
  stream?.stop();
  location.reload();
});
byId("tabs").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) location.hash = `/${button.dataset.tab}`; // no element has such an id, to which a browser would scroll
});
addEventListener("hashchange", select);
enter();

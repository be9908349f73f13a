"""Walks through the console in Chromium, and takes its pictures. Prints a line for each check that holds.

Runs in an environment of its own: see environment.txt. Any check that fails ends it with a traceback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from load import Load
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

URL = os.environ["CONSOLE_URL"]
KEYS = json.loads(os.environ["CONSOLE_KEYS"])
WORKERS = json.loads(os.environ["CONSOLE_WORKERS"])
PICTURES = Path(os.environ["CONSOLE_PICTURES"])
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SECTIONS = ("fleet", "requests", "kv", "playground")
LIMIT_MS = 90_000
# A text that is at least so distinct is readable (WCAG AA).
LEAST_CONTRAST = 4.5
# A client may send it as an id, and no page may take it for HTML.
MARKUP = "<img src=x onerror=document.title='hacked'>"
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((value, i) => (i < 3 ? value : value / 255));
  };
  const over = (top, below) => below.map((value, i) => (i < 3 ? top[i] * top[3] + value * (1 - top[3]) : 1));
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(rgba(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = color.map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest("noscript, option")) continue;
    const ground = behind(element);
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), ground)), light(ground)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, element.className || element.tagName, element.textContent.trim().slice(0, 40)]);
  }
  return { ground: light(behind(document.body)), texts: found };
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, summary, a")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !(element.labels?.length || element.getAttribute("aria-label") || element.textContent.trim()))
  .map((element) => element.outerHTML.slice(0, 120))"""


def ok(check: str) -> None:
    print(f"ok {check}", flush=True)


class Console:
    """One page of the console, and all that its browser asked and complained of."""

    def __init__(self, browser: Browser, *, viewport: dict[str, int], scheme: str, scale: float = 1.0) -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, device_scale_factor=scale)
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", self._asked)
        self.page.on("console", lambda told: self.complaints.append(told.text) if told.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(f"{URL}/console")

    def _asked(self, request: Request) -> None:
        self.urls.append(request.url)

    def sign_in(self, key: str) -> None:
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Open").click()

    def go(self, section: str) -> None:
        self.page.locator(f"#tabs button[data-tab={section}]").click()
        expect(self.page.locator(f"#{section}")).to_be_visible()

    def say(self, text: str) -> None:
        self.page.locator("#prompt").fill(text)
        self.page.locator("#prompt").press("Enter")

    def check_policy(self) -> None:
        """The page's policy was not violated, and the browser complained of nothing but refused keys."""
        assert self.page.evaluate("window.violations") == []
        unexpected = [text for text in self.complaints if not re.search(r"status of 40[13] ", text)]
        assert not unexpected, unexpected

    def take(self, name: str) -> None:
        expect(self.page.locator("#toast")).to_be_hidden()
        self.page.screenshot(path=str(PICTURES / f"console-{name}.png"))


def figures_of(page: Page) -> str:
    return str(page.locator(".answer-figures").last.text_content())


def tokens_of(page: Page) -> int:
    found = re.search(r"(\d+) tokens", figures_of(page))
    return int(found[1]) if found else 0


def until(holds: Callable[[], object], what: str, limit_s: float = LIMIT_MS / 1000) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def check_keys(browser: Browser) -> None:
    console = Console(browser, viewport=DESKTOP, scheme="light")
    page = console.page
    expect(page.get_by_role("heading", name="Console")).to_be_visible()
    console.sign_in("no-key-at-all")
    expect(page.locator("#sign-in-error")).to_contain_text("not known")
    expect(page.locator("#tabs")).to_be_hidden()
    ok("a wrong key opens nothing")
    console.sign_in(KEYS["alice"])
    expect(page.locator("#playground")).to_be_visible()
    expect(page.locator("#tabs")).to_be_hidden()
    expect(page.locator("#fleet")).to_be_hidden()
    assert page.locator("#model option").all_text_contents() == ["shakespeare"]
    page.goto(f"{URL}/console#/fleet")
    console.check_policy()
    console.context.close()
    ok("a key without the scope opens the playground alone")


def check_memory(console: Console) -> None:
    page, key = console.page, KEYS["operator"]
    kept = "[localStorage.length, sessionStorage.length, document.cookie, document.body.outerHTML, location.href]"
    local, session, cookie, html, url = page.evaluate(kept)
    assert (local, session, cookie) == (0, 0, "") and key not in html and key not in url
    assert page.evaluate("document.getElementById('key').value") == ""
    assert len(console.urls) > 10 and not [url for url in console.urls if key in url]
    assert {url.split("/")[2] for url in console.urls} == {URL.split("/")[2]}, "nothing is loaded from elsewhere"
    ok("the key is in no URL and in no storage")


def check_chat(console: Console) -> None:
    page = console.page
    console.go("playground")
    page.locator("#max_tokens").fill("60")
    console.say("Speak to me of love, sweet Romeo.")
    expect(page.locator("#send")).to_be_visible()
    assert str(page.locator(".message.assistant .words").last.text_content()).strip()
    told = figures_of(page)
    assert re.search(r"first token [\d.]+ m?s", told) and re.search(r"[\d.]+ tokens/s", told), told
    assert any(instance in told for instance in WORKERS), told
    page.get_by_text("Where the time went").click()
    expect(page.locator(".times .waterfall li").first).to_be_visible()
    ok("a chat shows its first token, its speed and its replica")


def check_text_stays_text(console: Console) -> None:
    """The answer of a model that writes HTML is made here; ids and names with HTML come from real requests."""
    page = console.page
    nasty = f"{MARKUP}<script>document.title='hacked'</script><b>bold</b>"
    chunk = {"choices": [{"index": 0, "delta": {"content": nasty}}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    console.say(nasty)
    expect(page.locator(".message.assistant .words").last).to_have_text(nasty)
    expect(page.locator(".message.user .words").last).to_have_text(nasty)
    page.unroute("**/v1/chat/completions")
    console.go("requests")
    with Load(URL, KEYS, {"alice": 1}, 600, prefix=MARKUP):
        expect(page.locator("#running .id", has_text=MARKUP).first).to_be_visible()
    assert page.locator("main img, main b:text('bold'), main script").count() == 0
    assert page.title() == "Quire console"
    ok("text of models, tenants and clients stays text")


def check_killed_worker(console: Console) -> None:
    page = console.page
    console.go("playground")
    page.get_by_role("button", name="New conversation").click()
    page.locator("#mode").select_option("completion")
    page.locator("#max_tokens").fill("400")
    console.say("JULIET:\nO Romeo, Romeo!")
    until(
        lambda: tokens_of(page) >= 40 and any(instance in figures_of(page) for instance in WORKERS), "some tokens of it"
    )
    before = figures_of(page)
    ran = next(instance for instance in WORKERS if instance in before)
    os.kill(WORKERS[ran], signal.SIGKILL)
    (other,) = WORKERS.keys() - {ran}
    expect(page.locator(".moved")).to_contain_text(f"went on at {other}")
    console.take("migration")
    expect(page.locator("#send")).to_be_visible()
    told = figures_of(page)
    assert "1 migration" in told and not page.locator(".message .error:not(:empty)").count(), told
    ok("a stream goes on after its worker was killed")
    console.go("fleet")
    expect(page.locator("#fleet .replica .badge", has_text="ready")).to_have_count(2)


def check_cancel(console: Console) -> None:
    """The request lasts 50 s, so that it still runs when its row is opened and its button is pressed."""
    page = console.page
    console.go("requests")
    with Load(URL, KEYS, {"alice": 1}, max_tokens=2000, prefix="long-request-") as load:
        name = "long-request-0"
        row = page.locator("#running .row", has_text=name)
        row.locator(".row-head").click()
        expect(row.locator(".waterfall li").first).to_be_visible()
        console.take("requests")
        row.get_by_role("button", name="Cancel…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(name)
        dialog.get_by_role("button", name="Cancel the request").click()
        expect(dialog).to_be_hidden()
        expect(row).to_have_count(0)
        until(lambda: any("CANCELLED_BY_OPERATOR" in error for error in load.errors), "the client's error")
    ok("an operator cancels a request")


def check_drain(console: Console) -> None:
    page = console.page
    console.go("fleet")
    expect(page.locator("#problems .calm")).to_be_visible()
    console.take("fleet")
    last = page.locator("#fleet .replica").last
    name = str(last.locator("h4").text_content())
    last.get_by_role("button", name=f"Drain {name}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Keep as it is")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(last.locator(".badge")).to_have_text("ready")
    last.get_by_role("button", name=f"Drain {name}").click()
    dialog.get_by_role("button", name="Drain the replica").click()
    expect(page.locator("#fleet .replica").first.locator("h4")).to_have_text(name)
    expect(page.locator("#fleet .replica").first.locator(".badge")).to_have_text("draining")
    expect(page.locator(".problem", has_text=name)).to_contain_text("Drain")
    ok("a drained replica is told of first")


def check_keyboard(console: Console) -> None:
    page = console.page
    for section in SECTIONS:
        console.go(section)
        assert page.evaluate(NAMELESS) == []
    page.locator("#tabs button[data-tab=fleet]").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#requests")).to_be_visible()
    page.locator("#running .row-head").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#running .row-head[aria-expanded=true]")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("#running .row-head[aria-expanded=true]")).to_have_count(0)
    ok("every control has a name and is reached by the keyboard")


def readable(page: Page) -> float:
    """Check the contrast of all visible texts; return how light the page is, 0 to 1."""
    found = page.evaluate(CONTRASTS)
    assert len(found["texts"]) > 10
    poor = [text for text in found["texts"] if text[0] < LEAST_CONTRAST]
    assert not poor, poor
    return float(found["ground"])


def check_sizes(browser: Browser, desktop: Console) -> list[Console]:
    phone = Console(browser, viewport=PHONE, scheme="light", scale=2.0)
    phone.sign_in(KEYS["operator"])
    for section in SECTIONS:
        phone.go(section)
        width = phone.page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], (section, width)
        time.sleep(1.5)  # a few figures for the lines
        if section == "fleet":
            phone.take("phone")
    ok("nothing is wider than a phone")
    dark = Console(browser, viewport=DESKTOP, scheme="dark")
    dark.sign_in(KEYS["operator"])
    for section in SECTIONS:
        for console in (dark, desktop):
            console.go(section)
        time.sleep(1.5)
        assert readable(dark.page) < 0.05, "dark"
        assert readable(desktop.page) > 0.7, "light"
        if section == "kv":
            dark.take("dark")
    dark.go("fleet")
    time.sleep(8)
    dark.take("draining")
    ok("the dark scheme is dark, and texts are readable in both")
    return [phone, dark]


def main() -> None:
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["CONSOLE_BROWSER"],
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        check_keys(browser)
        streams = {"alice": 2, "nightly-batch": 3, "search-team": 1}
        with Load(URL, KEYS, streams, max_tokens=300):
            console = Console(browser, viewport=DESKTOP, scheme="light")
            console.sign_in(KEYS["operator"])
            for section in SECTIONS:
                console.go(section)
            ok("the operator's key opens all sections")
            check_memory(console)
            check_chat(console)
            check_text_stays_text(console)
            check_killed_worker(console)
            check_cancel(console)
            check_drain(console)
            check_keyboard(console)
            others = check_sizes(browser, console)
            for one in (console, *others):
                one.check_policy()
            ok("the policy of the page was not violated")
        browser.close()


if __name__ == "__main__":
    sys.exit(main())

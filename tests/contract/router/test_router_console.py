"""The console over real sockets: who may see what, what a snapshot says, and what the actions do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire_common.errors import PermissionDenied
from quire_router.front.http.console import events
from quire_router.front.http.open_paths import CONSOLE_FILES
from tests.certificates import replace
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

OPERATOR, CLIENT = "key-of-an-operator", "key-of-a-client"
EVENTS = "/console/events"
SECRET = "a word that no console may show"


def key_file_of(path: Path, *names: str) -> str:
    keys = {"operator": (OPERATOR, "[admin]"), "alice": (CLIENT, "[inference]")}
    entries = [
        f"- {{name: {name}, sha256: {hashlib.sha256(keys[name][0].encode()).hexdigest()}, scopes: {keys[name][1]}}}\n"
        for name in names
    ]
    replace(path, f"keys:\n{''.join(entries)}".encode())
    return str(path)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return key_file_of(tmp_path / "keys.yaml", "operator", "alice")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def snapshots(rig: RouterRig, key: str = OPERATOR, **headers: str) -> AsyncIterator[AsyncIterator[Any]]:
    """The snapshots of one console."""
    async with rig.http.stream("GET", EVENTS, headers={**bearer(key), **headers}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")

        async def each() -> AsyncIterator[Any]:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

        yield each()


async def when(seen: AsyncIterator[Any], wanted: Any) -> Any:
    """The first snapshot for which `wanted` holds."""
    async with asyncio.timeout(20):
        async for snapshot in seen:
            if wanted(snapshot):
                return snapshot
    raise AssertionError("the stream ended first")


async def act(rig: RouterRig, action: str, key: str = OPERATOR, **body: Any) -> httpx.Response:
    return await rig.http.post(f"/console/{action}", json=body, headers=bearer(key))


async def test_page_needs_no_key_and_its_policy_allows_nothing_but_its_own_files(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig:
        for path in CONSOLE_FILES:
            answer = await rig.http.get(path)
            assert answer.status_code == 200 and answer.content, path
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["referrer-policy"] == "no-referrer"


def static_files() -> dict[str, str]:
    folder = Path(events.__file__).parent / "static"
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_every_file_of_the_page_is_served() -> None:
    assert sorted(static_files()) == sorted(CONSOLE_FILES.values())


def test_page_loads_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    for name, text in static_files().items():
        outside = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", text.replace("http://www.w3.org/2000/svg", ""))
        assert not outside, (name, outside)
    page = static_files()["index.html"]
    assert not re.search(r"\son[a-z]+\s*=|<style|\sstyle=|javascript:", page)
    assert re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL) == [
        (' type="module" src="console/console.js"', "")
    ]


def test_key_stays_in_memory_and_text_never_becomes_html() -> None:
    """The browser test shows it in a browser; this one keeps the ways closed."""
    banned = (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment",
        "eval(", "new Function", "localStorage", "sessionStorage", "indexedDB", "document.cookie", "pushState",
        "replaceState", "location.search", "location.href =", "setAttribute(\"style\"", "console.log", "srcdoc",
    )  # fmt: skip
    for name, text in static_files().items():
        assert not [word for word in banned if word in text], name
    page = static_files()["index.html"]
    fields = re.findall(r"<input[^>]*type=\"password\"[^>]*>", page)
    assert len(fields) == 1 and " name=" not in fields[0], "a field without a name is in no URL"


async def test_stream_and_actions_are_refused_without_the_scope(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig:
        refused = [("GET", EVENTS), *(("POST", f"/console/{name}") for name in ("cancel", "drain", "role", "pause"))]
        for method, path in refused:
            assert (await rig.http.request(method, path)).status_code == 401, path
            assert (await rig.http.request(method, path, headers=bearer("unknown"))).status_code == 401, path
            answer = await rig.http.request(method, path, headers=bearer(CLIENT))
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "SCOPE_MISSING", path
            answer = await rig.http.request(method, f"{path}?key={OPERATOR}")
            assert answer.status_code == 401, "a key in the URL is no key"
        assert not rig.scheduler.drains and rig.router.admission.open


async def test_snapshot_shows_the_fleet_and_requests_by_tenant_and_never_a_prompt(key_file: str) -> None:
    scheduler = FakeScheduler(cached_tokens=3)
    in_a_month = int(time.time()) + 30 * 86_400
    scheduler.rates = {
        "pages": 50, "free_pages": 20, "referenced_pages": 5, "step_ms": 2.5, "oldest_wait_ms": 70, "version": "9.8",
        "certificate_expiry_unix_s": in_a_month,
    }  # fmt: skip
    names = ("its-name", "another-name")
    async with (
        router_rig([scheduler], api_key_file=key_file, served_model_name=names) as rig,
        snapshots(rig) as seen,
    ):
        scheduler.gate.clear()
        asking = asyncio.create_task(
            rig.http.post(
                "/v1/completions",
                json={"model": "another-name", "prompt": SECRET, "max_tokens": 5, "request_id": "mine"},
                headers=bearer(CLIENT),
            )
        )
        snapshot = await when(seen, lambda one: one["requests"]["rows"])
        (row,) = snapshot["requests"]["rows"]
        assert (row["tenant"], row["request_id"], row["model"]) == ("alice", "mine", "another-name")
        assert (row["state"], row["attempts"], row["output_tokens"], row["max_tokens"]) == ("queued", 1, 0, 5)
        (replica,) = snapshot["replicas"]
        assert row["runs"] == [{"instance": replica["instance"], "from_token": 0}]
        assert {hop["phase"] for hop in row["hops"]} >= {"parse", "tokenize", "place", "to first token"}
        assert (replica["phase"], replica["model"], replica["accepts"]) == ("ready", "its-name", True)
        assert (replica["pages"], replica["referenced_pages"], replica["step_ms"]) == (50, 5, 2.5)
        assert (replica["oldest_wait_ms"], replica["version"]) == (70, "9.8")
        # Other tests have watched certificates in this process too.
        (certificate,) = (one for one in snapshot["certificates"] if one["subject"] == replica["instance"])
        assert 0 < certificate["seconds_left"] <= 30 * 86_400
        assert snapshot["requests"]["tenants"] == [{"tenant": "alice", "running": 1}]
        assert snapshot["actions"]
        assert not [one for one in snapshot["problems"] if one["subject"] in ("fleet", replica["instance"])]
        scheduler.gate.set()
        assert (await asking).status_code == 200
        snapshot = await when(seen, lambda one: one["requests"]["recent"])
        (row,) = snapshot["requests"]["recent"]
        assert (row["state"], row["output_tokens"], row["cached_tokens"]) == ("ended", 5, 3)
        assert ("worker", "decode") in {(hop["service"], hop["phase"]) for hop in row["hops"]}
        (replica,) = snapshot["replicas"]
        assert replica["ended"] == {
            "requests": 1, "prompt_tokens": row["prompt_tokens"], "cached_tokens": 3, "output_tokens": 5,
        }  # fmt: skip
        assert SECRET not in json.dumps(snapshot) and SECRET[:10] not in json.dumps(snapshot)


async def test_restart_of_a_worker_is_counted(key_file: str) -> None:
    scheduler = FakeScheduler()
    scheduler.rates = {"epoch": {"boot_id": 1}}
    async with router_rig([scheduler], api_key_file=key_file) as rig, snapshots(rig) as seen:
        await when(seen, lambda one: one["replicas"][0]["restarts"] == 0)
        scheduler.rates = {"epoch": {"boot_id": 2}}
        scheduler.report()
        await when(seen, lambda one: one["replicas"][0]["restarts"] == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_request_ends_with_an_error_for_its_client(key_file: str, stream: bool) -> None:
    async with router_rig(api_key_file=key_file) as rig, snapshots(rig) as seen:
        rig.scheduler.gate.clear()
        body = {"model": "fake", "prompt": "a", "max_tokens": 5, "stream": stream}
        asking = asyncio.create_task(rig.http.post("/v1/completions", json=body, headers=bearer(CLIENT)))
        row = (await when(seen, lambda one: one["requests"]["rows"]))["requests"]["rows"][0]
        other = await act(rig, "cancel", number=row["number"], request_id="another")
        assert other.status_code == 404 and other.json()["error"]["code"] == "NO_SUCH_REQUEST"
        assert (await act(rig, "cancel", number=row["number"], request_id=row["request_id"])).status_code == 200
        answer = await asyncio.wait_for(asking, 20)
        assert answer.status_code == 499 and answer.json()["error"]["code"] == "CANCELLED_BY_OPERATOR"
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 20)
        await when(seen, lambda one: not one["requests"]["rows"])
        again = await act(rig, "cancel", number=row["number"], request_id=row["request_id"])
        assert again.status_code == 404


async def test_actions_reach_the_scheduler_and_the_audit_log_names_key_and_subject(
    key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_rig(api_key_file=key_file, drain_timeout_s=7.0) as rig, snapshots(rig) as seen:
        instance = (await anext(seen))["replicas"][0]["instance"]
        with caplog.at_level(logging.INFO, "quire.audit"):
            assert (await act(rig, "role", instance=instance, role="prefill")).json() == {"state": "done"}
            await when(seen, lambda one: one["replicas"][0]["role"] == "prefill")
            assert (await act(rig, "drain", instance=instance)).json() == {"state": "done"}
            assert (await act(rig, "drain", instance="nobody")).status_code == 404
            assert (await act(rig, "drain", CLIENT, instance=instance)).status_code == 403
        assert [(one.role, one.drain_timeout_ms) for one in rig.scheduler.roles] == [("prefill", 7_000)]
        assert [one.timeout_ms for one in rig.scheduler.drains] == [7_000]
        snapshot = await when(seen, lambda one: one["replicas"][0]["phase"] == "draining")
        # The replica has no requests, so it is drained as soon as it drains.
        assert "Drain" in json.dumps(snapshot["problems"])
        lines = [line for line in audit_lines(caplog) if line["action"].startswith("POST")]
        told = [tuple(map(line.get, ("action", "outcome", "api_key_name", "subject"))) for line in lines]
        assert told == [
            ("POST /console/role", "allowed", "operator", f"{instance} prefill"),
            ("POST /console/drain", "allowed", "operator", instance),
            ("POST /console/drain", "NO_SUCH_REPLICA", "operator", ""),
            ("POST /console/drain", "SCOPE_MISSING", "alice", ""),
        ]


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "quire.audit"]


async def test_drain_that_takes_long_is_answered_and_a_second_one_is_refused(
    key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_router.front.http.console.actions._REFUSAL_S", 0.1)
    async with router_rig(api_key_file=key_file) as rig, snapshots(rig) as seen:
        instance = (await anext(seen))["replicas"][0]["instance"]
        rig.scheduler.obedient.clear()
        assert (await act(rig, "drain", instance=instance)).json() == {"state": "under way"}
        second = await act(rig, "role", instance=instance, role="both")
        assert second.status_code == 409 and second.json()["error"]["code"] == "ACTION_UNDER_WAY"
        rig.scheduler.obedient.set()


async def test_refusal_of_a_scheduler_is_told(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_fake: FakeScheduler, _request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        raise PermissionDenied("CALLER_NOT_ALLOWED", "This router may not drain.", "Ask the operator.")

    monkeypatch.setattr(FakeScheduler, "Drain", refuse)
    async with router_rig(api_key_file=key_file) as rig, snapshots(rig) as seen:
        instance = (await anext(seen))["replicas"][0]["instance"]
        answer = await act(rig, "drain", instance=instance)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "CALLER_NOT_ALLOWED"


async def test_paused_router_refuses_requests_until_it_resumes(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig, snapshots(rig) as seen:
        body = {"model": "fake", "prompt": "a", "max_tokens": 1}
        assert (await act(rig, "pause")).status_code == 200
        await when(seen, lambda one: one["router"]["paused"])
        assert (await rig.http.post("/v1/completions", json=body, headers=bearer(CLIENT))).status_code == 503
        assert (await act(rig, "resume")).status_code == 200
        await when(seen, lambda one: not one["router"]["paused"])
        assert (await rig.http.post("/v1/completions", json=body, headers=bearer(CLIENT))).status_code == 200


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("cancel", {"number": "1", "request_id": "a"}),
        ("cancel", {"request_id": "a"}),
        ("cancel", {"number": 1}),
        ("drain", {}),
        ("drain", {"instance": "a" * 1000}),
        ("role", {"instance": "a"}),
        ("pause", {"more": 1}),
        ("pause", {"more": "x" * 10_000}),
    ],
)
async def test_malformed_action_is_refused(key_file: str, action: str, body: dict[str, Any]) -> None:
    async with router_rig(api_key_file=key_file) as rig:
        assert (await act(rig, action, **body)).status_code in (400, 404, 413)
        assert rig.router.admission.open


async def test_another_page_cannot_act_with_a_form_or_see_anything(key_file: str) -> None:
    """A form has no header of its own, and a page of another origin may not read an answer or set the header."""
    async with router_rig(api_key_file=key_file) as rig:
        origin = {"Origin": "https://elsewhere.example"}
        form = {**bearer(OPERATOR), **origin, "Content-Type": "application/x-www-form-urlencoded"}
        assert (await rig.http.post("/console/pause", content=b"a=b", headers=form)).status_code == 400
        assert rig.router.admission.open
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for path in (EVENTS, "/console/pause"):
            preflight = await rig.http.options(path, headers=asked)
            assert not [name for name in preflight.headers if name.startswith("access-control")], path


async def test_router_without_keys_shows_itself_to_its_own_machine_and_lets_no_page_act() -> None:
    async with router_rig() as rig:
        async with rig.http.stream("GET", EVENTS) as answer:
            assert answer.status_code == 200
            line = await anext(answer.aiter_lines())
            assert json.loads(line.removeprefix("data: "))["actions"] is False
        for headers in (
            {"Origin": "https://elsewhere.example"},
            {"Host": "rebound.example"},
            {"Host": "[broken"},
            {"X-Forwarded-For": "10.1.2.3"},
        ):
            refused = await rig.http.get(EVENTS, headers=headers)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "ADMIN_NEEDS_KEY", headers
            assert (await rig.http.post("/console/pause", json={}, headers=headers)).status_code == 403, headers
        own_page = {"Origin": str(rig.http.base_url).rstrip("/")}
        assert (await rig.http.post("/console/pause", json={}, headers=own_page)).status_code == 403
        assert rig.router.admission.open


async def test_one_console_more_than_the_limit_is_refused(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WATCHERS", 2)
    async with router_rig(api_key_file=key_file) as rig, contextlib.AsyncExitStack() as stack:
        consoles = [await stack.enter_async_context(snapshots(rig)) for _ in range(2)]  # one that is let go of ends
        for console in consoles:
            await anext(console)
        full = await rig.http.get(EVENTS, headers=bearer(OPERATOR))
        assert full.status_code == 429 and full.json()["error"]["code"] == "CONSOLE_FULL"
        await stack.aclose()
        async with asyncio.timeout(20):  # the router has yet to see that they left
            while (await probe(rig)) != 200:
                await asyncio.sleep(0.02)


async def probe(rig: RouterRig) -> int:
    async with rig.http.stream("GET", EVENTS, headers=bearer(OPERATOR)) as answer:
        return answer.status_code


async def test_stream_ends_when_its_key_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key_file_of(file, "operator", "alice")
    async with router_rig(api_key_file=str(file)) as rig, snapshots(rig) as seen:
        await anext(seen)
        key_file_of(file, "alice")
        async with asyncio.timeout(20):
            async for _ in seen:
                pass
        assert (await rig.http.get(EVENTS, headers=bearer(OPERATOR))).status_code == 401


async def test_page_counts_of_holders_are_shown(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig, snapshots(rig) as seen:
        rig.scheduler.pages.store([bytes([i]) * 32 for i in range(5)])
        snapshot = await when(seen, lambda one: any(holder["pages"] for holder in one["kv"]["holders"]))
        (holder,) = snapshot["kv"]["holders"]
        assert (holder["service"], holder["pages"]) == ("scheduler", 5)

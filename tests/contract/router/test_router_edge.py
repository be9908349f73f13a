"""The router's edge: keys on every route and call, tenants, traces across services, and the process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.routing import Route

from quire.v1 import inference_pb2 as ib
from quire_common.telemetry import tracing
from quire_router.front.http.open_paths import LIVE_PATHS, OPEN_PATHS, READY_PATHS
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.tiers import deep_after

ROOT = Path(__file__).resolve().parents[3]
KEYS = ("first-key", "second-key")


async def test_every_route_except_open_ones_requires_a_key() -> None:
    async with router_rig(api_key=KEYS, metrics_on_main=True) as rig:
        walked = set()
        for route in rig.router.routes.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                walked.add(route.path)
                bare = await rig.http.request(method, route.path)
                wrong = await rig.http.request(method, route.path, headers={"Authorization": "Bearer nope"})
                good = await rig.http.request(method, route.path, headers={"Authorization": f"Bearer {KEYS[1]}"})
                if route.path in OPEN_PATHS:
                    assert (bare.status_code, wrong.status_code) == (200, 200), route.path
                else:
                    assert (bare.status_code, wrong.status_code) == (401, 401), route.path
                    assert bare.headers["www-authenticate"] == "Bearer"
                assert good.status_code != 401, route.path
        assert walked > OPEN_PATHS > {*LIVE_PATHS, *READY_PATHS} and "/metrics" in walked
        for unknown in ("/nothing", "/v1", "/livez/", "/docs/", "/openapi"):
            assert (await rig.http.get(unknown)).status_code == 401


async def test_only_bearer_authorization_is_accepted() -> None:
    async with router_rig(api_key=KEYS) as rig:
        for header, status in (
            ("bearer first-key", 200),
            ("Bearer  first-key", 200),
            ("Basic first-key", 401),
            ("first-key", 401),
            ("Bearer", 401),
            ("Bearer first-key,second-key", 401),
            ("Bearer \xff", 401),
        ):
            answer = await rig.http.get("/v1/models", headers={b"Authorization": header.encode("latin-1")})
            assert answer.status_code == status, header
        wrong = await rig.http.get("/v1/models", headers={"Authorization": "Bearer x"})
        assert wrong.json()["error"]["type"] == "authentication_error"
        assert "first-key" not in wrong.text


async def test_keys_may_contain_non_ascii_characters() -> None:
    """Clients send a header's characters as UTF-8."""
    async with router_rig(api_key=("schlüssel",)) as rig:
        headers = {b"Authorization": "Bearer schlüssel".encode()}
        assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200


async def test_two_authorization_headers_are_refused() -> None:
    """What stands before the router may have looked at the other one."""
    async with router_rig(api_key=KEYS) as rig:
        for keys in (("nope", KEYS[0]), (KEYS[0], "nope")):
            headers = [("Authorization", f"Bearer {key}") for key in keys]
            assert (await rig.http.get("/v1/models", headers=headers)).status_code == 401


async def test_readyz_without_a_key_hides_addresses() -> None:
    async with router_rig(api_key=KEYS) as rig:
        bare = (await rig.http.get("/readyz")).json()
        wrong = (await rig.http.get("/readyz", headers={"Authorization": "Bearer nope"})).json()
        good = (await rig.http.get("/readyz", headers={"Authorization": f"Bearer {KEYS[0]}"})).json()
    assert bare == wrong
    assert bare["ready"] and bare["router"] == good["router"]
    assert bare["schedulers"] == [{name: good["schedulers"][0][name] for name in ("phase", "progress")}]
    assert bare["tokenizers"] == [{"phase": "ready"}]
    assert set(good["schedulers"][0]) > {"instance", "model", "detail"}


async def test_every_inference_method_requires_a_key() -> None:
    service = ib.DESCRIPTOR.services_by_name["Inference"]
    async with router_rig(api_key=KEYS) as rig, grpc.aio.insecure_channel(rig.grpc_address) as channel:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            for metadata, allowed in ((), False), ((("authorization", "Bearer first-key"),), True):
                code = await _code(channel, path, metadata, streaming=method.server_streaming)
                assert (code is not grpc.StatusCode.UNAUTHENTICATED) == allowed, method.name


async def _code(channel: grpc.aio.Channel, path: str, metadata: Any, *, streaming: bool) -> grpc.StatusCode:
    """An empty message is a valid, if useless, request of every method."""
    call: Any = channel.unary_stream(path) if streaming else channel.unary_unary(path)
    try:
        made = call(b"", metadata=metadata)
        await (made.read() if streaming else made)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_metrics_are_not_on_the_main_port_with_api_keys() -> None:
    async with router_rig() as rig:
        assert (await rig.http.get("/metrics")).status_code == 200
    async with router_rig(api_key=KEYS) as rig:
        headers = {"Authorization": "Bearer first-key"}
        assert (await rig.http.get("/metrics", headers=headers)).status_code == 404


async def test_tenants_share_prefix_pages_only_if_configured() -> None:
    async def salts(rig: RouterRig) -> list[str]:
        for key in KEYS:
            for extra in {}, {"cache_salt": "mine"}:
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "a", "max_tokens": 1, **extra}
                assert (await rig.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert len({s.context.tenant for s in rig.scheduler.submits}) == 2
        return [submit.sequence.cache_salt for submit in rig.scheduler.submits]

    async with router_rig(api_key=KEYS) as rig:
        found = await salts(rig)
        assert len(set(found)) == 4 and not any(key in salt for key in KEYS for salt in found)
    async with router_rig(api_key=KEYS, share_prefix_across_keys=True) as rig:
        assert await salts(rig) == ["", "mine", "", "mine"]


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("router", "test", "", processor=SimpleSpanProcessor(exporter))
    yield exporter
    tracing.shutdown_tracing()


async def test_trace_reaches_scheduler_and_tokenizer(spans: InMemorySpanExporter) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with router_rig() as rig:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        body = {"prompt": "a", "max_tokens": 3, "stop": ["zz"]}
        assert (await rig.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        submitted = rig.scheduler.submits[0].context.traceparent
        opened = rig.tokenizer.opens[0].context.traceparent
        encoded = rig.tokenizer.encode_contexts[0].traceparent
    found = {span.name: span for span in spans.get_finished_spans()}
    root = found["router.request"]
    assert root.context is not None and root.parent is not None
    assert f"{root.context.trace_id:032x}" == trace and f"{root.parent.span_id:016x}" == parent
    assert submitted == opened == encoded == f"00-{trace}-{root.context.span_id:016x}-01"
    for child in ("router.encode", "router.place"):
        above = found[child].parent
        assert above is not None and above.span_id == root.context.span_id
    client = found["quire.v1.Tokenizer/Encode"]
    assert client.context is not None and f"{client.context.trace_id:032x}" == trace
    assert root.attributes is not None and root.attributes["gen_ai.usage.output_tokens"] == 3
    assert [event.name for event in root.events] == ["first token"]


async def test_grpc_call_span_is_parent_of_the_request_span(spans: InMemorySpanExporter) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with router_rig() as rig:
        metadata = (("traceparent", f"00-{trace}-{parent}-01"),)
        request = ib.GenerateRequest(text="a", max_tokens=2)
        assert len([answer async for answer in rig.inference.Generate(request, metadata=metadata)]) == 2
    found = {span.name: span for span in spans.get_finished_spans()}
    root, call = found["router.request"], found["quire.v1.Inference/Generate"]
    assert root.parent is not None and call.context is not None and call.parent is not None
    assert root.parent.span_id == call.context.span_id and f"{call.parent.span_id:016x}" == parent


async def test_migration_is_in_the_trace_and_the_log(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with router_rig() as rig:
        rig.scheduler.breaks = [3]
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "X-Request-Id": "moved-1"}
        body = {"prompt": "abc", "max_tokens": 9}
        answer = await rig.http.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["text"] == "abcabcabc"
        assert rig.scheduler.submits[0].context.traceparent.split("-")[1] == trace
    found = {span.name: span for span in spans.get_finished_spans()}
    move, root = found["router.migrate"], found["router.request"]
    assert move.parent is not None and root.context is not None and move.parent.span_id == root.context.span_id
    assert move.attributes is not None and move.attributes["quire.reason"] == "session_lost"
    assert move.attributes["quire.attempt"] == 1
    assert [event.name for event in root.events] == ["first token", "migrated"]
    told = [record for record in caplog.records if "replicas" in record.name and hasattr(record, "fields")]
    fields = [record.fields for record in told if record.fields.get("request_id") == "moved-1"]
    assert [(f["attempt"], f["emitted"]) for f in fields] == [(0, 3), (1, 3)]


async def test_trace_context_is_forwarded_without_tracing() -> None:
    async with router_rig() as rig:
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
        await rig.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        context = rig.scheduler.submits[0].context
        assert (context.traceparent, context.tracestate) == (headers["traceparent"], "a=b")


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "quire_router", *flags]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environ)


def test_process_serves_at_once_and_ends_on_sigterm() -> None:
    process = start("--port=0", "--schedulers=127.0.0.1:1", "--tokenizers=127.0.0.1:1")
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        url = json.loads(line).get("url", "")
        if url:
            break
    readiness = httpx.get(f"{url}/readyz", timeout=30, trust_env=False)
    assert readiness.status_code == 503 and readiness.json()["schedulers"][0]["phase"] in ("connecting", "unreachable")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_keys_are_neither_logged_nor_on_the_command_line() -> None:
    command = [sys.executable, "-m", "quire_router", "--port=0", "--schedulers=127.0.0.1:1", "--tokenizers=127.0.0.1:1"]
    environ = {**os.environ, "QUIRE_ROUTER_API_KEY": "key-canary", "QUIRE_ROUTER_LOG_LEVEL": "debug"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if url := json.loads(line).get("url", ""):
            break
    for key, status in (("key-canary", 503), ("wrong-canary", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == status and "canary" not in answer.text
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "request" in rest and "canary" not in "".join(seen) + rest


@pytest.mark.parametrize(
    ("flags", "code"),
    deep_after(
        2,
        [
            (["--port={taken}"], "PORT_IN_USE"),
            (["--port=0", "--api-key-file=/nothing/here"], "API_KEY_FILE"),
            (["--port=0", "--ssl-certfile=/nothing/here", "--ssl-keyfile=/nothing"], "TLS_FILE"),
            (["--port=0", "--ssl-keyfile=/nothing", "--schedulers=x:1", "--tokenizers=x:1"], "TLS_FILE"),
            (["--port=0", "--placement=magic"], "BAD_VALUE"),
            (["--port=0", "--schedulers=127.0.0.1:1"], "NO_PEERS"),
        ],
    ),
)
def test_failed_start_reports_its_cause(flags: list[str], code: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(*(flag.format(taken=taken.getsockname()[1]) for flag in flags))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    last = json.loads(errors.strip().splitlines()[-1])
    assert last["code"] == code and last["fix"]

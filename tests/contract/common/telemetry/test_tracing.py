"""Spans across real calls, the request context, and the OTLP exporter against a sink."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.v1 import common_pb2
from quire_common.errors import ConfigError
from quire_common.telemetry import tracing
from quire_common.telemetry.interceptors import UNTRACED
from quire_common.telemetry.metrics import registry
from tests.certificates import Authority
from tests.fakes.echo import KINDS, SERVICE, aio_call, aio_echo, sync_call, sync_echo
from tests.otlp_sink import OtlpSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

BIDI_OK = {"service": SERVICE, "method": "Bidi", "code": "OK"}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("tester", "tester-1", "", processor=SimpleSpanProcessor(exporter))
    yield exporter
    tracing.shutdown_tracing()


def by_kind(exporter: InMemorySpanExporter, kind: tracing.SpanKind) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.kind is kind]


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def check_hop(exporter: InMemorySpanExporter, kind: str, root: tracing.Span) -> None:
    """The server's span hangs below the client's where there is one, and else below the caller's."""
    (server,) = by_kind(exporter, tracing.SpanKind.SERVER)
    clients = by_kind(exporter, tracing.SpanKind.CLIENT)
    assert server.name == f"{SERVICE}/{kind}" and server.attributes is not None
    assert dict(server.attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": f"{SERVICE}/{kind}",
        "rpc.response.status_code": "OK",
    }
    assert len(clients) == (1 if kind == "Unary" else 0)
    parent = root.get_span_context().span_id
    if clients:
        assert clients[0].parent is not None and clients[0].parent.span_id == parent
        assert clients[0].attributes is not None
        assert clients[0].attributes["rpc.response.status_code"] == "OK"
        assert clients[0].attributes["server.address"] == "127.0.0.1"
        parent = ids(clients[0])[1]
    assert server.parent is not None and server.parent.span_id == parent
    assert ids(server)[0] == root.get_span_context().trace_id


@pytest.mark.parametrize("kind", ["Unary", "ServerStream", "ClientStream"])
async def test_aio_hop(kind: str, spans: InMemorySpanExporter) -> None:
    async with aio_echo() as (_, channel):
        with tracing.span("root") as root:
            await aio_call(channel, kind, b"x")
    check_hop(spans, kind, root)


@pytest.mark.parametrize("kind", KINDS)
def test_sync_hop(kind: str, spans: InMemorySpanExporter) -> None:
    with sync_echo() as (_, channel), tracing.span("root") as root:
        sync_call(channel, kind, b"x")
    check_hop(spans, kind, root)


async def test_failed_calls_mark_their_spans(spans: InMemorySpanExporter) -> None:
    async with aio_echo() as (_, channel):
        for request in (b"bug", b"typed"):
            with pytest.raises(grpc.RpcError):
                await aio_call(channel, "Unary", request)
    bug, typed = by_kind(spans, tracing.SpanKind.SERVER)
    assert bug.attributes is not None and typed.attributes is not None
    assert bug.attributes["error.type"] == "INTERNAL" and not bug.status.is_ok
    assert typed.attributes["error.type"] == "QUEUE_FULL" and typed.status.is_unset, "not the server's fault"
    assert [span.status.is_ok for span in by_kind(spans, tracing.SpanKind.CLIENT)] == [False, False]
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_a_parent_from_outside_is_honoured_and_a_broken_one_ignored(spans: InMemorySpanExporter) -> None:
    outside = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with aio_echo() as (_, channel):
        for parent in (outside, "00-zz-broken"):
            call = channel.unary_stream(f"/{SERVICE}/Writes")(b"x", metadata=(("traceparent", parent),))
            assert len([answer async for answer in call]) == 2, "to its end: the server's span ends with the call"
    parents = [span.parent for span in by_kind(spans, tracing.SpanKind.SERVER)]
    assert parents[0] is not None and f"{parents[0].span_id:016x}" == "b7ad6b7169203331"
    assert parents[1] is None


def test_a_request_context_carries_the_trace(spans: InMemorySpanExporter) -> None:
    request = common_pb2.RequestContext()
    with tracing.span("router") as router:
        tracing.inject(request)
    assert request.traceparent.split("-")[1] == f"{router.get_span_context().trace_id:032x}"
    tracing.record_span("queue", tracing.extract(request), 1_000, 5_000, {"tokens": 3}, error_type="LATE")
    (queue,) = (span for span in spans.get_finished_spans() if span.name == "queue")
    assert (queue.start_time, queue.end_time) == (1_000, 5_000)
    assert queue.parent is not None and queue.parent.span_id == router.get_span_context().span_id
    assert queue.attributes is not None and dict(queue.attributes) == {"tokens": 3, "error.type": "LATE"}
    assert not queue.status.is_ok


def test_a_detached_span_can_be_a_parent(spans: InMemorySpanExporter) -> None:
    request = common_pb2.RequestContext()
    parent = tracing.start_span("request")
    tracing.inject(request, parent)
    with tracing.span("child", parent=tracing.context_of(parent)):
        pass
    parent.end()
    child, ended = spans.get_finished_spans()
    assert child.parent is not None and child.parent.span_id == ids(ended)[1]
    assert request.traceparent.split("-")[2] == f"{ids(ended)[1]:016x}"


def test_a_failing_block_marks_its_span(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="secret"), tracing.span("work"):
        raise ValueError("secret")
    (work,) = spans.get_finished_spans()
    assert not work.status.is_ok and "secret" not in work.to_json()


def test_without_tracing_everything_is_a_no_op_and_context_passes_through() -> None:
    request = common_pb2.RequestContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    before = request.SerializeToString()
    with tracing.span("nothing") as nothing:
        assert not nothing.is_recording()
        tracing.inject(request)
        tracing.record_span("nothing", tracing.extract(request), 0, 1)
    assert request.SerializeToString() == before
    assert not tracing.enabled()


async def test_spans_reach_an_otlp_sink() -> None:
    with OtlpSink() as sink:
        tracing.setup_tracing("router", "router-1", sink.endpoint)
        async with aio_echo() as (_, channel):
            await aio_call(channel, "Unary", b"x")
        tracing.shutdown_tracing(30)
        client, server = sorted(sink.wait_for(lambda spans: len(spans) == 2), key=lambda span: span.start_ns)
    assert (client.service, client.instance) == ("quire-router", "router-1")
    assert server.parent_id == client.span_id and server.trace_id == client.trace_id and client.parent_id == ""
    assert server.attributes["rpc.response.status_code"] == "OK"
    assert client.start_ns <= server.start_ns <= server.end_ns <= client.end_ns


def test_a_dead_collector_does_not_hold_up_the_end() -> None:
    tracing.setup_tracing("router", "router-1", "http://127.0.0.1:9")
    tracing.record_span("lost", None, 0, 1)
    started = time.monotonic()
    tracing.shutdown_tracing(0.5)
    assert time.monotonic() - started < 10


def test_work_continued_for_a_request_carries_its_id_and_trace(spans: InMemorySpanExporter) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    request = common_pb2.RequestContext(request_id="r7", traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
    with sync_echo() as (_, channel):
        with tracing.continued(request):
            assert sync_call(channel, "Unary", b"id") == b"r7"
        assert sync_call(channel, "Unary", b"id") == b"", "and nothing stays behind"
        with tracing.continued(None):
            assert sync_call(channel, "Unary", b"id") == b""
    first, second, third = by_kind(spans, tracing.SpanKind.SERVER)
    assert f"{ids(first)[0]:032x}" == trace_id
    assert len({ids(span)[0] for span in (first, second, third)}) == 3


@pytest.mark.parametrize("kind", ["Session", "Run", "Detokenize"])
def test_streams_of_many_requests_get_no_span_of_their_own(kind: str) -> None:
    assert any(name.endswith(f"/{kind}") for name in UNTRACED)


async def test_untraced_methods_have_no_server_span_but_are_counted(spans: InMemorySpanExporter) -> None:
    async with aio_echo(untraced=[f"/{SERVICE}/Bidi"]) as (_, channel):
        before = registry.get_sample_value("quire_grpc_server_handled_total", BIDI_OK) or 0.0
        await aio_call(channel, "Bidi", b"x")
        await aio_call(channel, "Writes", b"x")
    assert [span.name for span in by_kind(spans, tracing.SpanKind.SERVER)] == [f"{SERVICE}/Writes"]
    assert registry.get_sample_value("quire_grpc_server_handled_total", BIDI_OK) == before + 1


def test_a_share_of_traces_is_sampled_as_a_whole() -> None:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("tester", "tester-1", "", ratio=0.25, processor=SimpleSpanProcessor(exporter))
    try:
        for _ in range(400):
            with tracing.span("root") as root:
                tracing.record_span("child", tracing.context_of(root), 1, 2)
    finally:
        tracing.shutdown_tracing()
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("root") == names.count("child")
    assert 60 <= names.count("root") <= 145, "a quarter, within five standard deviations"


@pytest.mark.parametrize(("flags", "spans"), [("01", 1), ("00", 0)])
def test_a_parent_from_outside_decides_whether_its_trace_is_sampled(flags: str, spans: int) -> None:
    exporter = InMemorySpanExporter()
    ratio = 0.0 if spans else 1.0
    tracing.setup_tracing("tester", "tester-1", "", ratio=ratio, processor=SimpleSpanProcessor(exporter))
    try:
        parent = f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}"
        tracing.start_span("s", parent=tracing.extract_headers({"traceparent": parent})).end()
    finally:
        tracing.shutdown_tracing()
    assert len(exporter.get_finished_spans()) == spans


def test_spans_go_over_tls_to_a_collector_of_this_authority(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    files = authority.files("collector")
    with OtlpSink(files) as sink:
        for ca in (stranger.ca, authority.ca):
            tracing.setup_tracing("tester", "tester-1", sink.endpoint, ca=ca)
            with tracing.span("to-" + Path(ca).stem):
                pass
            tracing.shutdown_tracing()
        got = sink.wait_for(bool)
    assert sink.endpoint.startswith("https://") and {span.name for span in got} == {"to-authority"}


@pytest.mark.parametrize(
    ("endpoint", "ca", "code"),
    [
        ("http://127.0.0.1:4317", "authority.pem", "OTLP_WITHOUT_TLS"),
        ("https://127.0.0.1:4317", "nowhere.pem", "TLS_FILE"),
    ],
)
def test_an_authority_of_no_use_is_refused(endpoint: str, ca: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tracing.setup_tracing("tester", "tester-1", endpoint, ca=ca)
    assert caught.value.code == code and caught.value.param == "otlp_tls_ca"
    assert not tracing.enabled()

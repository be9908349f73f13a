"""Our spans and their encoding beside those of OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_by_sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

from quire_common.telemetry import tracing
from quire_common.telemetry.otlp_spans import encode_spans
from quire_common.telemetry.span_recorder import SpanRecorder

RESOURCE = Resource.create({"service.name": "quire-tester", "service.instance.id": "tester-1"})
REMOTE = SpanContext(7 << 64 | 5, 9, True, TraceFlags(3), TraceState([("vendor", "a"), ("other", "b")]))
ATTRIBUTES: Attributes = {
    "text": "Ünïcode",
    "whole": 1,
    "real": 1.0,
    "yes": True,
    "negative": -3,
    "list": ["a", "b"],
    "": "",
}


def make_spans() -> Sequence[ReadableSpan]:
    """Spans of all kinds: roots and children, failed and not, with events and all types of attributes."""
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder(SimpleSpanProcessor(exporter), RESOURCE, 1.0)
    for kind in SpanKind:
        recorder.start_span(f"root {kind.name}", None, kind, None, 1).end(2)
    remote = trace.set_span_in_context(trace.NonRecordingSpan(REMOTE))
    child = recorder.start_span("child", remote, SpanKind.SERVER, ATTRIBUTES)
    child.add_event("first token", timestamp=11)
    child.add_event("migrated", {"to": "b", "attempt": 2}, 12)
    child.set_attributes({"text": "another", "whole": True})
    child.set_status(Status(StatusCode.ERROR))
    grandchild = recorder.start_span("grandchild", tracing.context_of(child), SpanKind.INTERNAL, {"whole": 1.0}, 5)
    grandchild.set_status(StatusCode.OK)
    grandchild.end(6)
    child.end()
    return exporter.get_finished_spans()


def test_the_encoding_is_that_of_the_sdk() -> None:
    spans = make_spans()
    ours, theirs = encode_spans(spans), encode_by_sdk(spans)
    # The SDK says that its tracer is the scope; our spans have none of the SDK's tracers.
    for scope in theirs.resource_spans[0].scope_spans:
        scope.scope.name = "quire"
        for span in scope.spans:
            span.status.SetInParent()
    for span in ours.resource_spans[0].scope_spans[0].spans:
        span.status.SetInParent()
    assert ours == theirs and len(ours.resource_spans[0].scope_spans[0].spans) == len(SpanKind) + 2


@pytest.mark.parametrize("flags", ["00", "01", "03"])
@pytest.mark.parametrize("state", ["", "vendor=a,other=b"])
def test_a_span_has_the_ids_and_flags_that_the_sdk_gives(flags: str, state: str) -> None:
    """Below a parent from outside, in the context that goes on, and in what is recorded."""
    given = {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}", "tracestate": state}
    sampled = int(flags, 16) & 1
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("tester", "tester-1", "", processor=SimpleSpanProcessor(exporter))
    try:
        parent = tracing.extract_headers(given)
        span = tracing.start_span("s", parent=parent)
        passed_on = tracing.inject_headers(span)
        span.end()
        span.set_attribute("late", 1)
    finally:
        tracing.shutdown_tracing()
    theirs = TracerProvider(shutdown_on_exit=False).get_tracer("sdk").start_span("s", parent)
    ours, wanted = span.get_span_context(), theirs.get_span_context()
    assert (ours.trace_id, ours.trace_flags, ours.trace_state, ours.is_remote) == (
        *(wanted.trace_id, wanted.trace_flags, wanted.trace_state, wanted.is_remote),
    )
    assert passed_on["traceparent"] == f"00-{ours.trace_id:032x}-{ours.span_id:016x}-{flags}"
    assert passed_on.get("tracestate", "") == state
    recorded = exporter.get_finished_spans()
    assert len(recorded) == sampled and not any(each.attributes for each in recorded)


@pytest.mark.parametrize(
    "traceparent",
    [
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "",
    ],
)
def test_a_malformed_parent_is_none(traceparent: str) -> None:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("tester", "tester-1", "", processor=SimpleSpanProcessor(exporter))
    try:
        span = tracing.start_span("s", parent=tracing.extract_headers({"traceparent": traceparent}))
        span.end()
    finally:
        tracing.shutdown_tracing()
    (recorded,) = exporter.get_finished_spans()
    assert recorded.parent is None and span.get_span_context().is_valid


def test_an_ended_span_keeps_what_it_was() -> None:
    """The thread that exports reads it later."""
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder(SimpleSpanProcessor(exporter), RESOURCE, 1.0)
    span = recorder.start_span("s", None, SpanKind.INTERNAL, {"a": 1}, 1)
    assert span.is_recording()
    span.end(2)
    before = encode_spans(exporter.get_finished_spans())
    span.set_attribute("a", 2)
    span.set_attributes({"b": 3})
    span.add_event("late")
    span.update_name("t")
    span.set_status(StatusCode.ERROR)
    span.record_exception(ValueError("late"))
    span.end(3)
    assert not span.is_recording() and len(exporter.get_finished_spans()) == 1
    assert encode_spans(exporter.get_finished_spans()) == before


def test_an_exception_is_recorded_without_its_text() -> None:
    exporter = InMemorySpanExporter()
    span = SpanRecorder(SimpleSpanProcessor(exporter), RESOURCE, 1.0).start_span("s", None, SpanKind.INTERNAL, None)
    span.record_exception(ValueError("secret"))
    span.end()
    (recorded,) = exporter.get_finished_spans()
    assert "ValueError" in recorded.to_json() and "secret" not in recorded.to_json()

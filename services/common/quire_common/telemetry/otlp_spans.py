"""Encodes spans as OTLP, and sends them by the SDK's exporter.

The SDK's encoder checks and converts each attribute again for each span. This one keeps the messages of attributes that
recur. It expects the spans of one process, and none with links.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status
from opentelemetry.trace import SpanKind, StatusCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import Event, ReadableSpan

_KINDS: Final = {
    SpanKind.INTERNAL: Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: Span.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: Span.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: Span.SPAN_KIND_CONSUMER,
}
_LOCAL: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE: Final = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_STATUSES: Final = {
    StatusCode.UNSET: None,
    StatusCode.OK: Status(code=Status.STATUS_CODE_OK),
    StatusCode.ERROR: Status(code=Status.STATUS_CODE_ERROR),
}
_SCOPE: Final = InstrumentationScope(name="quire")
# Attributes that are kept, ids of requests among them.
_KEPT: Final = 4096


class OtlpSpans(OTLPSpanExporter):
    """The SDK's exporter, with its connection, its retries and its variables OTEL_EXPORTER_OTLP_*, and our encoder."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encode_spans(data)


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Return the OTLP request that exports these spans. They are of one process, at least one: the first one's resource
    stands for all."""
    resource = spans[0].resource
    described = Resource(attributes=_attributes(resource.attributes))
    scope = ScopeSpans(scope=_SCOPE, spans=[_span(each) for each in spans])
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=described, scope_spans=[scope], schema_url=resource.schema_url)]
    )


def _span(span: ReadableSpan) -> Span:
    """Encode a span that has ended, with attributes, events and the status's code, without links and the status's
    description."""
    context, parent = span.context, span.parent
    return Span(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        parent_span_id=b"" if parent is None else parent.span_id.to_bytes(8, "big"),
        trace_state=context.trace_state.to_header() if context.trace_state else "",
        flags=_REMOTE if parent is not None and parent.is_remote else _LOCAL,
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.start_time or 0,
        end_time_unix_nano=span.end_time or 0,
        attributes=_attributes(span.attributes),
        events=[_event(each) for each in span.events],
        status=_STATUSES[span.status.status_code],
    )


def _event(event: Event) -> Span.Event:
    return Span.Event(name=event.name, time_unix_nano=event.timestamp, attributes=_attributes(event.attributes))


def _attributes(attributes: Mapping[str, Any] | None) -> list[KeyValue]:
    """Encode attributes; lists and tuples become arrays. Messages of single values are shared; the 4096 used last are
    kept."""
    if not attributes:
        return []
    return [
        KeyValue(key=key, value=_array(value)) if isinstance(value, (list, tuple)) else _scalar(key, value)
        for key, value in attributes.items()
    ]


@lru_cache(_KEPT, typed=True)  # 1, 1.0 and True are equal
def _scalar(key: str, value: str | bool | int | float) -> KeyValue:
    return KeyValue(key=key, value=_value(value))


def _array(values: Sequence[Any]) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=[_value(each) for each in values]))


def _value(value: str | bool | int | float) -> AnyValue:
    """Encode a boolean, an integer, a float or a text by its type."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)

"""Traces: OpenTelemetry spans with W3C context, sent by OTLP over gRPC.

Without an endpoint, every call of this module is a cheap no-op, and neither the SDK nor the exporter is imported. The
recorder is our own and not OpenTelemetry's global provider, so a process can be set up and shut down more than once
(tests do). This module knows nothing of gRPC interception: see interceptors/.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, Protocol

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire_common.errors import ConfigError
from quire_common.identity.tls_files import read_pem
from quire_common.telemetry.logs import bind_request_id, request_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace import SpanProcessor

    from quire.v1 import common_pb2
    from quire_common.telemetry.span_recorder import SpanRecorder

__all__ = [
    "Context",
    "Span",
    "SpanKind",
    "context_of",
    "continued",
    "enabled",
    "extract",
    "extract_headers",
    "inject",
    "inject_headers",
    "mark_error",
    "record_span",
    "setup_tracing",
    "setup_tracing_of",
    "shutdown_tracing",
    "span",
    "start_span",
]

SCHEDULE_DELAY_MS = 200
MAX_QUEUE = 8192
MAX_BATCH = 512
EXPORT_TIMEOUT_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()
# The header of a parent as Quire's services write it.
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_FAILED = Status(StatusCode.ERROR)
_EMPTY_CONTEXT = Context()
_DISABLED_SPAN_BLOCK = contextlib.nullcontext(trace.INVALID_SPAN)
_recorder: SpanRecorder | None = None


def setup_tracing(
    service: str,
    instance: str,
    endpoint: str,
    *,
    ca: str = "",
    ratio: float = 1.0,
    processor: SpanProcessor | None = None,
) -> None:
    """Start sending spans as `quire-<service>` to `endpoint`, or to `processor` (tests), in place of an earlier setup.
    Without either, do nothing.

    `ca` is a PEM file with the authority of an https endpoint; empty: the authorities of OTEL_EXPORTER_OTLP_CERTIFICATE
    or, if that is not set, the system's. `ratio` is the share of traces that are sampled, among traces that begin in
    this process. A trace with a parent keeps the parent's decision. Raises ConfigError if the authority is unreadable,
    or if it is given for an endpoint that is not https; an earlier setup has ended then.
    """
    global _recorder  # noqa: PLW0603  # tracing is a property of the process
    if not endpoint and processor is None:
        return
    shutdown_tracing()
    from opentelemetry.sdk.resources import Resource

    from quire_common.telemetry.span_recorder import SpanRecorder

    resource = Resource.create({"service.name": f"quire-{service}", "service.instance.id": instance or service})
    _recorder = SpanRecorder(_otlp_processor(endpoint, ca) if processor is None else processor, resource, ratio)


class TracingConfig(Protocol):
    """The settings of a process that say where its spans go."""

    @property
    def otlp_traces_endpoint(self) -> str: ...

    @property
    def otlp_tls_ca(self) -> str: ...

    @property
    def otlp_sampling_ratio(self) -> float: ...


def setup_tracing_of(config: TracingConfig, service: str, instance: str) -> None:
    """Do `setup_tracing` with a process's settings. Raises ConfigError as it does."""
    endpoint, ca, ratio = config.otlp_traces_endpoint, config.otlp_tls_ca, config.otlp_sampling_ratio
    setup_tracing(service, instance, endpoint, ca=ca, ratio=ratio)


def shutdown_tracing(timeout_s: float = 3.0) -> None:
    """Send the spans that have ended, and stop tracing; waits at most `timeout_s`, since a dead collector must not hold
    up the service's end. Does nothing without tracing."""
    global _recorder  # tracing is a property of the process
    recorder, _recorder = _recorder, None
    if recorder is not None:
        flusher = threading.Thread(target=recorder.shutdown, name="tracing-shutdown", daemon=True)
        flusher.start()
        flusher.join(timeout_s)


def enabled() -> bool:
    """Whether spans are recorded at all."""
    return _recorder is not None


def start_span(
    name: str,
    *,
    parent: Context | None = None,
    attributes: Mapping[str, str | bool | int | float] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """Start a span with these attributes that the caller ends, without making it the current one. `parent` None: the
    current span. Without tracing, returns a span that records nothing."""
    if (recorder := _recorder) is None:
        return trace.INVALID_SPAN
    return recorder.start_span(name, parent, kind, attributes)


def span(
    name: str,
    *,
    parent: Context | None = None,
    attributes: Mapping[str, str | bool | int | float] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> contextlib.AbstractContextManager[Span]:
    """Return a context manager that yields a new span, below `parent` (None: the current span), which is the current
    one inside the block and ends with it. An exception gives it the error status, with the exception's class name, and
    passes through. Without tracing, the span records nothing."""
    if _recorder is None:
        return _DISABLED_SPAN_BLOCK
    return _recorded_span(_recorder, name, parent, kind, attributes)


@contextlib.contextmanager
def _recorded_span(
    recorder: SpanRecorder,
    name: str,
    parent: Context | None,
    kind: SpanKind,
    attributes: Mapping[str, str | bool | int | float] | None,
) -> Iterator[Span]:
    """Return the block of `span` when there is a recorder."""
    current = recorder.start_span(name, parent, kind, attributes)
    token = otel_context.attach(trace.set_span_in_context(current))
    try:
        yield current
    except BaseException as error:
        mark_error(current, type(error).__name__)
        raise
    finally:
        otel_context.detach(token)
        current.end()


def record_span(
    name: str,
    parent: Context | None,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, str | bool | int | float] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    error_type: str = "",
) -> None:
    """Record a span of work that has ended, for streams that carry many requests. Times are `time.time_ns()`. A
    `parent` of None means the current span. A span with an `error_type` gets the error status. Does nothing without
    tracing."""
    if (recorder := _recorder) is None:
        return
    ended = recorder.start_span(name, parent, kind, attributes, start_ns)
    if error_type:
        mark_error(ended, error_type)
    ended.end(end_ns)


def mark_error(failed: Span, error_type: str) -> None:
    """Give a span the error status. `error_type` is a code or a class name, never an exception's text."""
    failed.set_attribute("error.type", error_type)
    failed.set_status(_FAILED)


def context_of(parent: Span) -> Context:
    """A context whose current span is the given one: for `parent=` and `record_span`. Without tracing, an empty
    context."""
    return _EMPTY_CONTEXT if _recorder is None else trace.set_span_in_context(parent)


def inject(context: common_pb2.RequestContext, parent: Span | None = None) -> None:
    """Write the W3C trace context of the current span (or of `parent`) into a request. Without tracing or such a span,
    what the request has stays."""
    headers = inject_headers(parent)
    if headers:
        context.traceparent = headers["traceparent"]
        context.tracestate = headers.get("tracestate", "")


def extract(context: common_pb2.RequestContext) -> Context:
    """Return a context with the parent span that a request names; the current context where it names none, or without
    tracing."""
    if _recorder is None or not context.traceparent:
        return otel_context.get_current()
    return extract_headers({"traceparent": context.traceparent, "tracestate": context.tracestate})


@contextlib.contextmanager
def continued(context: common_pb2.RequestContext | None) -> Iterator[None]:
    """Context manager for work done for a request by a thread or task that serves many: log lines and calls within
    carry the request's id (if it has none, the present one) and trace. None: nothing changes."""
    if context is None:
        yield
        return
    request_token = bind_request_id(context.request_id or request_id.get())
    token = otel_context.attach(extract(context))
    try:
        yield
    finally:
        otel_context.detach(token)
        request_id.reset(request_token)


def inject_headers(parent: Span | None = None) -> dict[str, str]:
    """Return the W3C headers (`traceparent`, `tracestate`) of the current span (or `parent`); empty without tracing, or
    if there is no such span."""
    if _recorder is None:
        return {}
    context = (trace.get_current_span() if parent is None else parent).get_span_context()
    if context.trace_state or not context.is_valid:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, None if parent is None else context_of(parent))
        return headers
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}


def extract_headers(headers: Mapping[str, str]) -> Context:
    """Return a context with the parent span that W3C headers name; without a parent if they are malformed. Without
    tracing, return the current context."""
    if _recorder is None:
        return otel_context.get_current()
    # The propagator reads all that the standard allows, and takes longer.
    found = None if headers.get("tracestate") else _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is not None:
        trace_id, span_id, flags = (int(each, 16) for each in found.groups())
        parent = SpanContext(trace_id, span_id, True, TraceFlags(flags))
        if parent.is_valid:
            return trace.set_span_in_context(trace.NonRecordingSpan(parent))
    return _PROPAGATOR.extract(headers)


def _otlp_processor(endpoint: str, ca: str) -> SpanProcessor:
    """Make the processor that sends spans to the endpoint in batches from a bounded queue, over TLS if the endpoint
    begins with https. For another endpoint OTEL_EXPORTER_OTLP_INSECURE decides; if that is not set, only one that
    begins with http:// is reached without TLS. Without `ca`, the authorities are those of
    OTEL_EXPORTER_OTLP_CERTIFICATE or, if that is not set, the system's. Raises ConfigError as `_authority` does."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from quire_common.telemetry.otlp_spans import OtlpSpans

    credentials = grpc.ssl_channel_credentials(_authority(endpoint, ca)) if ca else None
    exporter = OtlpSpans(endpoint, credentials=credentials, timeout=EXPORT_TIMEOUT_S)
    return BatchSpanProcessor(
        exporter, max_queue_size=MAX_QUEUE, schedule_delay_millis=SCHEDULE_DELAY_MS, max_export_batch_size=MAX_BATCH
    )


def _authority(endpoint: str, ca: str) -> bytes:
    """Return the bytes of the endpoint's authority file. Raises ConfigError if the endpoint is not https, or the file
    cannot be read."""
    if not endpoint.startswith("https://"):
        raise ConfigError(
            "OTLP_WITHOUT_TLS",
            f"The endpoint {endpoint} is not reached over TLS, and an authority is given for it.",
            "Write https:// in --otlp-traces-endpoint, or leave --otlp-tls-ca out.",
            param="otlp_tls_ca",
        )
    return read_pem(ca, "the authority of the endpoint for traces", param="otlp_tls_ca")

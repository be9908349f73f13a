"""SpanRecorder: makes and samples spans for the processors of OpenTelemetry's SDK, at a fraction of the SDK's cost.

The SDK's own spans serve uses that Quire does not have: limits of attributes, links, locks, a copy of each span at its
end. It is not responsible for where spans go, nor for contexts that travel.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanKind
    from opentelemetry.util.types import AnyValue, Attributes

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.RANDOM_TRACE_ID)
# The sampling ratio decides by these bits of a trace's id, as the SDK's TraceIdRatioBased does.
_RATIO_BITS: Final = 64
_UNSET: Final = Status(StatusCode.UNSET)


class SpanRecorder:
    """The spans of one process. All methods may be called by several threads at once."""

    def __init__(self, processor: SpanProcessor, resource: Resource, ratio: float) -> None:
        """The processor gets each sampled span when it ends. `ratio` is the share of the traces beginning here that are
        sampled; a trace with a parent keeps the parent's decision."""
        self._processor = processor
        self._resource = resource
        self._sampled_below = round(ratio * (1 << _RATIO_BITS))

    def start_span(
        self,
        name: str,
        context: Context | None,
        kind: SpanKind,
        attributes: Attributes,
        start_ns: int | None = None,
    ) -> trace.Span:
        """Start a span below the span of `context` (None: of the current context); without such a span it begins a
        trace. Returns a span that records nothing if the trace is not sampled: the parent decides, or for a new trace
        its random id and the ratio. `start_ns` is a `time.time_ns()`; None: now."""
        above = trace.get_current_span(context).get_span_context()
        parent = above if above.is_valid else None
        if parent is None:
            trace_id, state = random.getrandbits(128) or 1, None
            below = trace_id & ((1 << _RATIO_BITS) - 1) < self._sampled_below
            flags = _SAMPLED if below else _NOT_SAMPLED
        else:
            trace_id, flags, state = parent.trace_id, parent.trace_flags, parent.trace_state
        own = SpanContext(trace_id, random.getrandbits(64) or 1, False, flags, state)
        if not flags.sampled:
            return NonRecordingSpan(own)
        start_ns = time.time_ns() if start_ns is None else start_ns
        return RecordedSpan(self._processor, self._resource, name, own, parent, kind, attributes, start_ns)

    def shutdown(self) -> None:
        """Send the spans that have ended, and stop."""
        self._processor.shutdown()


class RecordedSpan(trace.Span, ReadableSpan):
    """A sampled span. Its fields are those that the SDK's ReadableSpan reads; after `end`, nothing changes them."""

    def __init__(
        self,
        processor: SpanProcessor,
        resource: Resource,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Attributes,
        start_ns: int,
    ) -> None:
        # The initializer of ReadableSpan sets these fields too, but takes longer.
        self._processor = processor
        self._own_context = context
        self._own_attributes: dict[str, AnyValue] = dict(attributes) if attributes else {}
        self._name, self._context, self._parent, self._kind = name, context, parent, kind
        self._start_time, self._end_time = start_ns, None
        self._attributes = self._own_attributes
        self._events: list[Event] = []
        self._links = ()
        self._status = _UNSET
        self._resource = resource
        self._instrumentation_info = self._instrumentation_scope = None

    def end(self, end_time: int | None = None) -> None:
        """End the span now, or at `end_time` in nanoseconds, and hand it to the processor. Later ends are ignored."""
        if self._end_time is None:
            self._end_time = time.time_ns() if end_time is None else end_time
            self._processor.on_end(self)

    def get_span_context(self) -> SpanContext:
        return self._own_context

    def is_recording(self) -> bool:
        return self._end_time is None

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        if self._end_time is None:
            self._own_attributes.update(attributes)

    def set_attribute(self, key: str, value: AnyValue) -> None:
        if self._end_time is None:
            self._own_attributes[key] = value

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self._end_time is None:
            self._events.append(Event(name, attributes, timestamp))

    def update_name(self, name: str) -> None:
        if self._end_time is None:
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self._end_time is None:
            self._status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add an event with the class of an exception. The exception's text is left out: it may contain what clients
        sent."""
        self.add_event("exception", {"exception.type": type(exception).__name__, **(attributes or {})}, timestamp)

"""RequestSpans: one trace span per request, `scheduler.request`. The time in the queue is a child span, and so is the
worker's span."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.telemetry import tracing

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.request import Request


class RequestSpans:
    """The spans of requests that have not ended, by session and handle. Without tracing there are none."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int], tracing.Span] = {}

    def begin(self, session: int, handle: int, context: RequestContext) -> RequestContext:
        """Start the request's span alone; `end` records the child span of the queue. Returns the context that makes
        this span the parent of the worker's and the kvstore's spans. Without tracing, or if the handle has a span
        already, returns the context unchanged."""
        key = (session, handle)
        if not tracing.enabled() or key in self._spans:
            return context
        parent = tracing.extract_headers({"traceparent": context.traceparent, "tracestate": context.tracestate})
        attributes: dict[str, str | int] = {"quire.request_id": context.request_id, "quire.attempt": context.attempt}
        span = self._spans[key] = tracing.start_span("scheduler.request", parent=parent, attributes=attributes)
        headers = tracing.inject_headers(span)
        return replace(context, traceparent=headers["traceparent"], tracestate=headers.get("tracestate", ""))

    def refused(self, session: int, handle: int, code: str) -> None:
        """End the span of a request that was refused, marked with the error's code. With HANDLE_IN_USE nothing happens,
        since the span belongs to the earlier request."""
        if code != "HANDLE_IN_USE" and (span := self._spans.pop((session, handle), None)):
            tracing.mark_error(span, code)
            span.end()

    def end(self, request: Request, reason: str, code: str) -> None:
        """End the request's span, if it has one. Its time until its first slot (or its end, if it had none) becomes a
        child span, its first token and its preemptions become events, and its usage becomes attributes. With a `code`,
        the span is marked as an error."""
        span = self._spans.pop((request.session, request.handle), None)
        if span is None:
            return
        timing = request.timing
        parent, submitted = tracing.context_of(span), _ns(timing.submitted_s)
        tracing.record_span("scheduler.queue", parent, submitted, _ns(timing.first_start_s or timing.finished_s))
        if timing.first_token_s:
            span.add_event("first token", timestamp=_ns(timing.first_token_s))
        for preempted_s in timing.preempted_s:
            span.add_event("preempted", timestamp=_ns(preempted_s))
        span.set_attributes(
            {
                "quire.finish_reason": reason,
                "quire.preemptions": request.preemptions,
                "gen_ai.usage.input_tokens": request.prompt_len,
                "gen_ai.usage.output_tokens": len(request.output),
                "quire.cached_tokens": request.cached_tokens,
            }
        )
        if code:
            tracing.mark_error(span, code)
        span.end(_ns(timing.finished_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""The interceptor of thread-based channels: request id and trace travel as metadata, unary calls get a span."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import grpc

from quire_common.telemetry.interceptors.client_call import end_client_span, start_client_span, with_context

if TYPE_CHECKING:
    from quire_common.telemetry import tracing


def sync_client_interceptors(target: str = "") -> list[Any]:
    """For `grpc.intercept_channel(channel, *...)`; `target` is the address, for the spans."""
    return [_ClientInterceptor(target)]


@dataclasses.dataclass(frozen=True)
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


def _with_context(details: Any, parent: tracing.Span | None = None) -> _Details:
    """Return the call's details with the request id and the trace of `parent` (None: of the current span) added to the
    metadata."""
    return _Details(
        details.method,
        details.timeout,
        tuple(with_context(details.metadata, parent)),
        details.credentials,
        getattr(details, "wait_for_ready", None),
        getattr(details, "compression", None),
    )


class _ClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, target: str) -> None:
        self._target = target

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make the call with the request id and trace in its metadata. With tracing, the call has a span that ends with
        the call's status when the call is done."""
        span = start_client_span(client_call_details.method, self._target)
        if span is None:
            return continuation(_with_context(client_call_details), request)
        try:
            call = continuation(_with_context(client_call_details, span), request)
        except BaseException:
            end_client_span(span, None)
            raise
        call.add_done_callback(lambda done: end_client_span(span, done.code()))
        return call

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(_with_context(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(_with_context(client_call_details), request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(_with_context(client_call_details), request_iterator)

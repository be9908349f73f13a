"""The interceptors of asyncio channels. Request id and trace travel as metadata, and unary calls get a span.

Bidirectional streams have no interceptor, because they carry many requests and belong to none of them. An interceptor
would also cost each of their messages two turns of the loop.

There is one class per kind of call, because grpc.aio registers an interceptor under the first kind that it is an
instance of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from quire_common.telemetry.interceptors.client_call import end_client_span, start_client_span, with_context

if TYPE_CHECKING:
    from quire_common.telemetry import tracing

Details = grpc.aio.ClientCallDetails


def aio_client_interceptors(target: str = "") -> list[grpc.aio.ClientInterceptor]:
    """For `grpc.aio.*_channel(interceptors=...)`; `target` is the address, for the spans."""
    return [_UnaryUnary(target), _UnaryStream(), _StreamUnary()]


def _with_context(details: Details, parent: tracing.Span | None = None) -> Details:
    metadata = grpc.aio.Metadata(*with_context(details.metadata, parent))
    return details._replace(metadata=metadata)  # type: ignore[attr-defined, no-any-return]  # the real one is a named tuple


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, target: str) -> None:
        self._target = target

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Details, request: Any) -> Any:
        """Make the call with the request id and trace in its metadata. With tracing, wait for the call's status, with
        which the call's span ends. If this task is cancelled while it waits, so is the call."""
        span = start_client_span(client_call_details.method, self._target)
        if span is None:
            return await continuation(_with_context(client_call_details), request)
        code: grpc.StatusCode | None = grpc.StatusCode.CANCELLED
        call = None
        try:
            call = await continuation(_with_context(client_call_details, span), request)
            code = await call.code()
            return call
        finally:
            if call is not None and not call.done():
                call.cancel()  # this task was cancelled while it waited: the call does not notice by itself
            end_client_span(span, code)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Details, request: Any) -> Any:
        return await continuation(_with_context(client_call_details), request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Details, request_iterator: Any
    ) -> Any:
        return await continuation(_with_context(client_call_details), request_iterator)

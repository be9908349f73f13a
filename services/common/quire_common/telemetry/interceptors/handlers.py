"""A registered handler with its behaviour replaced, whichever of gRPC's four kinds it is. For aio and for threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quire_common.telemetry.interceptors.unreadable import ReadableStream, tolerant

Wrap = Callable[[Any], Any]


def wrap_handler(handler: Any, unary: Wrap, streaming: Wrap, *, streamed: bool = False) -> Any:
    """Return the handler with its behaviour wrapped by `unary` or `streaming`, after the kind of its response. If a
    single request cannot be read, the wrapper is called with `Unreadable` in its place; a stream of requests raises
    InvalidArgument where the request would be. `streamed`: for a behaviour of one request, the wrapper is called with
    the stream by which the request comes, and reads it."""
    codecs = {
        "request_deserializer": tolerant(handler.request_deserializer),
        "response_serializer": handler.response_serializer,
    }
    if streamed and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming(handler.unary_stream), **codecs)
    if streamed:
        return grpc.stream_unary_rpc_method_handler(unary(handler.unary_unary), **codecs)
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming(_of_stream(handler.stream_stream)), **codecs)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary(_of_stream(handler.stream_unary)), **codecs)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(streaming(handler.unary_stream), **codecs)
    return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **codecs)


def _of_stream(behaviour: Any) -> Callable[[Any, Any], Any]:
    """Wrap a behaviour: its request stream raises InvalidArgument at an unreadable request."""
    return lambda requests, context: behaviour(ReadableStream(requests), context)

"""A registered handler with its behaviour replaced, whichever of gRPC's four kinds it is. For aio and for threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quire_common.telemetry.interceptors.unreadable import tolerant

Wrap = Callable[[Any], Any]


def wrap_handler(handler: Any, unary: Wrap, streaming: Wrap, *, streamed: bool = False) -> Any:
    """Return the handler with its behaviour wrapped by `unary` or `streaming`, after the kind of its response. Requests
    that cannot be read reach the behaviour as `Unreadable`. `streamed`: a behaviour of one request gets the stream that
    the request comes by."""
    read = handler.request_deserializer if handler.request_streaming else tolerant(handler.request_deserializer)
    codecs = {"request_deserializer": read, "response_serializer": handler.response_serializer}
    if streamed and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming(handler.unary_stream), **codecs)
    if streamed:
        return grpc.stream_unary_rpc_method_handler(unary(handler.unary_unary), **codecs)
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming(handler.stream_stream), **codecs)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary(handler.stream_unary), **codecs)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(streaming(handler.unary_stream), **codecs)
    return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **codecs)

"""Adds the request id and the trace to the metadata of a call. The asyncio and the thread-based interceptors share
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from quire_common.telemetry import tracing
from quire_common.telemetry.interceptors.server_call import REQUEST_ID_KEY
from quire_common.telemetry.logs import request_id

if TYPE_CHECKING:
    from collections.abc import Iterable


def with_context(
    metadata: Iterable[tuple[str, Any]] | None, parent: tracing.Span | None = None
) -> list[tuple[str, Any]]:
    """Return the call's metadata with the request id and the trace of `parent` (None: of the current span) added; what
    the caller has set itself stays."""
    pairs = list(metadata or ())
    given = {key for key, _ in pairs}
    ours = tracing.inject_headers(parent)
    if request := request_id.get():
        ours[REQUEST_ID_KEY] = request
    return pairs + [(key, value) for key, value in ours.items() if key not in given]


def start_client_span(method: str | bytes, target: str) -> tracing.Span | None:
    """Start the client span of a unary call of `method` to `target`, whose host and port become attributes. Returns
    None without tracing."""
    if not tracing.enabled():
        return None
    name = (method.decode() if isinstance(method, bytes) else method).lstrip("/")
    attributes: dict[str, str | bool | int | float] = {"rpc.system.name": "grpc", "rpc.method": name}
    host, separator, port = target.rpartition(":")
    if separator and port.isdigit():
        attributes |= {"server.address": host, "server.port": int(port)}
    elif target:
        attributes["server.address"] = target
    return tracing.start_span(name, attributes=attributes, kind=tracing.SpanKind.CLIENT)


def end_client_span(span: tracing.Span, code: grpc.StatusCode | None) -> None:
    """End the span with the call's status code (None: UNKNOWN); every status but OK marks it as an error."""
    name = code.name if code is not None else "UNKNOWN"
    span.set_attribute("rpc.response.status_code", name)
    if code is not grpc.StatusCode.OK:
        tracing.mark_error(span, name)
    span.end()

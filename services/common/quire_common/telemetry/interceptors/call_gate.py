"""Lets no call through that its service would not: the door in front of every method there is, reflection included.

Stands inside the interceptor that types errors, so that a refusal is an answer like any other. Knows no credentials:
the check is the service's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from quire_common.telemetry.interceptors.handlers import wrap_handler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in the type stubs alone
    Check = Callable[[str, Mapping[str, str]], None]


class CallGate(grpc.aio.ServerInterceptor):
    """Open to all until a check is set. `check(path, metadata)` raises the QuireError that refuses a call."""

    def __init__(self) -> None:
        self.check: Check | None = None
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler, once per method: only registered methods have one, so the table is bounded."""
        handler = await continuation(handler_call_details)
        if handler is None or self.check is None:
            return handler
        path = handler_call_details.method
        cached = self._wrapped.get(path)
        if cached is None or cached[0] is not handler:
            guard = self._guard(path)
            wrapped: Handler = wrap_handler(handler, lambda b: _unary(b, guard), lambda b: _streaming(b, guard))
            cached = self._wrapped[path] = (handler, wrapped)
        return cached[1]

    def _guard(self, path: str) -> Callable[[Any], None]:
        def guard(context: Any) -> None:
            if self.check is not None:
                metadata = context.invocation_metadata() or ()
                self.check(path, {key: value for key, value in metadata if isinstance(value, str)})

        return guard


def _unary(behaviour: Any, guard: Callable[[Any], None]) -> Any:
    async def unary(request: Any, context: Any) -> Any:
        guard(context)
        return await behaviour(request, context)

    return unary


def _streaming(behaviour: Any, guard: Callable[[Any], None]) -> Any:
    def stream(request: Any, context: Any) -> Any:
        """What the behaviour returns is passed on: who drives it sees the handler's own generator."""
        guard(context)
        return behaviour(request, context)

    return stream

"""CallGate: refuses calls before the service sees them. It guards every method, reflection included.

The check sees a call's metadata before any message of the call is read, so that a stranger's message costs nothing. The
gate is inside the interceptor that handles typed errors, so that a refusal is an answer like any other. The gate knows
no credentials; the service supplies the check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from quire_common.errors import QuireError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in the type stubs alone
    Check = Callable[[str, Mapping[str, str]], None]


class CallGate(grpc.aio.ServerInterceptor):
    """Open to all until a check is set. `check(path, metadata)` raises the QuireError that refuses a call."""

    def __init__(self) -> None:
        self.check: Check | None = None

    def guard(self, check: Check) -> None:
        """From now on calls are checked."""
        self.check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's own handler or, if the check refuses the call, one that raises the refusal and reads
        nothing. Returns None for an unknown method, unchecked. An exception of the check that is no QuireError passes
        through."""
        handler = await continuation(handler_call_details)
        if handler is None or self.check is None:
            return handler
        try:
            self.check(handler_call_details.method, _texts(handler_call_details.invocation_metadata))
        except QuireError as error:
            return _refusing(error)
        return handler


def _refusing(refusal: QuireError) -> Handler:
    """Return the handler that raises the refusal. It is a stream handler that reads no request, because gRPC itself
    would read the message of a call with one request."""

    async def refuse(_requests: object, _context: object) -> None:
        raise refusal

    return grpc.stream_stream_rpc_method_handler(refuse)


def _texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}

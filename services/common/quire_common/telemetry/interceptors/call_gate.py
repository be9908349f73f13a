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
        self._refusing: dict[str, Handler] = {}

    def guard(self, check: Check) -> None:
        """From now on calls are checked."""
        self.check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's own handler or, if the check refuses the call, one that refuses it and reads nothing:
        it runs the check a second time, to raise the refusal. Returns None for an unknown method, unchecked. An
        exception of the check that is no QuireError passes through."""
        handler = await continuation(handler_call_details)
        if handler is None or self.check is None:
            return handler
        path = handler_call_details.method
        try:
            self.check(path, _texts(handler_call_details.invocation_metadata))
        except QuireError:
            return self._refuse(path)
        return handler

    def _refuse(self, path: str) -> Handler:
        """Return the handler that refuses calls of this method: it calls the check again, which raises the refusal; if
        the check passes now, the call ends without a response. It is made once per method. It is a stream handler that
        reads no request, because gRPC itself would read the message of a call with one request."""
        refusing = self._refusing.get(path)
        if refusing is None:

            async def refuse(_requests: object, context: Any) -> None:
                if self.check is not None:
                    self.check(path, _texts(context.invocation_metadata()))

            refusing = self._refusing[path] = grpc.stream_stream_rpc_method_handler(refuse)
        return refusing


def _texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}

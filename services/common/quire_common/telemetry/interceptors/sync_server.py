"""The interceptor of thread-based servers. Handlers return a response or an iterator; both may raise QuireError."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc

from quire_common.errors import trailing_metadata
from quire_common.telemetry.interceptors.handlers import wrap_handler
from quire_common.telemetry.interceptors.server_call import UNTRACED, ServerCall, ServerMethod, status_code
from quire_common.telemetry.interceptors.unreadable import read_one, require_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from quire_common.identity.callers import CallerCheck

    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in the type stubs alone
    Admit = Callable[[Any, Any], Any]  # of request and context: returns the request, or raises QuireError


def sync_server_interceptors(
    untraced: Collection[str] = UNTRACED, *, callers: CallerCheck | None = None
) -> list[grpc.ServerInterceptor]:
    """For `grpc.server(interceptors=...)`."""
    return [SyncServerInterceptor(untraced, callers)]


class SyncServerInterceptor(grpc.ServerInterceptor):
    """Typed errors, request ids, spans and metrics for every call. `untraced` names `package.Service/Method`s.
    `callers` sees the peer's certificate before any message is read, and refuses the call with a QuireError."""

    def __init__(self, untraced: Collection[str] = UNTRACED, callers: CallerCheck | None = None) -> None:
        self._callers = callers
        self._untraced = frozenset(name.lstrip("/") for name in untraced)
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, wrapped as `_wrap` does; None for an unknown method. It is wrapped once per
        method, and anew if the server returns another handler object: only registered methods have a handler, so the
        table is bounded."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        path = handler_call_details.method
        cached = self._wrapped.get(path)
        if cached is None or cached[0] is not handler:
            cached = self._wrapped[path] = (handler, _wrap(handler, ServerMethod(path, self._untraced), self._callers))
        return cached[1]


def _wrap(handler: Handler, method: ServerMethod, callers: CallerCheck | None) -> Handler:
    """Return the handler with its behaviour wrapped. Calls are counted and traced, callers and requests are checked,
    and exceptions become typed errors. With a check of callers, the single request of a call is read as a stream.
    Otherwise gRPC would read the request before the behaviour runs."""
    streamed = callers is not None and not handler.request_streaming

    def admit(request: Any, context: Any) -> Any:
        """Check the caller by its certificate, read the request if it comes as a stream, and return it. Raises
        QuireError for a caller that is refused and for a request that is missing or unreadable."""
        if callers is not None:
            callers(method.path, context.auth_context())
        if streamed:
            request = read_one(request)
        require_readable(request)
        return request

    wrapped: Handler = wrap_handler(
        handler, lambda b: _unary(b, method, admit), lambda b: _streaming(b, method, admit), streamed=streamed
    )
    return wrapped


def _unary(behaviour: Any, method: ServerMethod, admit: Admit) -> Any:
    """Wrap a behaviour that returns one response. The wrapper admits the caller and the request, then runs the
    behaviour, inside `_guard`, which ends the call and answers exceptions."""

    def unary(request: Any, context: grpc.ServicerContext) -> Any:
        with _guard(method, context):
            return behaviour(admit(request, context), context)

    return unary


def _streaming(behaviour: Any, method: ServerMethod, admit: Admit) -> Any:
    """Wrap a behaviour that streams: admit the caller and the request, yield the responses guarded, and close the
    behaviour's generator at the end."""

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Admit the caller and the request, then yield the behaviour's responses. Its generator is closed at the end,
        also when the client leaves."""
        with _guard(method, context):
            responses = behaviour(admit(request, context), context)
            try:
                yield from responses
            finally:
                close = getattr(responses, "close", None)
                if close is not None:
                    close()

    return stream


@contextlib.contextmanager
def _guard(method: ServerMethod, context: Any) -> Iterator[None]:
    """Context manager around a handler: the call is counted and its span ended once, with its status. An exception
    aborts the call with a typed error. If the handler has aborted the call itself, or the client has left, the
    exception is only raised again."""
    call = ServerCall(method, context)
    try:
        yield
        call.end(status_code(context.code()))
    except Exception as error:
        if type(error) is Exception and not error.args and context.code() is not None:
            call.end(status_code(context.code()))  # context.abort raises a bare Exception
            raise
        if not context.is_active():
            call.end(grpc.StatusCode.CANCELLED)  # nobody is left to tell; what broke is most likely the departure
            raise
        typed = call.failed(error)
        call.end(typed.grpc_code, typed.code)
        context.set_trailing_metadata(tuple(trailing_metadata(typed)))
        context.abort(typed.grpc_code, typed.message)
    finally:
        call.end(grpc.StatusCode.CANCELLED)

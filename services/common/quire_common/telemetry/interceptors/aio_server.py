"""The interceptor of asyncio servers. Handlers are coroutines or async generators; both may raise QuireError.

An async generator is driven from here with `context.write` rather than handed to grpc: grpc does not close an
abandoned one, so on a cancelled call its `finally` blocks would run late and in another task. Here they run at once, in
the call's own task and context.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import grpc

from quire_common.cancellation import is_cancelled
from quire_common.errors import to_status, trailing_metadata
from quire_common.telemetry.interceptors.handlers import wrap_handler
from quire_common.telemetry.interceptors.server_call import UNTRACED, ServerCall, ServerMethod, status_code
from quire_common.telemetry.interceptors.unreadable import Read, reading, require_readable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    from quire_common.identity.callers import CallerCheck

    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in the type stubs alone


def aio_server_interceptors(
    untraced: Collection[str] = UNTRACED, *, receive_timeout_s: float = 0.0, callers: CallerCheck | None = None
) -> list[grpc.aio.ServerInterceptor]:
    """For `grpc.aio.server(interceptors=...)`."""
    return [AioServerInterceptor(untraced, receive_timeout_s, callers)]


class AioServerInterceptor(grpc.aio.ServerInterceptor):
    """Adds typed errors, request ids, spans and metrics to every call. `untraced` has names of
    `package.Service/Method`. `receive_timeout_s` is the time limit for the message of a call with one request; 0 means
    none. `callers` sees the peer's certificate before any message is read, and may refuse the call with a
    QuireError."""

    def __init__(
        self,
        untraced: Collection[str] = UNTRACED,
        receive_timeout_s: float = 0.0,
        callers: CallerCheck | None = None,
    ) -> None:
        self._untraced = frozenset(name.lstrip("/") for name in untraced)
        self._receive_timeout_s = receive_timeout_s
        self._callers = callers
        self._wrapped: dict[tuple[str, bool], tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, wrapped as `_wrap` does; None for an unknown method. It is wrapped once per
        method and kind, and anew if the server returns another handler object: only registered methods have a handler,
        so the table is bounded."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        path = handler_call_details.method
        key = path, handler.request_streaming
        cached = self._wrapped.get(key)
        if cached is None or cached[0] is not handler:
            wrapped = _wrap(handler, ServerMethod(path, self._untraced), self._receive_timeout_s, self._callers)
            cached = self._wrapped[key] = (handler, wrapped)
        return cached[1]


def _wrap(handler: Handler, method: ServerMethod, receive_timeout_s: float, callers: CallerCheck | None) -> Handler:
    """Return the handler with its behaviour wrapped. Calls are counted and traced, callers and requests are checked,
    and exceptions become typed errors. With a time limit or a check of callers, the single request of a call is read as
    a stream. Otherwise gRPC would read the request before the behaviour runs."""
    streamed = not handler.request_streaming and (receive_timeout_s > 0 or callers is not None)
    read = reading(receive_timeout_s or None) if streamed else None
    wrapped: Handler = wrap_handler(
        handler,
        lambda behaviour: _unary(behaviour, method, read, callers),
        lambda behaviour: _streaming(behaviour, method, read, callers),
        streamed=streamed,
    )
    return wrapped


def _unary(behaviour: Any, method: ServerMethod, read: Read | None, callers: CallerCheck | None) -> Any:
    """Wrap a behaviour that returns one response. The wrapper checks the caller, reads and checks the request, and
    awaits the behaviour; `_guarded` ends the call and answers exceptions."""

    async def unary(request: Any, context: Any) -> Any:
        return await _guarded(ServerCall(method, context), answer(request, context), context)

    async def answer(request: Any, context: Any) -> Any:
        """Check the caller, read and check the request, then await the behaviour. Raises QuireError for a refusal."""
        if callers is not None:
            callers(method.path, context.auth_context())
        if read is not None:
            request = await read(request)
        require_readable(request)
        return await behaviour(request, context)

    return unary


def _streaming(behaviour: Any, method: ServerMethod, read: Read | None, callers: CallerCheck | None) -> Any:
    """Wrap a behaviour that streams. The wrapper checks the caller, reads and checks the request, and runs the
    behaviour; `_guarded` ends the call and answers exceptions. Responses of an async generator are written here; a
    coroutine writes its own."""

    async def stream(request: Any, context: Any) -> None:
        await _guarded(ServerCall(method, context), answer(request, context), context)

    async def answer(request: Any, context: Any) -> None:
        """Check the caller, read and check the request, then run the behaviour. Raises QuireError for a refusal."""
        if callers is not None:
            callers(method.path, context.auth_context())
        if read is not None:
            request = await read(request)
        require_readable(request)
        result = behaviour(request, context)
        await (_write_all(result, context) if inspect.isasyncgen(result) else result)

    return stream


async def _write_all(responses: AsyncIterator[Any], context: Any) -> None:
    """Write the generator's responses to the call, and close the generator at the end, whatever ends it."""
    async with contextlib.aclosing(responses):  # type: ignore[type-var]  # the caller checks that it is an async generator
        async for response in responses:
            await context.write(response)


async def _guarded(call: ServerCall, work: Awaitable[Any], context: Any) -> Any:
    """Await the handler's work, end the call's count and span once, with its status, and return the result. An
    exception aborts the call with a typed error; so does a CancelledError that is not a cancellation of the call. A
    cancellation of the call and an abort by the handler are raised again."""
    try:
        result = await work
    except grpc.aio.AbortError:
        call.end(status_code(context.code()))
        raise
    except asyncio.CancelledError as error:
        if is_cancelled():
            call.end(grpc.StatusCode.CANCELLED)
            raise
        await _abort(call, error, context)  # the call lives: a task of the handler was cancelled, and it did not notice
    except Exception as error:
        await _abort(call, error, context)
    else:
        call.end(status_code(context.code()))
        return result
    finally:
        call.end(grpc.StatusCode.CANCELLED)


async def _abort(call: ServerCall, error: BaseException, context: Any) -> None:
    """Log the failure, end the call with it, and abort the call with the typed error; the abort raises."""
    typed = call.failed(error)
    call.end(typed.grpc_code, typed.code)
    await context.abort(typed.grpc_code, to_status(typed).message, trailing_metadata(typed))

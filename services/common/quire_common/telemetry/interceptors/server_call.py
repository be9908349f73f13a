"""ServerCall: the request id, span, count and latency of one call in a server, and the report of its failure.

The asyncio and the thread-based interceptor share it. It does not know their kinds of handlers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import context as otel_context

from quire_common.errors import Internal, QuireError, as_quire_error
from quire_common.identity.callers import ADMIN_RPCS, CALLER_NOT_ALLOWED, identity_of
from quire_common.telemetry import metrics, tracing
from quire_common.telemetry.audit import ALLOWED, audit
from quire_common.telemetry.logs import bind_request_id, get_logger

if TYPE_CHECKING:
    from collections.abc import Collection

log = get_logger(__name__)

REQUEST_ID_KEY = "x-request-id"
# Streams that live as long as their peers carry many requests: a span of such a stream says nothing and never ends.
# The services record spans per request instead. Health checks would drown what matters.
UNTRACED = frozenset(
    {
        "quire.v1.Scheduler/Session",
        "quire.v1.Scheduler/WatchLoad",
        "quire.v1.Scheduler/WatchPages",
        "quire.v1.Worker/Run",
        "quire.v1.Tokenizer/Detokenize",
        "quire.v1.Tokenizer/Tokenize",
        "quire.v1.KvStore/Watch",
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/List",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    }
)
# Of the gRPC codes, those that mean that the server is at fault (OpenTelemetry's conventions for gRPC).
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_CODES = {code.value[0]: code for code in grpc.StatusCode}

_handled = metrics.counter("quire_grpc_server_handled_total", "Calls that ended.", ("service", "method", "code"))
_refused = metrics.counter(
    "quire_grpc_server_refused_total", "Calls that ended by a typed error.", ("service", "method", "cause")
)
_latency = metrics.histogram("quire_grpc_server_latency_seconds", "Duration of calls.", ("service", "method"))


class ServerMethod:
    """The data that all calls of a method share."""

    def __init__(self, path: str, untraced: Collection[str]) -> None:
        self.path = path
        self.name = path.lstrip("/")
        self.service, _, self.method = self.name.rpartition("/")
        self.traced = self.name not in untraced


class ServerCall:
    """Begun when a handler is entered, ended exactly once."""

    __slots__ = ("_context", "_method", "_span", "_started", "ended")

    def __init__(self, method: ServerMethod, context: Any) -> None:
        """`context` is gRPC's, of the call. Binds the request id of the call's metadata to the current context (an
        empty one, if there is none), and makes the call's span the current one, unless the method is untraced or there
        is no tracing."""
        self._method = method
        self._context = context
        self._started = time.perf_counter()
        self.ended = False
        headers = dict(context.invocation_metadata() or ())
        # Never reset: grpc gives each call a context of its own (a task, or Context.run), which ends with it.
        bind_request_id(headers.get(REQUEST_ID_KEY))
        self._span: tracing.Span | None = None
        if method.traced and tracing.enabled():
            self._span = tracing.start_span(
                method.name,
                parent=tracing.extract_headers({k: v for k, v in headers.items() if isinstance(v, str)}),
                attributes={"rpc.system.name": "grpc", "rpc.method": method.name},
                kind=tracing.SpanKind.SERVER,
            )
            otel_context.attach(tracing.context_of(self._span))

    def failed(self, error: BaseException) -> QuireError:
        """Return the typed error for the client, and log the failure: with the traceback if the typed error is
        Internal, else at debug level. Does not end the call."""
        typed = as_quire_error(error)
        if typed is not error and not isinstance(error, grpc.RpcError):
            log.exception("the handler raised", method=self._method.name)
        elif isinstance(typed, Internal):
            log.exception("internal error", method=self._method.name, code=typed.code)
        else:
            log.debug("the call was refused", method=self._method.name, code=typed.code, reason=typed.message)
        return typed

    def end(self, code: grpc.StatusCode, error_code: str = "") -> None:
        """Count the call by its status and, if it failed by a typed error, by `error_code`, record its duration unless
        the method is untraced, and end its span, which only a fault of the server marks as an error. An
        administrative call, and one whose caller was refused, goes to the audit log. Only the first call of this method
        does something; any thread may make it."""
        if self.ended:
            return
        self.ended = True
        _handled.labels(self._method.service, self._method.method, code.name).inc()
        if self._method.name in ADMIN_RPCS or error_code == CALLER_NOT_ALLOWED:
            outcome = error_code or (ALLOWED if code is grpc.StatusCode.OK else code.name)
            caller = identity_of(self._context.auth_context() or {})
            audit(self._method.name, outcome, identity=caller or "", peer=self._context.peer())
        if error_code:
            _refused.labels(self._method.service, self._method.method, error_code).inc()
        if self._method.traced:
            _latency.labels(self._method.service, self._method.method).observe(time.perf_counter() - self._started)
        if self._span is not None:
            self._span.set_attribute("rpc.response.status_code", code.name)
            if code.name in _SERVER_FAULTS:
                tracing.mark_error(self._span, error_code or code.name)
            elif code is not grpc.StatusCode.OK:
                self._span.set_attribute("error.type", error_code or code.name)
            self._span.end()


def status_code(code: object) -> grpc.StatusCode:
    """A context's code as an enum: it may be absent (OK), a number or an enum."""
    if isinstance(code, grpc.StatusCode):
        return code
    return _CODES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else grpc.StatusCode.OK

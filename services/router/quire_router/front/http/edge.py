"""The outermost layer of the HTTP interface. For every route it checks credentials, sets request ids, converts errors
and counts requests.

Authentication is an allow-list. If keys are set, every path that is not in OPEN_PATHS needs a key, unknown paths
included. A CORS preflight needs none at any path.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

import orjson
from starlette.exceptions import HTTPException

from quire_common.errors import InvalidArgument, NotFound, QuireError, internal_error
from quire_common.telemetry.logs import bind_request_id, get_logger
from quire_router import metrics
from quire_router.api_keys import audited
from quire_router.front.http.body import BODY_TOO_LARGE, CLIENT_GONE, discard_body
from quire_router.front.http.body_budget import BODY_MEMORY_FULL
from quire_router.front.http.cors import NO_CORS, Cors
from quire_router.front.http.exchange import (
    SCOPE_KEY,
    Exchange,
    error_headers,
    send_json,
)
from quire_router.front.http.formats.error_shape import id_headers, shaped_error
from quire_router.front.http.open_paths import OPEN_PATHS
from quire_router.front.http.request_pacer import RequestPacer
from quire_router.front.request_ids import new_request_id, request_id_from
from quire_router.limits.rate_limits import RateLimited, limit_headers
from quire_router.principal import ADMIN, INFERENCE, METRICS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from quire_router.api_keys import ApiKeys
    from quire_router.limits.rate_limits import RateLimits

METRICS_PATH = "/metrics"
# Paths with this prefix need the scope `admin`, except for the open paths.
CONSOLE_PREFIX = "/console/"
_READING = ("GET", "HEAD", "OPTIONS")
# No rate limit keeps anybody from ending what runs.
_FREE = re.compile("/v1/responses/[^/]+/cancel")
# Whatever the method: to read or to delete a kept response asks the store, and the answer may be long.
_LIMITED = re.compile("/v1/responses/[^/]+")
_GONE_STATUS = 499
_MAX_TRACE_CHARS = 512
log = get_logger(__name__)


class MethodNotAllowed(InvalidArgument):
    """The error for a known path with a wrong method; `allow` lists the right methods. Only HTTP has it, so it is not
    in the common error tree."""

    http_status = 405

    def __init__(self, allow: str) -> None:
        super().__init__(
            "METHOD_NOT_ALLOWED", "This path does not support this method.", f"Use {allow or 'another path'}."
        )
        self.allow = allow


class Edge:
    """An ASGI application around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        limits: RateLimits,
        max_body_bytes: int,
        scope: str = INFERENCE,
        cors: Cors = NO_CORS,
    ) -> None:
        """`scope` is the scope that a key needs, except for /metrics and for the console's paths, which have their own
        scopes."""
        self._app = app
        self._keys = keys
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._scope = scope
        self._cors = cors
        self._pacer = RequestPacer()
        # What a client may write as a path is no action by itself.
        self._audited_paths = frozenset(getattr(route, "path", "") for route in getattr(app, "routes", ()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; other scopes are ignored. In a burst, the request waits for its turn, unless its path
        is open. A CORS preflight is answered without a credential. An error becomes an answer in the shape of the
        path's API (OpenAI's or Anthropic's), unless an answer has begun or the client has gone; one that is no
        QuireError is logged. At the end, the memory of the body is released, and the outcome is counted; no answer
        counts as status 499."""
        if scope["type"] != "http":
            return
        arrived_ns = time.monotonic_ns()
        if scope["path"] not in OPEN_PATHS:  # whether it lives is told in the middle of a burst too
            await self._pacer.enter()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given_id = request_id_from(headers.get(b"x-request-id", ""))
        exchange = scope[SCOPE_KEY] = Exchange(
            request_id=given_id or new_request_id(),
            id_from_header=bool(given_id),
            tenant="",
            traceparent=_bounded(headers.get(b"traceparent", "")),
            tracestate=_bounded(headers.get(b"tracestate", "")),
            wants_timings=headers.get(b"x-quire-timings", "") == "1",
            authorization=_authorization(scope),
            arrived_ns=arrived_ns,
            headers=self._cors.answer(headers.get(b"origin", "")),
        )
        scope["app"] = self._app  # so that Starlette raises a wrong method instead of answering it itself
        bind_request_id(exchange.request_id)
        status = 0

        async def counted_send(message: Message) -> None:
            """Send a message. For the head of an answer, first note its status, and add the headers with the request id
            and those of the exchange."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(name, exchange.request_id.encode("latin-1")) for name in id_headers(scope["path"])]
                message["headers"] = [*message["headers"], *own, *exchange.headers]
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await self._preflight(headers, counted_send)
                return
            with self._audited(scope, exchange):
                await self._admit_and_run(scope, receive, counted_send, exchange)
        except Exception as error:
            typed = _as_quire_error(error)
            if status == 0 and typed.code != CLIENT_GONE:
                await self._refuse(typed, scope["path"], exchange.request_id, receive, counted_send)
            elif status == 0:
                status = _GONE_STATUS
        finally:
            exchange.release_body()
            self._count(getattr(scope.get("route"), "path", "unmatched"), status or _GONE_STATUS, arrived_ns)

    async def _admit_and_run(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        """Admit the request, unless its path is open to all, and run its route. Starlette's errors become typed errors,
        so that the audit log has their codes."""
        try:
            if scope["path"] not in OPEN_PATHS:
                await self._admit(scope, exchange)
            await self._app(scope, receive, send)
        except HTTPException as error:
            raise _typed(error) from error

    def _audited(self, scope: Scope, exchange: Exchange) -> contextlib.AbstractContextManager[None]:
        """Return a context that writes the request and its outcome to the audit log. For a path that does not need the
        scope `admin`, and for methods that only read, the context does nothing. A path that is no route is logged as
        unknown."""
        if self._needed_scope(scope["path"]) != ADMIN or scope["method"] in _READING:
            return contextlib.nullcontext()
        route = scope["path"] if scope["path"] in self._audited_paths else "unknown path"
        peer = str((scope.get("client") or ("",))[0])
        return audited(self._keys, exchange.authorization, f"{scope['method']} {route}", peer)

    async def _admit(self, scope: Scope, exchange: Exchange) -> None:
        """Authenticate the request, and write the tenant and the limits of its key into the exchange. If the path needs
        the scope `inference`, the request counts, and its key has a limit of requests or tokens per minute,
        `RateLimits.admit` takes one request. Then the answer gets the limit headers, also a refusal. Raises
        Unauthenticated for a missing or unknown key, PermissionDenied for a key without the path's scope, and
        RateLimited if one of its limits is used up."""
        needed = self._needed_scope(scope["path"])
        principal = self._keys.authenticate(exchange.authorization, needed)
        exchange.identify(principal)
        if principal.limits.per_minute and needed == INFERENCE and _counts(scope["method"], scope["path"]):
            try:
                levels = await self._limits.admit(principal)
            except RateLimited as error:
                exchange.add_headers(limit_headers(principal.limits, error.levels))
                raise
            exchange.add_headers(limit_headers(principal.limits, levels))

    def _needed_scope(self, path: str) -> str:
        """Return the scope that a key needs for this path: `metrics` for /metrics, `admin` for the console's data,
        otherwise the scope of this port."""
        if path == METRICS_PATH:
            return METRICS
        return ADMIN if path.startswith(CONSOLE_PREFIX) else self._scope

    @staticmethod
    def _count(route: str, status: int, arrived_ns: int) -> None:
        """Count the request by route and status. A request to a known route below /v1/ is also logged with its
        duration."""
        metrics.requests_counter(route, status).inc()
        if route.startswith("/v1/"):
            log.info("request", route=route, status=status, ms=(time.monotonic_ns() - arrived_ns) // 1_000_000)

    async def _preflight(self, headers: dict[bytes, str], send: Send) -> None:
        """Answer a browser's CORS preflight request, which has no credential, with 204. If the answer's headers do not
        allow the page, the browser does not send the page's request."""
        asked = (headers.get(b"access-control-request-" + name, "") for name in (b"method", b"headers"))
        allowed = self._cors.preflight(headers.get(b"origin", ""), *asked)
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})

    async def _refuse(self, error: QuireError, path: str, request_id: str, receive: Receive, send: Send) -> None:
        """Count the error by code, and send it as JSON in the shape of the path's API; MethodNotAllowed also has the
        header `allow`. After BODY_TOO_LARGE and BODY_MEMORY_FULL, read the body on for a while before the connection
        closes, so that the client sees the answer."""
        metrics.http_refused.labels(error.code).inc()
        status, shaped = shaped_error(path, error, request_id)
        body, headers = orjson.dumps(shaped), error_headers(error)
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", error.allow.encode()))
        if error.code not in (BODY_TOO_LARGE, BODY_MEMORY_FULL):
            await send_json(send, body, status=status, headers=headers)
            return
        # A client that is still sending would lose the answer to a reset: answer, read on for a while, then close.
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await discard_body(receive, self._max_body_bytes)
        await send({"type": "http.response.body", "body": b""})


def _counts(method: str, path: str) -> bool:
    """Return whether the request counts against its key's rate limit. Each POST counts, except the cancellation of a
    response; other methods count only on the path of one stored response."""
    return not _FREE.fullmatch(path) if method == "POST" else bool(_LIMITED.fullmatch(path))


def _authorization(scope: Scope) -> str:
    """Return the credential as a bearer token, from `Authorization` or Anthropic's `x-api-key`. Returns '' if there is
    none, or if there are several different ones, since a proxy in front of the router may have checked another one."""
    credentials: set[bytes] = set()
    for name, value in scope["headers"]:
        if name == b"authorization":
            credentials.add(value)
        elif name == b"x-api-key":
            credentials.add(b"Bearer " + value)
    return credentials.pop().decode("utf-8", "surrogateescape") if len(credentials) == 1 else ""


def _bounded(header: str) -> str:
    """Return a trace header, or '' if it is longer than W3C allows."""
    return header if len(header) <= _MAX_TRACE_CHARS else ""


def _as_quire_error(error: Exception) -> QuireError:
    """Return a QuireError unchanged. Any other error is logged and becomes an internal error."""
    if isinstance(error, QuireError):
        return error
    log.exception("the request failed")
    return internal_error()


def _typed(error: HTTPException) -> QuireError:
    """Convert an error of Starlette: 405 becomes MethodNotAllowed, any other NotFound."""
    if error.status_code == 405:
        return MethodNotAllowed((error.headers or {}).get("Allow", ""))
    return NotFound("NO_SUCH_PATH", "There is nothing at this path.", "See the routes in the README.")

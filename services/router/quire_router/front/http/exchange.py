"""Exchange: one HTTP request and its answer as the endpoints see them. It has ids, tenant and trace from the headers,
and sends answers as plain ASGI messages.

Endpoints are ASGI applications that call `send` themselves, so no layer lies between a token and its socket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_router.principal import NO_LIMITS, KeyLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope, Send

    from quire_common.errors import QuireError
    from quire_router.front.http.body_budget import BodyLease
    from quire_router.principal import Principal

SCOPE_KEY = "quire.exchange"
_MAX_WARNING_CHARS = 1000


@dataclass(slots=True)
class Exchange:
    """The edge's facts about a request. The id in the body may replace `request_id`; the answer then has the body's
    id."""

    request_id: str
    id_from_header: bool
    tenant: str
    traceparent: str
    tracestate: str
    wants_timings: bool
    arrived_ns: int
    # What the client sent to prove itself: for endpoints that are open, but say more to those who have a key.
    authorization: str = field(default="", repr=False)
    # The tenant's label in metrics.
    tenant_name: str = ""
    # The limits of the caller's key.
    limits: KeyLimits = NO_LIMITS
    # Sent with every answer to it.
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    # The part of the body memory that the exchange's body holds.
    body: BodyLease | None = None

    def identify(self, principal: Principal) -> None:
        """Note the tenant and the limits of the caller's key."""
        self.tenant, self.tenant_name, self.limits = principal.tenant, principal.tenant_name, principal.limits

    def add_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Add headers to every answer of this exchange."""
        self.headers += headers

    def hold_body(self, lease: BodyLease) -> None:
        """Note the lease that the body holds until `release_body`."""
        self.body = lease

    def release_body(self) -> None:
        """Release the lease of the body: its prompts have been tokenized, or the request has ended. Idempotent."""
        if self.body is not None:
            self.body.release()

    def use_request_id(self, request_id: str) -> None:
        """Replace the request's id by the one in the body."""
        self.request_id = request_id


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that the edge put into the scope."""
    exchange: Exchange = scope[SCOPE_KEY]
    return exchange


def error_headers(error: QuireError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error. 429, 503 and errors with a delay have `retry-after`, in whole seconds, rounded
    up, and `retry-after-ms`, which OpenAI's clients prefer; both say one second at least. 401 has
    `www-authenticate`."""
    headers = []
    if error.retry_after_s > 0 or error.http_status in (429, 503):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(max(1.0, error.retry_after_s) * 1000)).encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def warning_headers(warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the header `x-quire-warnings`, which names the parts of a request that the answer does not follow, cut to
    1,000 characters. Characters outside ASCII are then escaped. Returns no header if there are no warnings."""
    if not warnings:
        return []
    text = "; ".join(" ".join(each.split()) for each in warnings)[:_MAX_WARNING_CHARS]
    return [(b"x-quire-warnings", text.encode("ascii", "backslashreplace"))]


async def send_json(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    headers: list[tuple[bytes, bytes]] | None = None,
    content_type: bytes = b"application/json",
) -> None:
    """Send a whole answer: the head with status, content type, content length and the other `headers`, then `body`."""
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})

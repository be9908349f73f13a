"""One HTTP exchange as the endpoints see it: ids, tenant and trace from the headers; answers as plain ASGI messages.

Endpoints are ASGI applications that write with `send` themselves: a token's way to the socket has no layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_router.principal import KeyLimits

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
    """What the edge learned of a request. `request_id` may be replaced by the body's; the answer then carries that."""

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
    limits: KeyLimits = field(default_factory=KeyLimits)
    # Sent with every answer to it.
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    # The part of the body memory that the exchange's body holds.
    body: BodyLease | None = None

    def identify(self, principal: Principal) -> None:
        """Note the tenant and the limits of the caller's key."""
        self.tenant, self.tenant_name, self.limits = principal.tenant, principal.tenant_name, principal.limits

    def add_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send these with every answer too."""
        self.headers += headers

    def hold_body(self, lease: BodyLease) -> None:
        """Note what the body holds, until `release_body`."""
        self.body = lease

    def release_body(self) -> None:
        """Give back what the body holds: it has become a job, or the request has ended. Idempotent."""
        if self.body is not None:
            self.body.release()

    def use_request_id(self, request_id: str) -> None:
        """Replace the request's id by the one in the body."""
        self.request_id = request_id


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that the edge put into the scope."""
    exchange: Exchange = scope[SCOPE_KEY]
    return exchange


def error_headers(error: QuireError) -> list[tuple[bytes, bytes]]:
    """Return `retry-after` for 429, 503 and errors with a delay, in whole seconds, rounded up and at least 1; beside it
    `retry-after-ms`, which OpenAI's clients prefer; and `www-authenticate` for 401."""
    headers = []
    if error.retry_after_s > 0 or error.http_status in (429, 503):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(max(1.0, error.retry_after_s) * 1000)).encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def warning_headers(warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the header that says what of a request the answer does not keep to; none where there is nothing to
    say."""
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
    """Send a whole answer: its head, with content type and length, and `body`."""
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})

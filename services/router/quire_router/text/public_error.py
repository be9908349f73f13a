"""Converts a peer's failure to the error that a client sees. Errors with Quire's own codes pass unchanged. A bare gRPC
status, with the details of a connection inside the cluster, does not pass."""

from __future__ import annotations

from quire_common.errors import QuireError, Unavailable
from quire_common.telemetry.logs import get_logger

_PEER_PREFIX = "PEER_"
log = get_logger(__name__)


def as_public(error: QuireError) -> QuireError:
    """Return the error itself if it has one of Quire's own codes. For a bare gRPC status (a PEER_ code), log its text,
    and return an Unavailable without this text, which may be retried after a second."""
    if not error.code.startswith(_PEER_PREFIX):
        return error
    log.warning("a peer failed", code=error.code, reason=error.message)
    return Unavailable(
        "UPSTREAM_FAILED",
        "A service behind this router failed.",
        "Retry; report the request id if it stays.",
        retry_after_s=1.0,
    )

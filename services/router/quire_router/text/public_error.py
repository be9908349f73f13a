"""What a peer's failure becomes before a client sees it: our own codes pass, a bare transport status does not."""

from __future__ import annotations

from quire_common.errors import QuireError, Unavailable
from quire_common.telemetry.logs import get_logger

_PEER_PREFIX = "PEER_"
log = get_logger(__name__)


def as_public(error: QuireError) -> QuireError:
    """Return the error itself; for a bare transport status, Unavailable without its text, which is only logged."""
    if not error.code.startswith(_PEER_PREFIX):
        return error
    log.warning("a peer failed", code=error.code, reason=error.message)
    return Unavailable(
        "UPSTREAM_FAILED",
        "A service behind this router failed.",
        "Retry; report the request id if it stays.",
        retry_after_s=1.0,
    )

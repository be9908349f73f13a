"""A metric that shows whether Redis answers, for each use that a service makes of Redis."""

from __future__ import annotations

from quire_common.telemetry.metrics import gauge

_up = gauge("quire_redis_up", "1: the last call of Redis for this use was answered; 0: it was not.", ("use",))


def note_redis(use: str, *, answered: bool) -> None:
    """Note whether Redis has answered the last call in time. `use` is `discovery`, `limits`, `responses` or `pages`."""
    _up.labels(use).set(answered)

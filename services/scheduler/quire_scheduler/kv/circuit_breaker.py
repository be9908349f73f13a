"""Stops asking who does not answer: after some failures in a row there is a pause, then one try, and a longer pause."""

from __future__ import annotations

_FAILURES = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class CircuitBreaker:
    """One per thing that may not answer. Knows nothing of what it is."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._until_s = 0.0
        # Somebody tries it after a pause.
        self._tried = False

    @property
    def closed(self) -> bool:
        """It has answered lately, as far as is known."""
        return self._failures < _FAILURES

    def allows(self, now: float) -> bool:
        """Whether to ask now."""
        return self.closed or now >= self._until_s

    def asked(self, now: float) -> None:
        """It is being asked: during a pause nobody else is to wait for the same answer."""
        if not self.closed:
            self._until_s, self._tried = now + self._pause_s, True

    def worked(self) -> None:
        """It answered."""
        self._failures, self._pause_s, self._tried = 0, _FIRST_PAUSE_S, False

    def failed(self, now: float) -> None:
        """It did not answer, or could not do it."""
        self._failures += 1
        if self._tried:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if self._tried or self._failures == _FAILURES:
            self._until_s = now + self._pause_s
        self._tried = False

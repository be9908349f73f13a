"""Pulse: whether a worker lives (it says anything at all) and gets on (it answers Grants, and reports steps).

Silent is dead: a healthy worker sends heartbeats. Hung is dead too: heartbeats are no progress.
"""

from __future__ import annotations


class LivenessMonitor:
    """One epoch's. Times are the caller's clock, in seconds."""

    def __init__(self, silence_s: float, progress_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._progress_s = progress_s
        self._heard = self._progressed = now
        self._sent = 0
        self._retired = 0

    def grant_sent(self, seq: int) -> None:
        """A Grant was sent."""
        self._sent = seq

    def frame_received(self, now: float, retired: int, *, heartbeat: bool) -> None:
        """A frame came. One that crossed a Grant on its way is progress, yet that Grant waits still."""
        self._heard = now
        if not heartbeat:
            self._progressed = now
            self._retired = retired

    def restart(self, now: float) -> None:
        """This side was not listening: what the worker said meanwhile is still to be read."""
        self._heard = self._progressed = now

    def failure(self, now: float, *, busy: bool) -> str:
        """Why the worker is given up, or nothing. `busy`: slots are held, so that steps are to be expected."""
        if now - self._heard > self._silence_s:
            return "it is silent"
        if self._sent <= self._retired and not busy:
            self._progressed = now
        elif now - self._progressed > self._progress_s:
            return "it hangs"
        return ""

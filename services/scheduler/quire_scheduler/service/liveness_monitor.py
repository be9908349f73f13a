"""LivenessMonitor: decides whether a worker is alive (it sends frames) and makes progress (it answers Grants and
reports steps).

A silent worker counts as dead, since a healthy one sends heartbeats. A worker counts as hung if it sends only
heartbeats while Grants are unanswered or slots are held.
"""

from __future__ import annotations


class LivenessMonitor:
    """Monitors the worker during one epoch. Times are in seconds of the caller's clock."""

    def __init__(self, silence_s: float, progress_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._progress_s = progress_s
        self._heard = self._progressed = now
        self._sent = 0
        self._retired = 0

    def grant_sent(self, seq: int) -> None:
        """Note that Grant `seq` was sent."""
        self._sent = seq

    def frame_received(self, now: float, retired: int, *, heartbeat: bool) -> None:
        """Note that a frame came. Only a frame that is no heartbeat counts as progress. `retired`, which is ignored in
        a heartbeat, is the last Grant that the worker has retired; a frame that was sent before a Grant arrived does
        not answer that Grant."""
        self._heard = now
        if not heartbeat:
            self._progressed = now
            self._retired = retired

    def restart(self, now: float) -> None:
        """Begin the measurement anew, because the scheduler did not run and frames that came meanwhile are still
        unread."""
        self._heard = self._progressed = now

    def failure(self, now: float, *, busy: bool) -> str:
        """Return why the worker counts as lost: no frame came for `silence_s`, or nothing but heartbeats for
        `progress_s` while Grants are unanswered or it is `busy` (slots are held). Returns an empty string if it does
        not. A check while no Grant is unanswered and no slot is held counts as progress."""
        if now - self._heard > self._silence_s:
            return "it is silent"
        if self._sent <= self._retired and not busy:
            self._progressed = now
        elif now - self._progressed > self._progress_s:
            return "it hangs"
        return ""

"""LivenessMonitor: whether a worker is alive (it sends frames) and makes progress (it answers Grants and reports
steps).

A silent worker counts as dead, since a healthy one sends heartbeats. A worker that only sends heartbeats while Grants
wait counts as hung.
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
        """Note that a frame came; only one that is no heartbeat is progress. A frame that the worker sent before a
        Grant arrived does not answer that Grant."""
        self._heard = now
        if not heartbeat:
            self._progressed = now
            self._retired = retired

    def restart(self, now: float) -> None:
        """The scheduler was not reading: frames that came meanwhile are still to be read."""
        self._heard = self._progressed = now

    def failure(self, now: float, *, busy: bool) -> str:
        """Return why the worker counts as lost, or an empty string. `busy`: slots are held, so the worker should report
        steps."""
        if now - self._heard > self._silence_s:
            return "it is silent"
        if self._sent <= self._retired and not busy:
            self._progressed = now
        elif now - self._progressed > self._progress_s:
            return "it hangs"
        return ""

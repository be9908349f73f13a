"""LoadWatch: how far the one load of this process is, for any number of watchers. Loads nothing itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_common.credit import ModelInfo
    from quire_common.errors import QuireError

_LOOK_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadState:
    """The last one of a load has a model or an error."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    model: ModelInfo | None = None
    error: QuireError | None = None

    @property
    def ended(self) -> bool:
        """Whether no other will follow."""
        return self.model is not None or self.error is not None


class LoadWatch:
    """Written by the loading thread, read by all. Watchers see the newest state, not every one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = LoadState("starting")
        self._heard = threading.Event()

    @property
    def state(self) -> LoadState:
        """As it is now."""
        return self._state

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """A phase has come so far."""
        self._set(LoadState(phase, done_bytes, total_bytes))

    def succeeded(self, model: ModelInfo) -> None:
        """The worker is ready."""
        self._set(LoadState("ready", model=model))

    def failed(self, error: QuireError) -> None:
        """The load is over; the phase stays the one that failed."""
        last = self._state
        self._set(LoadState(last.phase, last.done_bytes, last.total_bytes, error=error))

    def states(self, wanted: Callable[[], bool] = lambda: True) -> Iterator[LoadState]:
        """The present state and those that follow, until the load has ended or nobody wants to know any more."""
        seen: LoadState | None = None
        while wanted():
            with self._changed:
                if self._state is seen:
                    self._changed.wait(_LOOK_UP_S)
                    continue
                seen = self._state
            yield seen
            if seen.ended:
                self._heard.set()
                return

    def wait_heard(self, timeout_s: float) -> bool:
        """Wait until a watcher has been told how the load ended; whether one was."""
        return self._heard.wait(timeout_s)

    def _set(self, state: LoadState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

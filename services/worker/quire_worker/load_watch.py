"""LoadWatch: the progress of this process's only load, for any number of watchers. LoadWatch itself loads nothing."""

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
    """How far a load has come. The final state of a load has a model or an error."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    model: ModelInfo | None = None
    error: QuireError | None = None

    @property
    def ended(self) -> bool:
        """Whether this is the final state of the load."""
        return self.model is not None or self.error is not None


class LoadWatch:
    """Written by the loading thread, read by all. Watchers see the newest state, not every one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = LoadState("starting")
        self._heard = threading.Event()

    @property
    def state(self) -> LoadState:
        """The newest state."""
        return self._state

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Publish how many bytes of a phase are done, and wake all watchers."""
        self._set(LoadState(phase, done_bytes, total_bytes))

    def succeeded(self, model: ModelInfo) -> None:
        """Publish the final state: the worker is ready with `model`."""
        self._set(LoadState("ready", model=model))

    def failed(self, error: QuireError) -> None:
        """Publish the final state: `error`, in the phase that failed."""
        last = self._state
        self._set(LoadState(last.phase, last.done_bytes, last.total_bytes, error=error))

    def states(self, wanted: Callable[[], bool] = lambda: True) -> Iterator[LoadState]:
        """Yield the present state and then each newer one, waiting between them; states that pass quickly are skipped.
        Ends after the final state, or when `wanted()` is false, which is checked about once a second. A watcher that
        asks on after the final state lets `wait_heard` return."""
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
        """Wait until a watcher has received the final state and asked for the next one. Returns False if that takes
        longer than `timeout_s`."""
        return self._heard.wait(timeout_s)

    def _set(self, state: LoadState) -> None:
        """Replace the state, and wake all that wait for a newer one."""
        with self._changed:
            self._state = state
            self._changed.notify_all()

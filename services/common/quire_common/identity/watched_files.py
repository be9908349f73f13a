"""WatchedFiles: a value that is read from files and follows their changes. So certificates, API keys and other secrets
change without a restart.

One thread watches the files of all values of the process, and reloads those that have changed. If a new value cannot be
loaded, the failure is logged and counted, and the former value stays.
"""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from quire_common.errors import QuireError, as_quire_error
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.metrics import counter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
# Inode numbers, times of modification and sizes of files; None for a file that is not there.
_State = tuple[tuple[int, int, int] | None, ...]

POLL_S: Final = 1.0
log = get_logger(__name__)
_reloads = counter(
    "quire_reloads_total", "Files that were loaded again after a change, by whether that worked.", ("what", "outcome")
)


class WatchedFiles(Generic[T]):
    """A value, and the files from which it is read. Safe to use from any thread."""

    def __init__(
        self, what: str, paths: Sequence[str], load: Callable[[], T], changed: Callable[[T], None] | None = None
    ) -> None:
        """Load the value, and watch the files for as long as this object lives, in a thread that the first object of
        the process starts. What `load` raises here, this constructor raises. `what` names the files in logs and
        metrics. The watching thread calls `changed` with each later value."""
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._changed = changed
        self._refused: _State | None = None
        self._seen = _state(self._paths)
        self.value = load()
        self.generation = 0
        for outcome in ("loaded", "refused"):  # so that increase() sees the first reload
            _reloads.labels(what, outcome)
        _watcher.add(self)

    def check(self) -> None:
        """Load the value again if the files have changed. A new value replaces the former one and raises `generation`
        by one, which is logged and counted. It is then passed to the function `changed`, whose exceptions pass through;
        the new value stays. If the value cannot be loaded, the failure is logged and counted, once per change of the
        files, and the former value stays.

        Only one file of a pair may be written yet. So nothing is reported, and the next check tries again, if the files
        change during the load, or if the load fails within 1 s of a change.
        """
        state = _state(self._paths)
        if state in (self._seen, self._refused):
            return
        try:
            value = self._load()
        except Exception as error:
            if state == _state(self._paths) and not _of_this_moment(state):
                self._refused = state
                self._refuse(as_quire_error(error))
            return
        if state != _state(self._paths):
            return
        self._seen, self._refused, self.value = state, None, value
        self.generation += 1
        _reloads.labels(self._what, "loaded").inc()
        log.info("files were loaded again", what=self._what, files=self._paths)
        if self._changed is not None:
            self._changed(value)

    def _refuse(self, error: QuireError) -> None:
        """Count and log that the changed files cannot be loaded, with this error; the former value stays."""
        _reloads.labels(self._what, "refused").inc()
        log.error(
            "changed files cannot be loaded, what was loaded before stays",
            what=self._what,
            files=self._paths,
            code=error.code,
            error=error.message,
            fix=error.fix,
        )


class _Watcher:
    """The thread, which starts with the first value. It does not keep values alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[WatchedFiles[object]] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, files: WatchedFiles[T]) -> None:
        """Watch these files from now on. Starts the thread if it does not run in this process."""
        with self._lock:
            self._watched.add(files)  # type: ignore[arg-type]  # values are read here and never written
            if self._thread is None or not self._thread.is_alive():  # a child process has no threads of its parent
                self._thread = threading.Thread(target=self._run, name="file-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Check all watched files every `POLL_S`, for ever. Runs in the watching thread."""
        while True:
            time.sleep(POLL_S)
            self._check_all()

    def _check_all(self) -> None:
        """Check all watched files once. An exception of a check is logged. The thread holds no files after this."""
        with self._lock:
            watched = list(self._watched)
        for files in watched:
            try:
                files.check()
            except Exception:
                log.exception("a change of files was not passed on")


_watcher = _Watcher()


def _state(paths: Sequence[str]) -> _State:
    return tuple(map(_file_state, paths))


def _file_state(path: str) -> tuple[int, int, int] | None:
    """Return the file's inode number, time of change in ns and size in bytes; None if it cannot be looked at."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _of_this_moment(state: _State) -> bool:
    """Return whether a file changed less than `POLL_S` ago, by the clock, so that others of its pair may not be written
    yet."""
    return any(file is not None and abs(time.time_ns() - file[1]) < POLL_S * 1e9 for file in state)

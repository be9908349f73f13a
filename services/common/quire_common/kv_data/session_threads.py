"""SessionThreads: the sessions of a port, each on a thread of its own, up to a limit.

When the limit is reached, a new session replaces the one that has waited longest without showing a key.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.kv_data.served_session import ServedSession

    Refused = Callable[[str], None]

log = get_logger(__name__)
_LOOK_S = 0.02


class SessionThreads:
    """At most `most` at once; a session that was ended to make room does not count any more, though its thread may
    still run. Threads are called `name`. Used by any thread."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._threads: dict[ServedSession[Any], threading.Thread] = {}

    def __len__(self) -> int:
        return len(self._threads)

    def begin(self, session: ServedSession[Any], refused: Refused, on_end: Callable[[], None] = lambda: None) -> None:
        """Serve the session by a thread of its own. If there are too many sessions, the one that has waited longest
        without a key is ended; if there is none, the new session is refused and its connection closed. Both call
        `refused` with `too_many`. If the system has no thread left, the session is refused with `no_thread`. Each of
        these is logged. `on_end` is called once, in any case: when the session has ended, or at the refusal."""
        thread = threading.Thread(target=self._run, args=(session, on_end), name=self._name, daemon=True)
        with self._changed:
            is_full = len(self._threads) >= self._most
            has_room = not is_full or self._make_room()
            if has_room:
                self._threads[session] = thread
        if is_full:
            log.warning("too many data connections", room_is_made=has_room)
            refused("too_many")
        if not has_room:
            session.abandon()
            on_end()
            return
        try:
            thread.start()
        except RuntimeError as error:  # the system has none left: it may have one for those who come later
            with self._changed:
                self._threads.pop(session, None)
            session.abandon()
            log.warning("a data connection got no thread", cause=str(error))
            refused("no_thread")
            on_end()

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no session works on a request, but for `timeout_s` at most. Sessions that wait for their next
        request do not count."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while any(session.busy for session in self._threads) and time.monotonic() < deadline:
                self._changed.wait(_LOOK_S)

    def close(self, join_s: float) -> None:
        """End all sessions, and wait up to `join_s` for the thread of each that has started."""
        with self._changed:
            threads = dict(self._threads)
            for session in threads:
                session.stop()
        for thread in threads.values():
            if thread.is_alive():  # not where `begin` has yet to start it: that session ends at once
                thread.join(join_s)

    def _make_room(self) -> bool:
        """Stop and forget the session that has waited longest without showing a key. Returns False if all sessions have
        shown one. Called with the lock held."""
        oldest = next((each for each in self._threads if not each.authenticated), None)
        if oldest is None:
            return False
        oldest.stop()
        del self._threads[oldest]
        return True

    def _run(self, session: ServedSession[Any], on_end: Callable[[], None]) -> None:
        """Serve the session, then forget it and call `on_end`. An exception that breaks it is logged, except an
        OSError: that one is ignored. Runs in the session's thread."""
        try:
            with contextlib.suppress(OSError):  # it was stopped before it began
                session.run()
        except Exception:
            log.exception("a data connection failed")
        finally:
            with self._changed:
                self._threads.pop(session, None)
                self._changed.notify_all()
            on_end()

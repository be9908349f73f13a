"""A service whose threads are watched: `python watched.py SERVICE FLAGS...` is `python -m quire_SERVICE FLAGS...`.

Every callback of its event loop, and every step of a worker's model thread, that takes more than LEAST_MS of its
thread's processor time becomes a line in QUIRE_ABUSE_LOG, a folder. QUIRE_ABUSE_MUTATION breaks a service on purpose.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAST_MS = 10.0
ROOT = Path(__file__).resolve().parents[2]


class SpentLog:
    """A file of this process; lines of `at` (monotonic seconds), `cpu_ms`, `what`.

    Python's garbage collector runs within whatever callback allocates next. `what` names its share where it matters.
    """

    def __init__(self, folder: Path, service: str) -> None:
        self._file = (folder / f"{service}-{os.getpid()}.jsonl").open("a", buffering=1, encoding="utf-8")
        self._collecting = threading.local()
        gc.callbacks.append(self._collect)

    def note(self, began_ns: int, what: Callable[[], str]) -> None:
        """Write a line, unless little was spent since `began_ns` of the thread's clock."""
        cpu_ms = (time.thread_time_ns() - began_ns) / 1e6
        if cpu_ms >= LEAST_MS:
            collected_ms = sum(took for ended, took in getattr(self._collecting, "long", ()) if ended > began_ns)
            share = f" ({collected_ms:.0f} ms of it gc)" if collected_ms else ""
            line = {"at": time.monotonic(), "cpu_ms": cpu_ms, "what": what() + share}
            self._file.write(json.dumps(line) + "\n")

    def _collect(self, phase: str, _info: dict[str, int]) -> None:
        now_ns = time.thread_time_ns()
        if phase == "start":
            self._collecting.began_ns = now_ns
        else:
            took_ms = (now_ns - getattr(self._collecting, "began_ns", now_ns)) / 1e6
            if took_ms >= LEAST_MS / 10:
                self._collecting.long = [*getattr(self._collecting, "long", ())[-9:], (now_ns, took_ms)]


def watch_callbacks(log: SpentLog) -> None:
    """Of asyncio's own loop, whose handles are Python: uvloop's cannot be watched."""
    import uvloop

    uvloop.run = asyncio.run  # type: ignore[assignment]  # services give it a coroutine and nothing else
    plain = asyncio.events.Handle._run

    def watched(handle: asyncio.Handle) -> None:
        began_ns = time.thread_time_ns()
        try:
            plain(handle)
        finally:
            log.note(began_ns, lambda: _name(handle))

    setattr(asyncio.events.Handle, "_run", watched)  # noqa: B010 - not declared to be writable


def watch_steps(log: SpentLog) -> None:
    """Of a worker's model thread and of its device."""
    from quire_worker.engine.engine import Engine
    from quire_worker.engine.step_runner import StepRunner

    for cls, names in ((Engine, ("apply", "launch", "collect")), (StepRunner, ("run",))):
        for name in names:
            setattr(cls, name, _timed(getattr(cls, name), log, f"{cls.__name__}.{name}"))


def _timed(method: Callable[..., Any], log: SpentLog, what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*arguments: Any) -> Any:
        began_ns = time.thread_time_ns()
        try:
            return method(*arguments)
        finally:
            log.note(began_ns, lambda: what)

    return timed


def _name(handle: asyncio.Handle) -> str:
    callback = getattr(handle, "_callback", None)
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner.get_coro()))
    return str(getattr(callback, "__qualname__", callback))


def main() -> int:
    """The service's own exit code."""
    service, flags = sys.argv[1], sys.argv[2:]
    sys.path.insert(0, str(ROOT))
    from tests.abuse.mutations import MUTATIONS

    log = SpentLog(Path(os.environ["QUIRE_ABUSE_LOG"]), service)
    watch_callbacks(log)
    if service == "worker":
        watch_steps(log)
    mutation = os.environ.get("QUIRE_ABUSE_MUTATION", "")
    if mutation:
        MUTATIONS[mutation](service)
    sys.argv = [f"quire_{service}", *flags]
    module = __import__(f"quire_{service}.__main__", fromlist=["main"])
    return int(module.main())


if __name__ == "__main__":
    sys.exit(main())

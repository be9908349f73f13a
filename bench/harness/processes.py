"""Service: a service process of a benchmark or a test. It is started, watched until it is ready, measured, and
ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from bench.harness.process_cpu import cpu_s

_KEPT_LINES = 200
_POLL_S = 0.05
START_LIMIT_S = 120.0
STOP_LIMIT_S = 40.0


class Service:
    """`python -m quire_<name>` on a free port. A context manager, after which the process is gone. `prefix` is a
    command that runs another command in its place, as `env` does."""

    def __init__(self, name: str, *flags: str, listen: str = "127.0.0.1:0", prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", f"quire_{name}", "--listen", listen, "--log-format=json", *flags]
        self.name = name
        self.lines: deque[dict[str, Any]] = deque(maxlen=_KEPT_LINES)
        self._changed = threading.Condition()
        self._open = True
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, name=f"{name}-log", daemon=True).start()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def address(self) -> str:
        """Return the address at which the service listens, when it does."""
        return str(self.until(lambda line: line["message"] == "listening")["address"])

    def ready(self) -> str:
        """Return the address when the service is ready."""
        self.until(lambda line: line["message"] == "ready")
        return self.address()

    def until(self, wanted: Callable[[dict[str, Any]], bool], limit_s: float = START_LIMIT_S) -> dict[str, Any]:
        """Return the first log line of this kind, now or later."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if wanted(line)]

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._open, limit_s)
            lines = found()
        if not lines:
            raise RuntimeError(f"the {self.name} never said it; it said: {list(self.lines)[-5:]}")
        return lines[0]

    def complaints(self) -> list[dict[str, Any]]:
        """Return warnings, errors and lines that are not log records, among the service's last lines."""
        with self._changed:
            return [line for line in self.lines if line.get("level") not in ("debug", "info")]

    def cpu_s(self) -> float:
        """Return user and system time so far, without children."""
        return cpu_s(self.pid)

    def stop(self) -> int:
        """Stop the service; if it does not stop, kill it. Returns the exit code."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()

    def _read(self) -> None:
        with self.popen.stderr or open(os.devnull) as stream:  # noqa: PTH123 - never: a pipe was asked for
            for text in stream:
                line = json.loads(text) if text.startswith("{") else {"message": text.rstrip()}
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._open = False
            self._changed.notify_all()


def until_healthy(url: str) -> None:
    """Wait until the router at this address has a scheduler and a tokenizer."""
    direct = build_opener(ProxyHandler({}))
    while True:
        with contextlib.suppress(URLError), direct.open(f"{url}/health") as answer:
            if answer.status == 200:
                return
        time.sleep(_POLL_S)

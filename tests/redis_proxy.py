"""A TCP relay to a Redis, or to anything, that does to what passes whatever a test wants."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import TracebackType

_CHUNK_BYTES = 65536


class RedisProxy:
    """A context. `pass`: a relay. `silent`: nothing passes, and nothing is closed. `slow`: each piece of an answer
    comes `delay_s` later. `garbage`: answers are noise. Changes hold at once, for connections that are open too."""

    def __init__(self, target: int, mode: str = "pass") -> None:
        self.mode = mode
        self.delay_s = 0.5
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> RedisProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close all that is open."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return  # it ends
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()  # the target is away
                continue
            self._sockets += [near, far]
            for source, sink, answers in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._relay, args=(source, sink, answers), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if self.mode == "silent":
                    continue
                if answers and self.mode == "slow":
                    self._ended.wait(self.delay_s)
                sink.sendall(os.urandom(len(data)) if answers and self.mode == "garbage" else data)
            sink.shutdown(socket.SHUT_WR)

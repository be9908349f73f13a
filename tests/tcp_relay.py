"""A TCP relay that does to what passes whatever a test wants."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import TracebackType
from typing import Self

_LIMIT_S = 10.0


class TcpRelay:
    """A context. `pass`: a relay. `silent`: nothing passes, and nothing is closed. `slow`: each piece of an answer
    comes `delay_s` later. `garbage`: answers are noise. `flip`: one byte of each piece of an answer is another one.
    Changes hold at once, for connections that are open too."""

    def __init__(
        self,
        target: tuple[str, int],
        mode: str = "pass",
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        piece_bytes: int = 65536,
    ) -> None:
        self.mode = mode
        # Of the longest piece: the slower the machine, the more comes at once.
        self._piece_bytes = piece_bytes
        self.delay_s = 0.5
        # Pieces that something was done to.
        self.harmed = 0
        self.target = target
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
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
                far = socket.create_connection(self.target, _LIMIT_S)
            except OSError:
                near.close()  # the target is away
                continue
            far.settimeout(None)
            self._sockets += [near, far]
            for source, sink, answers in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._relay, args=(source, sink, answers), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece_bytes):
                if self.mode == "silent":
                    self.harmed += 1
                    continue
                sink.sendall(self._harm(data) if answers else data)
            sink.shutdown(socket.SHUT_WR)

    def _harm(self, data: bytes) -> bytes:
        if self.mode == "pass":
            return data
        self.harmed += 1
        if self.mode == "slow":
            self._ended.wait(self.delay_s)
        if self.mode == "garbage":
            return os.urandom(len(data))
        if self.mode == "flip":
            # Near the end: of a frame it is what is carried, not what is said of it.
            place = len(data) - 1 - len(data) // 8
            return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        return data

"""A TCP relay that does to what passes whatever a test wants."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_LIMIT_S = 10.0
_POLL_S = 0.01


class TcpRelay:
    """A context. Changes of the mode hold at once, for connections that are open too.

    `pass`: a relay. `silent`: what comes is lost, and nothing is closed. `held`: nothing passes until the mode is
    another one, and nothing is lost or closed. `slow`: each piece of an answer comes `delay_s` later. `garbage`:
    answers are noise. `flip`: one byte of each piece of an answer is another one.
    """

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

    def set_mode(self, mode: str, delay_s: float = 0.5) -> None:
        """Do this to what passes from now on."""
        self.delay_s, self.mode = delay_s, mode

    def hang_up(self, *, reset: bool = False) -> None:
        """Close all that is open; with `reset`, by a reset of each connection instead of an end."""
        # The relaying threads must find them gone: they would end with FIN what is to be reset.
        closing, self._sockets = self._sockets, []
        for each in closing:
            with contextlib.suppress(OSError):
                if reset:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # Also wakes the thread that reads.
                each.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return  # it ends
            try:
                far = socket.create_connection(self._find_target(), _LIMIT_S)
            except OSError:
                near.close()  # the target is away
                continue
            far.settimeout(None)
            self._sockets += [near, far]
            threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        """Relay both ways until both have ended, then close both ends."""
        back = threading.Thread(target=self._relay, args=(far, near, True), daemon=True)
        back.start()
        self._relay(near, far, answers=False)
        back.join()
        for each in (near, far):
            each.close()
            with contextlib.suppress(ValueError):  # `hang_up` has taken it out
                self._sockets.remove(each)

    @property
    def open(self) -> int:
        """How many connections are open."""
        return len(self._sockets) // 2

    def _find_target(self) -> tuple[str, int]:
        """Where a new connection leads. Raises OSError where that is not known."""
        return self.target

    def _relay(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece_bytes):
                if self.mode == "silent":
                    self.harmed += 1
                    continue
                self._hold()
                sink.sendall(self._harm(data) if answers else data)
            self._hold()
            if sink in self._sockets:
                sink.shutdown(socket.SHUT_WR)

    def _hold(self) -> None:
        """Wait for the end of the mode that holds all back."""
        if self.mode == "held":
            self.harmed += 1
        while self.mode == "held" and not self._ended.wait(_POLL_S):
            pass

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

"""DelayProxy: a TCP proxy that delays every byte by the same time in each direction, and limits nothing else.

`DelayProxy` runs on threads of the calling process. `python -m bench.scheduler.delay_proxy HOST:PORT --delay-ms 5` is a
separate process. It prints its address, reads a new delay from each line of its input, and ends when the input ends. It
uses threads, because asyncio's timers are a millisecond coarse.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType

_CHUNK = 1 << 18


class DelayProxy:
    """Listens on a free port of loopback, and passes connections on to `target`. `delay_s` may change at any time. The
    new delay applies to bytes that arrive later, which never overtake earlier bytes."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self.delay_s = delay_s
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._closed = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Break all connections and listen no more."""
        with self._lock:
            self._closed = True
            ends = [self._listener, *self._sockets]
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        with self._lock:
            # Ends of connections that are over go with the next one that comes.
            self._sockets = [end for end in self._sockets if end.fileno() >= 0] + [near, far]
            closed = self._closed
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if closed:
                end.close()
        for source, sink in ((near, far), (far, near)):
            chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(source, chunks), daemon=True).start()
            threading.Thread(target=_write, args=(chunks, sink), daemon=True).start()

    def _read(self, source: socket.socket, chunks: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"begin"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            chunks.put((time.monotonic() + self.delay_s, data))


def _write(chunks: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
    """Write data; the end of input travels with the same delay."""
    while True:
        due, data = chunks.get()
        wait = due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        try:
            if data:
                sink.sendall(data)
                continue
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()
        return


class ProxyProcess:
    """A DelayProxy in its own process."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-m", "bench.scheduler.delay_proxy", target]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if self._popen.stdout is None or self._popen.stdin is None:
            raise AssertionError("pipes were asked for")
        self._control = self._popen.stdin
        self.address = self._popen.stdout.readline().strip()

    def set_delay(self, milliseconds: float) -> None:
        """Set the delay of bytes that arrive from now on."""
        self._control.write(f"{milliseconds}\n")

    def close(self) -> None:
        """End it."""
        self._popen.terminate()
        self._popen.wait(20)
        self._control.close()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="host:port")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0001)
    with DelayProxy(arguments.target, arguments.delay_ms / 1e3) as proxy:
        print(proxy.address, flush=True)
        for line in sys.stdin:
            proxy.delay_s = float(line) / 1e3
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""TCP between two processes without the kvstore, for comparison with the data port.

`python -m bench.kvstore.raw_tcp BYTES PAGE_BYTES` is the other process. It allocates this much memory and prints its
port. For each byte that it receives, it then receives all of that memory (`p`) or sends it (`g`), a page at a time.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.kvstore.pages import Pages


class RawTcpPair:
    """Sends a page per call, from resident memory to resident memory, as much as a ring holds."""

    def __init__(self, pages: Pages) -> None:
        self._page_bytes = pages.page_bytes
        size = pages.page_bytes * len(pages.framed)
        self._memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        command = [sys.executable, "-m", "bench.kvstore.raw_tcp", str(size), str(pages.page_bytes)]
        self._peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self._peer.stdout is None:
            raise SystemExit("the peer has no output")
        self._socket = socket.create_connection(("127.0.0.1", int(self._peer.stdout.readline())))

    def put(self, pages: Pages) -> float:
        begin = time.perf_counter()
        self._socket.sendall(b"p")
        for start in range(0, len(self._memory), self._page_bytes):
            self._socket.sendall(self._memory[start : start + self._page_bytes])
        self._socket.recv(1)  # it has all
        return time.perf_counter() - begin

    def get(self, pages: Pages) -> float:
        begin = time.perf_counter()
        self._socket.sendall(b"g")
        receive(self._socket, self._memory, self._page_bytes)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._socket.close()
        self._peer.communicate(timeout=60)


def receive(connection: socket.socket, memory: memoryview, page_bytes: int) -> None:
    for start in range(0, len(memory), page_bytes):
        page = memory[start : start + page_bytes]
        if connection.recv_into(page, len(page), socket.MSG_WAITALL) != len(page):
            raise SystemExit("the peer has gone")


def main() -> int:
    size, page_bytes = map(int, sys.argv[1:])
    memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection = listener.accept()[0]
    with connection:
        while config := connection.recv(1):
            if config == b"p":
                receive(connection, memory, page_bytes)
                connection.sendall(b".")
            else:
                for start in range(0, size, page_bytes):
                    connection.sendall(memory[start : start + page_bytes])
    return 0


if __name__ == "__main__":
    sys.exit(main())

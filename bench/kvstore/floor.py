"""Arms that store pages in plain memory, sockets, disks and Redis, without the kvstore. Their speed is an upper bound
for the kvstore's speed.

Each arm stores and reads whole framed pages, and does only what the medium needs. It computes no checksums, uses
numbers instead of names, and its memory is resident and aligned. `put` and `get` return seconds.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import time
from concurrent import futures
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.kvstore.pages import Pages

_BLOCK = 4096
# Bytes of one pipeline.
_PIPELINE_BYTES = 8 << 20
# Rounds whose pages stay in Redis, whose memory is then used again.
KEPT = 2
_START_LIMIT_S = 30.0


class Arm(Protocol):
    """One way of storing pages. `get` reads pages that were put before."""

    def put(self, pages: Pages) -> float: ...

    def get(self, pages: Pages) -> float: ...

    def close(self) -> None: ...


class Memcpy:
    """Copies from memory to resident memory, in both directions."""

    def __init__(self, pages: Pages) -> None:
        self._block = mmap.mmap(-1, pages.total_bytes)
        self._view = memoryview(self._block)
        self._view[:] = bytes(len(self._block))  # resident

    def put(self, pages: Pages) -> float:
        begin, offset = time.perf_counter(), 0
        for page in pages.framed:
            self._view[offset : offset + len(page)] = page
            offset += len(page)
        return time.perf_counter() - begin

    def get(self, pages: Pages) -> float:
        out = memoryview(bytearray(pages.framed_bytes))
        begin = time.perf_counter()
        for offset in range(0, pages.total_bytes, pages.framed_bytes):
            out[:] = self._view[offset : offset + pages.framed_bytes]
        return time.perf_counter() - begin

    def close(self) -> None:
        self._view.release()
        self._block.close()


class RawFiles:
    """Stores each page in a file, with O_DIRECT if the filesystem allows it, one call per page, on this many
    threads."""

    def __init__(self, folder: Path, pages: Pages, threads: int) -> None:
        self._folder = folder
        self._direct = _direct_flag(folder)
        self._size = -(-pages.framed_bytes // _BLOCK) * _BLOCK
        self._block = mmap.mmap(-1, self._size * len(pages.framed))
        self._pool = futures.ThreadPoolExecutor(threads)
        self._threads = threads

    def put(self, pages: Pages) -> float:
        (self._folder / pages.name).mkdir(parents=True)
        for index, page in enumerate(pages.framed):  # into aligned memory, which is none of the disk's work
            self._block[index * self._size : index * self._size + len(page)] = page
        os.sync()
        return self._all(pages, os.O_WRONLY | os.O_CREAT, os.pwritev)

    def get(self, pages: Pages) -> float:
        return self._all(pages, os.O_RDONLY, os.preadv)

    def close(self) -> None:
        self._pool.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _all(self, pages: Pages, flags: int, carry: Callable[[int, list[memoryview], int], int]) -> float:
        with memoryview(self._block) as whole:

            def share(number: int) -> None:
                for index in range(number, len(pages.framed), self._threads):
                    fd = os.open(self._folder / pages.name / str(index), flags | self._direct, 0o600)
                    if carry(fd, [whole[index * self._size : (index + 1) * self._size]], 0) != self._size:
                        raise SystemExit("the disk cut a page short")
                    os.close(fd)

            begin = time.perf_counter()
            list(self._pool.map(share, range(self._threads)))
            return time.perf_counter() - begin


def _direct_flag(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


class RawRedis:
    """SET and GET in pipelines over plain sockets, into the benchmark's own memory, on this many threads."""

    def __init__(self, url: str, pages: Pages, threads: int, database: int) -> None:
        self._lines = [RedisLine(url, pages.framed_bytes, database) for _ in range(threads)]
        self._pool = futures.ThreadPoolExecutor(threads)
        self._kept: list[Pages] = []

    def put(self, pages: Pages) -> float:
        self._kept.append(pages)
        if len(self._kept) > KEPT:
            old = self._kept.pop(0)
            self._lines[0].forget([f"{old.name}:{index}".encode() for index in range(len(old.framed))])
        return self._all(pages, RedisLine.set_pages)

    def get(self, pages: Pages) -> float:
        return self._all(pages, RedisLine.get_pages)

    def close(self) -> None:
        self._pool.shutdown()
        for line in self._lines:
            line.close()

    def _all(self, pages: Pages, carry: Callable[[RedisLine, Pages, Sequence[int]], None]) -> float:
        group = max(_PIPELINE_BYTES // pages.framed_bytes, 1)
        groups = [range(start, min(start + group, len(pages.framed))) for start in range(0, len(pages.framed), group)]
        threads = len(self._lines)

        def share(number: int) -> None:
            for indices in groups[number::threads]:
                carry(self._lines[number], pages, indices)

        begin = time.perf_counter()
        list(self._pool.map(share, range(threads)))
        return time.perf_counter() - begin


class RedisLine:
    """One connection to one Redis database."""

    def __init__(self, url: str, framed_bytes: int, database: int) -> None:
        host, port = url.removeprefix("redis://").partition("/")[0].split(":")
        self._connection = socket.create_connection((host, int(port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = io.BufferedReader(self._connection.makefile("rb", buffering=0), 1 << 16)
        self._buffer = memoryview(bytearray(framed_bytes + 2))
        self._ask(b"SELECT", b"%d" % database)
        self._expect_ok()

    def set_pages(self, pages: Pages, indices: Sequence[int]) -> None:
        for index in indices:
            self._ask(b"SET", f"{pages.name}:{index}".encode(), pages.framed[index])
        for _ in indices:
            self._expect_ok()

    def get_pages(self, pages: Pages, indices: Sequence[int]) -> None:
        for index in indices:
            self._ask(b"GET", f"{pages.name}:{index}".encode())
        for _ in indices:
            length = int(self._replies.readline()[1:])
            if self._replies.readinto(self._buffer[: length + 2]) != length + 2:
                raise SystemExit("redis cut a page short")

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._ask(b"DEL", key)
            self._replies.readline()

    def close(self) -> None:
        self._replies.close()
        self._connection.close()

    def _ask(self, *parts: bytes) -> None:
        waiting = b"*%d\r\n" % len(parts)
        for part in parts:
            waiting += b"$%d\r\n" % len(part)
            if len(part) >= _BLOCK:  # sent as it is, without a copy
                self._connection.sendall(waiting)
                self._connection.sendall(part)
                waiting = b"\r\n"
            else:
                waiting += part + b"\r\n"
        self._connection.sendall(waiting)

    def _expect_ok(self) -> None:
        if self._replies.readline() != b"+OK\r\n":
            raise SystemExit("redis refused")


@contextlib.contextmanager
def redis_process() -> Iterator[str]:
    """Start a Redis without persistence on a free port. Yields an empty URL if Redis is not installed."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield ""
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="quire-redis-") as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        child = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _START_LIMIT_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if time.monotonic() > deadline:
                    raise SystemExit("redis-server does not start")
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            child.terminate()
            child.wait()

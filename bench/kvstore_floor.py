"""What memory, a socket, the disk and Redis do with pages when nothing is in between: the kvstore's floor, in MB/s."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = 4096
# Bytes of one pipeline.
_PIPELINE_BYTES = 8 << 20
_START_LIMIT_S = 30.0


def memcpy_floor(pages: list[bytes]) -> float:
    """Each page into a block of memory that is there already."""
    block = mmap.mmap(-1, sum(map(len, pages)))
    with memoryview(block) as view:
        view[:] = bytes(len(block))  # resident
        begin, offset = time.perf_counter(), 0
        for page in pages:
            view[offset : offset + len(page)] = page
            offset += len(page)
        took_s = time.perf_counter() - begin
    return offset / 1e6 / took_s


def tcp_floor(pages: list[bytes]) -> float:
    """A thread sends, this one receives into memory of its own. Both share an interpreter, which sockets let go."""
    total = sum(map(len, pages))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far = listener.accept()[0]
        with far:
            sender = threading.Thread(target=_send_all, args=(far, pages))
            buffer = memoryview(bytearray(max(map(len, pages))))
            begin, got = time.perf_counter(), 0
            sender.start()
            while got < total:
                got += near.recv_into(buffer)
            took_s = time.perf_counter() - begin
            sender.join()
    return total / 1e6 / took_s


def _send_all(connection: socket.socket, pages: list[bytes]) -> None:
    for page in pages:
        connection.sendall(page)


def file_floor(pages: list[bytes], folder: Path) -> tuple[float, float]:
    """Write and read: a file per page, direct where the filesystem lets us, one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(pages[0]) // _BLOCK) * _BLOCK
    total = sum(map(len, pages))
    with mmap.mmap(-1, size) as block, memoryview(block) as view:
        direct = os.O_DIRECT
        try:
            os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | direct))
        except OSError:
            direct = 0
        begin = time.perf_counter()
        for index, page in enumerate(pages):
            view[: len(page)] = page
            fd = os.open(folder / str(index), os.O_WRONLY | os.O_CREAT | direct, 0o600)
            os.pwrite(fd, view, 0)
            os.close(fd)
        write_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for index in range(len(pages)):
            fd = os.open(folder / str(index), os.O_RDONLY | direct)
            os.preadv(fd, [view], 0)
            os.close(fd)
        read_s = time.perf_counter() - begin
    shutil.rmtree(folder)
    return total / 1e6 / write_s, total / 1e6 / read_s


def redis_floor(pages: list[bytes], url: str) -> tuple[float, float]:
    """SET and GET in pipelines over a plain socket, values received into memory of our own."""
    host, port = url.removeprefix("redis://").partition("/")[0].split(":")
    total = sum(map(len, pages))
    group = max(_PIPELINE_BYTES // len(pages[0]), 1)
    groups = [range(start, min(start + group, len(pages))) for start in range(0, len(pages), group)]
    buffer = memoryview(bytearray(max(map(len, pages)) + 64))
    with socket.create_connection((host, int(port))) as connection:
        replies = io.BufferedReader(connection.makefile("rb", buffering=0), 1 << 16)

        def ask(*parts: bytes) -> None:
            waiting = b"*%d\r\n" % len(parts)
            for part in parts:
                waiting += b"$%d\r\n" % len(part)
                if len(part) >= _BLOCK:  # sent as it is, without a copy
                    connection.sendall(waiting)
                    connection.sendall(part)
                    waiting = b"\r\n"
                else:
                    waiting += part + b"\r\n"
            connection.sendall(waiting)

        begin = time.perf_counter()
        for indices in groups:
            for index in indices:
                ask(b"SET", b"raw:%d" % index, pages[index])
            for _ in indices:
                if replies.readline() != b"+OK\r\n":
                    raise SystemExit("redis did not keep a page")
        set_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for indices in groups:
            for index in indices:
                ask(b"GET", b"raw:%d" % index)
            for _ in indices:
                length = int(replies.readline()[1:])
                if replies.readinto(buffer[: length + 2]) != length + 2:
                    raise SystemExit("redis cut a page short")
        get_s = time.perf_counter() - begin
        ask(b"FLUSHALL")
        replies.readline()
        replies.close()
    return total / 1e6 / set_s, total / 1e6 / get_s


@contextlib.contextmanager
def redis_process() -> Iterator[str]:
    """A Redis without persistence on a free port; an empty URL where none is installed."""
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
            child.wait(60)

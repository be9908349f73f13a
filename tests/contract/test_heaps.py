"""A service's threads share two heaps of the C library: memory that one thread frees serves the others. Large blocks go
back to the kernel when they are freed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from quire_common.config import ServiceConfig
from quire_common.serving import server

THREADS = 8
# Each thread takes memory of its own, which glibc makes a heap for while it may; malloc_info names the heaps.
PROGRAM = f"""
import ctypes, sys, threading
if sys.argv[1] == "bounded":
    from quire_common.serving.heaps import set_malloc_limits
    print("bounded", set_malloc_limits())
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fdopen.restype = ctypes.c_void_p
barrier = threading.Barrier({THREADS})
def take():
    barrier.wait()
    for _ in range(1000):
        libc.malloc(ctypes.c_size_t(1000))
    barrier.wait()
threads = [threading.Thread(target=take) for _ in range({THREADS})]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.stdout.flush()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""

# Frees twenty blocks of 4 MiB three times, with small blocks between them that stay, and prints the MiB that are left.
LARGE_BLOCKS = """
import ctypes, sys
if sys.argv[1] == "bounded":
    from quire_common.serving.heaps import set_malloc_limits
    set_malloc_limits()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def take(size):
    return ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before = resident()
for _ in range(3):
    blocks = []
    for _ in range(20):
        blocks.append(take(4 << 20))
        ctypes.memset(blocks[-1], 1, 4 << 20)
        take(1000)
    for block in blocks:
        libc.free(block)
print(resident() - before)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")


def printed(program: str, how: str, **environment: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", program, how]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def heaps(how: str, **environment: str) -> tuple[int, str]:
    text = printed(PROGRAM, how, **environment)
    return text.count("<heap nr="), text.partition("\n")[0]


def test_threads_share_two_heaps() -> None:
    assert heaps("free")[0] > 2, "this program would not notice"
    count, said = heaps("bounded")
    assert said == "bounded True"
    assert count <= 2


def test_environment_overrides_the_number_of_heaps() -> None:
    count, said = heaps("bounded", MALLOC_ARENA_MAX="5")
    assert said == "bounded False"
    assert count == 5


def test_large_blocks_go_back_to_the_kernel() -> None:
    assert float(printed(LARGE_BLOCKS, "free")) > 40, "this program would not notice"
    assert float(printed(LARGE_BLOCKS, "bounded")) < 10


def test_asyncio_services_bound_heaps_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def run(life: Coroutine[Any, Any, int]) -> int:
        life.close()
        happened.append("run")
        return 0

    monkeypatch.setattr(server, "set_malloc_limits", lambda: happened.append("heaps"))
    monkeypatch.setattr("uvloop.run", run)
    server.run_aio(ServiceConfig(), lambda _bound: pytest.fail("nothing is made"))
    assert happened == ["heaps", "run"]

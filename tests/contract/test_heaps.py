"""A service's threads share two heaps of the C library: memory that one thread frees serves the others."""

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
    from quire_common.serving.heaps import bound_heaps
    print("bounded", bound_heaps())
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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")


def heaps(how: str, **environment: str) -> tuple[int, str]:
    plain = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.count("<heap nr="), done.stdout.partition("\n")[0]


def test_threads_share_two_heaps() -> None:
    assert heaps("free")[0] > 2, "this program would not notice"
    count, said = heaps("bounded")
    assert said == "bounded True"
    assert count <= 2


def test_environment_overrides_the_number_of_heaps() -> None:
    count, said = heaps("bounded", MALLOC_ARENA_MAX="5")
    assert said == "bounded False"
    assert count == 5


def test_asyncio_services_bound_heaps_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def run(life: Coroutine[Any, Any, int]) -> int:
        life.close()
        happened.append("run")
        return 0

    monkeypatch.setattr(server, "bound_heaps", lambda: happened.append("heaps"))
    monkeypatch.setattr("uvloop.run", run)
    server.run_aio(ServiceConfig(), lambda _bound: pytest.fail("nothing is made"))
    assert happened == ["heaps", "run"]

"""Measures NIXL between two processes without Quire: one-sided reads of pages from resident memory into resident
memory.

`python -m bench.disaggregation.raw_nixl export TLS BYTES` allocates memory, prints its address, and keeps it until its
input ends. `python -m bench.disaggregation.raw_nixl pull TLS BYTES PAGE_BYTES` starts such a process. For each input
line, it reads all of that memory and prints the seconds. TLS is UCX's list of transports, which a process cannot change
later.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bench.kvstore.pages import Pages

# Shared memory alone cannot tell when a peer dies, which NIXL insists on: TCP is for that.
TLS = {"tcp": "tcp", "shm": "tcp,shm,self"}
_POLL_S = 20e-6


class RawNixlPair:
    """Reads all pages of a ring as one request."""

    def __init__(self, config: str, pages: Pages) -> None:
        size = pages.page_bytes * len(pages.framed)
        command = [
            sys.executable,
            "-m",
            "bench.disaggregation.raw_nixl",
            "pull",
            TLS[config],
            str(size),
            str(pages.page_bytes),
        ]
        self._puller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def get(self, pages: Pages) -> float:
        if self._puller.stdin is None or self._puller.stdout is None:
            raise SystemExit("the puller has no pipes")
        print("pull", file=self._puller.stdin, flush=True)
        return float(self._puller.stdout.readline())

    def close(self) -> None:
        self._puller.communicate(timeout=60)


class Agent:
    """A NIXL agent with registered memory."""

    def __init__(self, tls: str, size: int) -> None:
        os.environ |= {"UCX_TLS": tls, "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}
        from nixl import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]  # an optional package

        self.nixl: Any = nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"]))
        self.bytes = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        self.address = self.bytes.ctypes.data
        self.nixl.register_memory([(self.address, size, 0, "")], "DRAM")

    def read(self, peer: str, base: int, page_bytes: int) -> float:
        """Read all of the peer's memory. Returns the seconds."""
        offsets = range(0, len(self.bytes), page_bytes)
        begin = time.perf_counter()
        ours = self.nixl.get_xfer_descs([(self.address + offset, page_bytes, 0) for offset in offsets], "DRAM")
        theirs = self.nixl.get_xfer_descs([(base + offset, page_bytes, 0) for offset in offsets], "DRAM")
        request = self.nixl.initialize_xfer("READ", ours, theirs, peer)
        state = self.nixl.transfer(request)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = self.nixl.check_xfer_state(request)
        if state != "DONE":
            raise SystemExit(f"a read ended as {state}")
        took_s = time.perf_counter() - begin
        request.release()
        return took_s


def main() -> int:
    role, tls, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    agent = Agent(tls, size)
    if role == "export":
        agent.bytes[:] = 7
        print(json.dumps([agent.nixl.get_agent_metadata().hex(), agent.address]), flush=True)
        sys.stdin.read()
        return 0
    command = [sys.executable, "-m", "bench.disaggregation.raw_nixl", "export", tls, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as exporter:
        if exporter.stdout is None:
            raise SystemExit("the exporter has no output")
        metadata, base = json.loads(exporter.stdout.readline())
        name = agent.nixl.add_remote_agent(bytes.fromhex(metadata)).decode()
        for _ in sys.stdin:
            print(agent.read(name, base, int(sys.argv[4])), flush=True)
        if not (agent.bytes == 7).all():
            raise SystemExit("bytes came changed")
        exporter.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())

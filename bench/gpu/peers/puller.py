"""`python -m bench.gpu.peers.puller DESCRIPTOR PAGE_BYTES`: opens another process's pool and copies pages out of it
with each method. Prints a JSON line for each method: GB/s, and whether every byte is right."""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import torch

from bench.gpu.peers.copies import Copy, PeerCopies, kernel
from bench.gpu.peers.pool import page_content
from quire_common.errors import QuireError
from quire_worker.arrays import Int32
from quire_worker.cuda.peers.driver import CudaDriver, cuda_driver
from quire_worker.cuda.peers.ipc_memory import IpcMemory, device_uuid
from quire_worker.cuda.peers.peer_memory import PeerMemory
from quire_worker.ops.triton.gather_pages import DEFAULT, GatherShape

_REPEATS = 7
_COUNTS = (1024, 256, 32, 4)
_SHAPES = [
    GatherShape(programs, block, warps)
    for programs in (32, 64, 128, 264, 528)
    for block, warps in ((2048, 4), (4096, 8), (8192, 8), (8192, 16))
]


class _Trusting(CudaDriver):
    """Accepts memory of another process, for a driver that gives no information about it."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        return address, 1 << 48


class Puller:
    """A pool as large as the largest pull, on the current device."""

    def __init__(self, descriptor: bytes, page_bytes: int) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        self._driver = cuda_driver()
        memory = IpcMemory.unpack(descriptor)
        began = time.perf_counter()
        try:
            self.peer = PeerMemory(memory, page_bytes, self._driver)
        except QuireError as error:
            tell("open, compared with the allocation", failed=f"{error.code}: {error.message}")
            self.peer = PeerMemory(memory, page_bytes, _Trusting(self._driver.library))
        opened_ms = (time.perf_counter() - began) * 1e3
        self._counts = [count for count in _COUNTS if count < self.peer.num_pages]
        self._pool = torch.empty((self._counts[0] + 1, page_bytes), dtype=torch.uint8, device="cuda")
        same = memory.device == device_uuid(self._pool.device)
        tell("open", opened_ms=opened_ms, one_gpu=same, gpus_seen=torch.cuda.device_count())

    def run(self) -> None:
        copies = PeerCopies(self._driver)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's; batched copies take no default one
        with torch.cuda.stream(stream):
            for count in self._counts:
                self._measure("plain", count, copies.plain, compared=False)
                self._measure("kernel", count, kernel(DEFAULT))
                self._measure("batched", count, copies.batched)
                self._measure("loop", count, copies.loop)
                self._measure("loop on 4 streams", count, copies.loop_on_streams)
            for shape in _SHAPES:
                name = f"kernel {shape.programs} x {shape.block} words, {shape.warps} warps"
                self._measure(name, self._counts[0], kernel(shape), repeats=3)
        self.peer.close()

    def _measure(self, name: str, count: int, copy: Copy, *, compared: bool = True, repeats: int = _REPEATS) -> None:
        rng = np.random.default_rng(count)
        source = (rng.permutation(self.peer.num_pages - 1)[:count] + 1).astype(np.int32)
        target = (rng.permutation(len(self._pool) - 1)[:count] + 1).astype(np.int32)
        self.peer.check(source)
        try:
            self._pool.fill_(0xA5)
            self._timed(copy, source, target)  # compiles
            wrong = self._wrong(source, target) if compared else 0
            spent = [self._timed(copy, source, target) for _ in range(repeats)]
        except QuireError as error:
            tell(name, pages=count, failed=f"{error.code}: {error.message}")
            return
        gb = count * self._pool.shape[1] / 1e9
        device_s, whole_s = (statistics.median(times) for times in zip(*spent, strict=True))
        tell(name, pages=count, gb_per_s=gb / device_s, with_host=gb / whole_s, us=whole_s * 1e6, wrong_pages=wrong)

    def _timed(self, copy: Copy, source: Int32, target: Int32) -> tuple[float, float]:
        """Return the seconds on the device, and the seconds from the call to its end on the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        copy(self.peer.address, self._pool, source, target)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, time.perf_counter() - began

    def _wrong(self, source: Int32, target: Int32) -> int:
        """Return the pages whose content is wrong, and the pages that changed although they should not."""
        size, device = self._pool.shape[1], self._pool.device
        came = dict(zip(target.tolist(), source.tolist(), strict=True))
        untouched = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
        wrong = 0
        for page in range(len(self._pool)):
            wanted = page_content(came[page], size, device) if page in came else untouched
            wrong += not torch.equal(self._pool[page], wanted)
        return wrong


def tell(name: str, **figures: float | int | str | bool) -> None:
    print(json.dumps({"name": name, **figures}), flush=True)


def main() -> int:
    puller = Puller(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
    puller.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

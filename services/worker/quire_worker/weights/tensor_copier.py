"""Copies tensors from safetensors files to the decoder's memory, and hashes them on the way. It uses several threads,
each with pinned memory of its own, so that reading, hashing and the device's copies overlap.

Files are read, never mapped: so a cold page cache is filled in large pieces, and a device copies straight from the
buffer. On the CPU, the same code runs with plain memory.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from quire_common.errors import ConfigError
from quire_worker.threads.cores import usable_cores
from quire_worker.weights.safetensors_file import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.weights.safetensors_file import TensorEntry

STAGE_BYTES = 16 << 20
_STAGES = 2
MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One tensor to copy: its place in a file, and a contiguous target tensor of its shape, of any type."""

    path: Path
    entry: TensorEntry
    target: Tensor
    spread: Callable[[Tensor], None] | None = None
    """If this is set, `target` only gives the type and the device: the copier makes the whole tensor, of its own shape,
    in memory for a while and passes it to `spread`."""


def copy_tensors(
    copies: Sequence[TensorCopy],
    progress: Callable[[int], None],
    *,
    threads: int = 0,
    stage_bytes: int = STAGE_BYTES,
) -> dict[str, bytes]:
    """Copy all tensors on this many threads (0: as many as there are cores, up to eight), at most one for each tensor;
    returns digests (xxh3 of name, type, shape and bytes) by name. `progress` is called from the calling thread with the
    number of bytes done so far.

    If a thread fails, the others take no more tensors, and its error is raised once no thread writes any more. Copies
    that the failed thread left to a GPU may still run then.
    """
    copies = list(copies)
    work: queue.SimpleQueue[TensorCopy] = queue.SimpleQueue()
    for each in copies:
        work.put(each)
    moved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    digests: dict[str, bytes] = {}
    threads = min(threads or min(MOST_THREADS, usable_cores()), max(1, len(copies)))

    def run() -> None:
        """Copy tensors from the queue until it is empty, and put the digest of each into `digests`. Each copy puts what
        it has moved into `moved`; at the end, None follows. An error empties the queue, and is raised again."""
        try:
            copier = _Copier(copies[0].target.device, stage_bytes)
            while True:
                try:
                    item = work.get_nowait()
                except queue.Empty:
                    break
                digests[item.entry.name] = copier.copy(item, moved.put)
            copier.finish()
        except BaseException:
            # The others have nothing left to take. They may take the last one meanwhile: `empty` is not asked.
            with contextlib.suppress(queue.Empty):
                while True:
                    work.get_nowait()
            raise
        finally:
            moved.put(None)

    if not copies:
        return digests
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        running = [pool.submit(run) for _ in range(threads)]
        left, done = threads, 0
        while left:
            count = moved.get()
            if count is None:
                left -= 1
            else:
                done += count
                progress(done)
        for future in running:
            future.result()
    return digests


class _Copier:
    """Belongs to one thread."""

    def __init__(self, device: torch.device, stage_bytes: int) -> None:
        self._device = device
        self._stages = [_Stage(device, stage_bytes) for _ in range(_STAGES)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's
        if self._stream is not None:
            # Kernels that run there may still use memory that the targets got.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._turn = 0

    def copy(self, item: TensorCopy, moved: Callable[[int], None]) -> bytes:
        """Read a tensor from its file piece by piece, hash it and copy it to its target, or pass it to `spread` as a
        whole. Returns its digest; a device's copies may still run. `moved` gets the bytes of each piece."""
        entry, dtype = item.entry, DTYPES[item.entry.dtype]
        digest = xxhash.xxh3_128(f"{entry.name}/{entry.dtype}/{entry.shape}/".encode())
        with self._on_stream():
            whole = item.target if item.spread is None else item.target.new_empty(entry.shape)
        target = whole.view(-1)
        with item.path.open("rb", buffering=0) as file:
            at, element = entry.begin, 0
            while at < entry.end:
                stage = self._stages[self._turn]
                self._turn = (self._turn + 1) % _STAGES
                stage.wait()
                size = min(stage.size, entry.end - at)
                view = stage.bytes[:size]
                _read(file.fileno(), view, at, item.path)
                digest.update(view)
                count = size // dtype.itemsize
                self._send(stage, size, dtype, target[element : element + count])
                at, element = at + size, element + count
                moved(size)
        if item.spread is not None:
            with self._on_stream():
                item.spread(whole)
        return digest.digest()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Wait for the device."""
        if self._stream is not None:
            self._stream.synchronize()

    def _send(self, stage: _Stage, size: int, dtype: torch.dtype, target: Tensor) -> None:
        """Copy the first `size` bytes of a stage, as numbers of `dtype`, to `target`. On a GPU the copy is only
        enqueued, and the stage's event follows it; the GPU converts the type."""
        source = stage.memory[:size].view(dtype)
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            # Through memory of the device where the type changes, so that the device changes it.
            if dtype != target.dtype:
                source = source.to(self._device, non_blocking=True)
            target.copy_(source, non_blocking=True)
            stage.sent.record(self._stream)


class _Stage:
    """A buffer that is read into and copied from."""

    def __init__(self, device: torch.device, size: int) -> None:
        pinned = device.type == "cuda"
        self.size = size
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.bytes: memoryview = self.memory.numpy().data
        self.sent = torch.cuda.Event() if pinned else _Never()  # type: ignore[no-untyped-call]  # torch's

    def wait(self) -> None:
        """Wait until the last copy from this buffer has ended."""
        self.sent.synchronize()


class _Never:
    """The event of copies that have ended when they return."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def record(self, stream: object) -> None:
        """Nothing will be."""


def _read(file: int, into: memoryview, begin: int, path: Path) -> None:
    """Fill `into` from offset `begin` of the file. Raises ConfigError if the file ends before that."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], begin + done)
        if count == 0:
            raise ConfigError(
                "TRUNCATED_SAFETENSORS", f"{path} became shorter while it was read.", "Download the file again."
            )
        done += count

"""read_ahead: reads a model's weight files into the operating system's page cache until the model is loaded.

The worker imports torch and starts the GPU before it loads weights. This takes seconds, during which the disk would
otherwise be idle. The loader then finds the first gigabytes in memory. Reading ahead goes on while the loader reads,
up to 8 GiB in all. This module does not know when loading ends; `model_source.load_configured` ends the context.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quire_worker.threads.cores import usable_cores

# Several large reads at a time keep a disk busy. One core stays free for the import, if there is more than one.
_THREADS = 8
PIECE_BYTES = 8 << 20
# read_ahead reads no more than this. A container with little memory evicts pages, and the limit bounds how many it
# evicts before the loader needs them.
_MOST_BYTES = 8 << 30
_LAST_READS_S = 1.0
# Hugging Face's names of weight files, whole or in shards. The loader does not read copies under other names, such as
# consolidated.safetensors.
_WEIGHTS = "model*.safetensors"


@contextlib.contextmanager
def read_ahead(model: Path) -> Iterator[None]:
    """While the context lasts, read the safetensors files of a model folder, or the GGUF file `model`, from beginning
    to end, at most 8 GiB. Pieces that are known to be in the page cache are not read again. Files that cannot be read
    are left out, since the loader reports them. At the end of the context, each thread ends after the piece that it
    reads. The context waits for all threads together, for a second at most."""
    pieces: queue.SimpleQueue[tuple[Path, int]] = queue.SimpleQueue()
    with contextlib.suppress(OSError):
        for piece in itertools.islice(_pieces(model), _MOST_BYTES // PIECE_BYTES):
            pieces.put(piece)
    ended = threading.Event()

    def run() -> None:
        """Read pieces until there are none, or the context ends."""
        buffer = bytearray(PIECE_BYTES)
        while not ended.is_set():
            try:
                path, at = pieces.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                # In the middle: the system reads a little past the piece before.
                if not is_cached(file.fileno(), at + PIECE_BYTES // 2):
                    os.preadv(file.fileno(), [buffer], at)

    threads: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # the system allows no more threads
            for _ in range(min(_THREADS, max(1, usable_cores() - 1), pieces.qsize())):
                thread = threading.Thread(target=run, name="read ahead", daemon=True)
                thread.start()
                threads.append(thread)
        yield
    finally:
        ended.set()
        until_s = time.monotonic() + _LAST_READS_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


def _pieces(model: Path) -> Iterator[tuple[Path, int]]:
    """Yield file and offset of each piece. Raises OSError if the folder cannot be listed."""
    for path in [model] if model.is_file() else sorted(model.glob(_WEIGHTS)):
        with contextlib.suppress(OSError):
            yield from ((path, at) for at in range(0, path.stat().st_size, PIECE_BYTES))


def is_cached(file: int, at: int) -> bool:
    """Return whether the byte at this offset of the file can be read without waiting for the disk; False if the file
    ends before, or the system does not say."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    except (OSError, AttributeError, NotImplementedError):  # some builds of Python lack the flag
        return False

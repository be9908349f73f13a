"""Bytes that change where pages are kept, past the kvstore's own code."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterable
from pathlib import Path

from quire_common.pages import HEADER_BYTES

_MAGIC = b"QKVP"
_ARENA = "quire-kvstore-arena"


def spoil_memory(pid: int, share: float = 1.0, rng: random.Random | None = None) -> int:
    """Flip a byte in the body of so many of the pages in a kvstore's memory; returns how many. Linux, as root."""
    rng, pages = rng or random.Random(0), 0
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    start, end = next(tuple(int(at, 16) for at in line.split()[0].split("-")) for line in lines if _ARENA in line)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        arena = memory.read(end - start)
        for match in re.finditer(_MAGIC, arena):
            if rng.random() < share:
                place = match.start() + HEADER_BYTES
                memory.seek(start + place)
                memory.write(bytes([arena[place] ^ 1]))
                pages += 1
    return pages


def spoil_files(files: Iterable[Path], rng: random.Random) -> int:
    """Flip a byte of each, or cut it short; returns how many were there to be spoilt."""
    spoilt = 0
    for file in files:
        with contextlib.suppress(OSError), file.open("r+b") as page:
            size = page.seek(0, 2)
            if size <= HEADER_BYTES:  # it was cut short before
                continue
            if rng.random() < 0.3:
                page.truncate(rng.randrange(size))
            else:
                place = rng.randrange(HEADER_BYTES + 1)
                page.seek(place)
                byte = page.read(1)
                page.seek(place)
                page.write(bytes([byte[0] ^ 0x10]))
            spoilt += 1
    return spoilt

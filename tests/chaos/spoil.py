"""Bytes that change where pages are kept, past the kvstore's own code."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path

from quire_common.pages import HEADER_BYTES, PageCorrupt, PageHeader

_MAGIC = b"QKVP"
_ARENA = "quire-kvstore-arena"
_SIGN = bytes(byte ^ 0x80 for byte in range(256))


def spoilt(body: bytes) -> bytes:
    """A body in which all numbers, of two or of four bytes, have another sign and none is a NaN: a worker that computes
    with it samples other tokens. Less, such as one byte, changes no token."""
    changed = bytearray(body)
    changed[1::2] = changed[1::2].translate(_SIGN)
    return bytes(changed)


def spoil_memory(pid: int, share: float = 1.0, rng: random.Random | None = None) -> int:
    """Spoil the bodies of so many of the pages in a kvstore's memory; returns how many. Linux, as root."""
    rng, pages = rng or random.Random(0), 0
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    start, end = next(tuple(int(at, 16) for at in line.split()[0].split("-")) for line in lines if _ARENA in line)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        arena = memory.read(end - start)
        for match in re.finditer(_MAGIC, arena):
            place = match.start() + HEADER_BYTES
            with contextlib.suppress(PageCorrupt):  # some other bytes that look like a header
                length = PageHeader.unpack(arena[match.start() : place]).length
                if rng.random() < share:
                    memory.seek(start + place)
                    memory.write(spoilt(arena[place : place + length]))
                    pages += 1
    return pages


def spoil_files(files: Iterable[Path], rng: random.Random) -> int:
    """Change a byte of each header or spoil the body, or cut the file short; returns how many were there to be
    spoilt."""
    count = 0
    for file in files:
        with contextlib.suppress(OSError):
            page = file.read_bytes()
            if len(page) <= HEADER_BYTES:  # it was cut short before
                continue
            way, place = rng.choice(("cut", "header", "body")), rng.randrange(HEADER_BYTES)
            if way == "cut":
                os.truncate(file, rng.randrange(len(page)))
            elif way == "header":
                _overwrite(file, place, bytes([page[place] ^ 0x10]))
            else:
                _overwrite(file, HEADER_BYTES, spoilt(page[HEADER_BYTES:]))
            count += 1
    return count


def _overwrite(file: Path, place: int, what: bytes) -> None:
    """In the file itself, which may be mapped or open elsewhere."""
    with file.open("r+b") as page:
        page.seek(place)
        page.write(what)

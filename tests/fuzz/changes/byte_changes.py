"""Changes of bytes that know nothing of their format."""

from __future__ import annotations

import random
import struct

NUMBERS = (0, 1, 2, 7, 8, 9, 127, 128, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62)
NUMBERS_64 = (*NUMBERS, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_MOST_BYTES = 1 << 16


def changed_bytes(data: bytes, choose: random.Random) -> bytes:
    """Return the data with one to three changes: a bit, a byte, a number, a cut, a repetition, a move."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(changed) + 1)
        count = choose.choice((1, 2, 4, 8, 32, 128))
        match choose.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << choose.randrange(8)
            case 1:
                changed[at : at + 1] = bytes([choose.randrange(256)])
            case 2:
                changed[at : at + 8] = struct.pack("<Q", choose.choice(NUMBERS_64))
            case 3:
                changed[at : at + 4] = struct.pack("<I", choose.choice(NUMBERS) & 0xFFFFFFFF)
            case 4:
                del changed[at : at + count]
            case 5:
                changed[at:at] = changed[at : at + count]
            case _:
                start = choose.randrange(len(changed) + 1)
                changed[at:at] = changed[start : start + count]
    return bytes(changed[:_MOST_BYTES])

"""Changes of a GGUF header by its structure: pairs and tensors are changed, doubled or left out; counts stay true."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from tests.fuzz.changes.byte_changes import NUMBERS_64, changed_bytes

_COUNTS = struct.Struct("<4sIQQ")
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9


@dataclass
class _Parts:
    """The pieces of a header: pairs as (key with its length, rest), tensors whole."""

    magic: bytes
    version: int
    pairs: list[tuple[bytes, bytes]]
    tensors: list[bytes]

    def join(self) -> bytes:
        head = _COUNTS.pack(self.magic, self.version, len(self.tensors), len(self.pairs))
        return b"".join([head, *(key + rest for key, rest in self.pairs), *self.tensors])


def changed_gguf(data: bytes, choose: random.Random) -> bytes:
    """Return the header with one to three changes. One in ten is of bytes, and so is every change of what cannot be
    taken apart."""
    if choose.random() < 0.05:
        return changed_bytes(data, choose)
    try:
        parts = _take_apart(data)
    except (struct.error, IndexError, KeyError, OverflowError):
        # The magic stays: what follows it is what shall be read.
        return data[:8] + changed_bytes(data[8:], choose)
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        _change(parts, choose)
    return parts.join()


def _change(parts: _Parts, choose: random.Random) -> None:
    pieces = parts.pairs if choose.random() < 0.8 else parts.tensors
    if not pieces:
        return
    at = choose.randrange(len(pieces))
    match choose.randrange(6):
        case 0:
            del pieces[at]
        case 1:
            pieces.insert(at, pieces[at])  # type: ignore[arg-type]  # a piece of the same list
        case 2 | 3 | 4 | 5 if pieces is parts.tensors:
            parts.tensors[at] = _changed_tensor(parts.tensors[at], choose)
        case _:
            key, rest = parts.pairs[at]
            parts.pairs[at] = key, _changed_value(rest, choose)


def _changed_value(rest: bytes, choose: random.Random) -> bytes:
    """Change a value of a pair: its kind, its number, its text, or its bytes."""
    (kind,) = struct.unpack_from("<I", rest)
    number = choose.choice(NUMBERS_64)
    match choose.randrange(5):
        case 0:
            kind = choose.choice((*_SIZES, _TEXT, _ARRAY, 13))
            return struct.pack("<I", kind) + rest[4:]
        case 1 if kind in _SIZES:
            return rest[:4] + struct.pack("<Q", number)[: _SIZES[kind]]
        case 2 if kind == _TEXT:
            text = choose.choice((b"", b"llama", b"qwen2", b"gpt2", b"\xff\xfe", b"x" * 300, b"{% for %}"))
            return rest[:4] + struct.pack("<Q", len(text)) + text
        case 3 if kind == _ARRAY:
            return rest[:8] + struct.pack("<Q", number) + rest[16:]
        case _:
            # The length stays the same: else nothing that follows is read.
            changed = bytearray(rest)
            changed[choose.randrange(min(4, len(rest) - 1), len(rest))] ^= 1 << choose.randrange(8)
            return bytes(changed)


def _changed_tensor(tensor: bytes, choose: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", tensor)
    at = choose.randrange(8 + length, max(9 + length, len(tensor) - 7))
    return tensor[:at] + struct.pack("<Q", choose.choice(NUMBERS_64)) + tensor[at + 8 :]


def _take_apart(data: bytes) -> _Parts:
    """Raises struct.error, IndexError, KeyError or OverflowError for what is no header."""
    magic, version, tensors, pairs = _COUNTS.unpack_from(data)
    at = _COUNTS.size
    parts = _Parts(magic, version, [], [])
    for _ in range(min(pairs, 1000)):
        value = at + 8 + struct.unpack_from("<Q", data, at)[0]
        end = _end_of_value(data, value + 4, struct.unpack_from("<I", data, value)[0])
        parts.pairs.append((data[at:value], data[value:end]))
        at = end
    for _ in range(min(tensors, 1000)):
        shape = at + 8 + struct.unpack_from("<Q", data, at)[0]
        end = shape + 4 + 8 * struct.unpack_from("<I", data, shape)[0] + 12
        if end > len(data):
            raise IndexError
        parts.tensors.append(data[at:end])
        at = end
    return parts


def _end_of_value(data: bytes, at: int, kind: int) -> int:
    if kind == _TEXT:
        return int(at + 8 + struct.unpack_from("<Q", data, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return int(at + count * _SIZES[inner])
    for _ in range(count):
        if at > len(data):
            raise IndexError
        at = _end_of_value(data, at, inner)
    return at

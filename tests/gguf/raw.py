"""GGUF files put together byte by byte, so that tests can lie in any place of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

U8, U16, U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
_FORMS = {U8: "<B", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: float | str) -> bytes:
    return text(value) if isinstance(value, str) else struct.pack(_FORMS[kind], value)


def pair(key: str, kind: int, value: float | str) -> bytes:
    return text(key) + struct.pack("<I", kind) + scalar(kind, value)


def pairs_of(key: str, kind: int, values: Sequence[float | str]) -> bytes:
    """A pair whose value is a list."""
    items = b"".join(scalar(kind, value) for value in values)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(values)) + items


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    """As the file has it: the packed axis first."""
    kind: int = 0
    num_bytes: int = 0
    offset: int | None = None


@dataclass
class RawFile:
    """A file as it will be written. Counts are true unless they are given."""

    pairs: list[bytes] = field(default_factory=lambda: [pair("general.architecture", TEXT, "llama")])
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_pairs: int | None = None
    num_tensors: int | None = None
    alignment: int = 32
    data: bytes | None = None

    def header(self) -> bytes:
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.pairs) if self.num_pairs is None else self.num_pairs,
        )
        parts = [self.magic, struct.pack("<IQQ", self.version, *counts), *self.pairs]
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            parts += [
                text(tensor.name),
                struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape),
                struct.pack("<IQ", tensor.kind, offset),
            ]
            at += -(-tensor.num_bytes // self.alignment) * self.alignment
        return b"".join(parts)

    def __bytes__(self) -> bytes:
        header = self.header()
        padding = bytes(-len(header) % self.alignment)
        sizes = sum(-(-t.num_bytes // self.alignment) * self.alignment for t in self.tensors)
        return header + padding + (bytes(sizes) if self.data is None else self.data)

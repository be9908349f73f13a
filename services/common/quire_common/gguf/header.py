"""The header of one GGUF file: metadata and tensor places, all checked against the file's size.

The reader checks every count and length against the bytes that are left in the file before it allocates. No single
allocation exceeds the file's size. The rules are llama.cpp's: keys and tensor names are unique, and each tensor begins
where the one before it ends, aligned. This module knows nothing of models.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire_common.gguf import faults
from quire_common.gguf.block_kinds import BLOCK_KINDS, BlockKind
from quire_common.gguf.metadata import Metadata, Value
from quire_common.gguf.text_array import TextArray

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_PAIRS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_BOOL, _TEXT, _ARRAY = 7, 8, 9
# Value types by ggml's numbers: struct's letter, and numpy's type.
_SCALARS: Final[Mapping[int, tuple[struct.Struct, np.dtype[np.generic]]]] = {
    number: (struct.Struct("<" + letter), np.dtype("<" + kind))
    for number, letter, kind in (
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "u2"),
        (3, "h", "i2"),
        (4, "I", "u4"),
        (5, "i", "i4"),
        (6, "f", "f4"),
        (_BOOL, "B", "u1"),
        (10, "Q", "u8"),
        (11, "q", "i8"),
        (12, "d", "f8"),
    )
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LARGEST_SHAPE = 1 << 48


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of one tensor. Blocks are packed along the last axis of `shape`."""

    name: str
    kind: BlockKind
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    num_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The contents of one file's header. The file itself is closed."""

    path: Path
    version: int
    metadata: Metadata
    tensors: Mapping[str, TensorPlace]
    """By name, in the order of the file."""


def read_header(path: Path) -> GgufFile:
    """Read and check the header of a GGUF file: metadata and tensor places, no tensor data. Raises ConfigError for a
    file that is cut short, damaged or unreadable, Unsupported for another version or byte order, or a list of lists
    among the metadata."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(MAGIC):
                raise faults.truncated(path, f"it has {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise faults.unreadable(path, error) from error


class _HeaderReader:
    """Reads a header from its beginning to its end, each value behind the one before it. If the file ends inside a
    number, such as the length of a text, the methods raise `struct.error`, which `read` turns into ConfigError. If it
    ends inside the bytes of a text or a list, they raise ConfigError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> GgufFile:
        """Read the whole header. Raises ConfigError also where it goes on behind the end of the file."""
        try:
            return self._read()
        except struct.error as error:
            raise faults.truncated(self._path, f"its header goes on behind its {self._size} bytes") from error

    def _read(self) -> GgufFile:
        """Read magic, version, metadata and tensor places. Raises ConfigError for a damaged header or a key that is
        there twice, Unsupported for another version or byte order or a list of lists, and `struct.error` past the end
        of the file."""
        if self._data[: len(MAGIC)] != MAGIC:
            raise faults.corrupt(self._path, "it does not begin with the letters GGUF")
        self._at = len(MAGIC)
        version = self._number(_U32)
        if version not in VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise faults.unsupported(
                self._path,
                "it is big-endian" if turned else f"its GGUF version is {version}, and versions 2 and 3 are read",
                "Convert the model with a current llama.cpp, on a little-endian machine.",
            )
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_pairs = self._count("metadata pairs", MAX_PAIRS)
        values: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = self._name("a metadata key", MAX_KEY_BYTES)
            if key in values:
                raise faults.corrupt(self._path, f"metadata key `{key[:80]}` is there twice")
            values[key] = self._value(key)
        metadata = Metadata(values, self._path)
        return GgufFile(self._path, version, metadata, self._tensors(num_tensors, self._alignment(metadata)))

    def _number(self, form: struct.Struct) -> int:
        """Read one number of this form, and go on behind it. Raises struct.error if the file ends before."""
        value: int = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return value

    def _count(self, what: str, most: int) -> int:
        """Read a u64 count. Raises ConfigError for more than `most`; `what` names the counted things."""
        count = self._number(_U64)
        if count > most:
            raise faults.corrupt(self._path, f"it claims {count} {what}; at most {most} are read")
        return count

    def _bytes(self, what: str, count: int) -> bytes:
        """Read `count` bytes. Raises ConfigError if the file ends before; `what` names the value."""
        end = self._at + count
        if end > self._size:
            raise faults.truncated(self._path, f"{what} needs {count} bytes at byte {self._at} of {self._size}")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _name(self, what: str, most: int) -> str:
        """Read a text of 1 to `most` bytes. Raises ConfigError for another length, checked before the text is read, and
        for a text that is not UTF-8."""
        length = _U64.unpack_from(self._data, self._at)[0]
        if not 1 <= length <= most:
            raise faults.corrupt(self._path, f"{what} claims {length} bytes; 1 to {most} are read")
        return self._text(what)

    def _text(self, what: str) -> str:
        """Read a u64 length and so many bytes, and decode them. Raises ConfigError if the file has fewer bytes than the
        length says, or the text is not UTF-8."""
        length = self._number(_U64)
        try:
            return self._bytes(what, length).decode()
        except UnicodeDecodeError as error:
            raise faults.corrupt(self._path, f"{what} is not UTF-8") from error

    def _value(self, key: str) -> Value:
        """Read the type and the value of a metadata pair: a text, a list, a number or a boolean. Raises ConfigError for
        an unknown type or a damaged value, Unsupported for a list of lists; `key` is for error messages."""
        kind = self._number(_U32)
        if kind == _TEXT:
            return self._text(f"`{key[:80]}`")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise faults.corrupt(self._path, f"`{key[:80]}` is of the unknown type {kind}")
        form, _ = _SCALARS[kind]
        value: int | float = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return self._bool(key, value) if kind == _BOOL else value

    def _bool(self, key: str, value: float) -> bool:
        """Return the boolean of 0 or 1. Raises ConfigError, which names the key, for another value."""
        if value not in (0, 1):
            raise faults.corrupt(self._path, f"`{key[:80]}` is {value}, neither true nor false")
        return bool(value)

    def _array(self, key: str) -> Value:
        """Read a list: texts become a TextArray, numbers an array of the file's dtype, and booleans an array of bool.
        Raises Unsupported for a list of lists, ConfigError for an unknown type, a boolean beyond 0 and 1, or a list
        beyond the file's end, and struct.error if the file ends inside a number, such as the list's length."""
        kind, count = self._number(_U32), self._number(_U64)
        if kind == _TEXT:
            return self._texts(key, count)
        if kind == _ARRAY:
            raise faults.unsupported(self._path, f"`{key[:80]}` is a list of lists", faults.CONVERT)
        if kind not in _SCALARS:
            raise faults.corrupt(self._path, f"`{key[:80]}` is a list of the unknown type {kind}")
        dtype = _SCALARS[kind][1]
        raw = self._bytes(f"`{key[:80]}`", count * dtype.itemsize)
        found: NDArray[np.generic] = np.frombuffer(raw, dtype)
        if kind == _BOOL:
            if count and int(found.max()) > 1:
                raise faults.corrupt(self._path, f"`{key[:80]}` holds what is neither true nor false")
            return found.astype(np.bool_)
        return found

    def _texts(self, key: str, count: int) -> TextArray:
        """Read a list of `count` texts without decoding them. Raises ConfigError if the texts go on behind the end of
        the file, or `struct.error` if the file ends inside a text's length."""
        if count * _U64.size > self._size - self._at:
            raise faults.truncated(self._path, f"`{key[:80]}` claims {count} texts")
        data, size, unpack = self._data, self._size, _U64.unpack_from
        begin = at = self._at
        ends = array("Q", bytes(count * 8))
        for i in range(count):
            at += 8 + unpack(data, at)[0]
            if at > size:
                raise faults.truncated(self._path, f"a text of `{key[:80]}` goes on behind its {size} bytes")
            ends[i] = at - begin
        self._at = at
        return TextArray(data[begin:at], ends)

    def _alignment(self, metadata: Metadata) -> int:
        """Return the file's alignment of tensors in bytes, 32 by default. Raises ConfigError unless it is a power of
        two up to MAX_ALIGNMENT."""
        alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT, minimum=1)
        if alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
            raise faults.corrupt(self._path, f"its alignment is {alignment}, no power of two up to {MAX_ALIGNMENT}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorPlace]:
        """Read `count` tensor entries, and return the tensors' places in the file by name; the entries' offsets count
        from the end of the header, aligned, and those of the places from the beginning of the file. Raises ConfigError
        for a bad name or shape (see `_name`, `_shape`), a name that is there twice, a tensor that does not begin where
        the one before it ends (aligned), or one beyond the file's end."""
        entries: list[tuple[str, BlockKind, tuple[int, ...], int]] = []
        expected = 0
        names: set[str] = set()
        for _ in range(count):
            name = self._name("a tensor's name", MAX_NAME_BYTES)
            if name in names:
                raise faults.corrupt(self._path, f"tensor {name} is there twice")
            names.add(name)
            kind, shape = self._shape(name)
            offset = self._number(_U64)
            if offset != expected:
                raise faults.corrupt(self._path, f"tensor {name} begins at byte {offset} of the data, not {expected}")
            num_bytes = prod(shape) // kind.values * kind.num_bytes
            entries.append((name, kind, shape, num_bytes))
            expected = _aligned(offset + num_bytes, alignment)
        found: dict[str, TensorPlace] = {}
        begin = _aligned(self._at, alignment)
        for name, kind, shape, num_bytes in entries:
            if begin + num_bytes > self._size:
                raise faults.truncated(
                    self._path, f"tensor {name} ends at byte {begin + num_bytes}, the file at {self._size}"
                )
            found[name] = TensorPlace(name, kind, shape, begin, num_bytes, self._path)
            begin = _aligned(begin + num_bytes, alignment)
        return found

    def _shape(self, name: str) -> tuple[BlockKind, tuple[int, ...]]:
        """Read the kind and the shape of a tensor. The file stores the shape in reverse order, and the kind after it.
        Raises ConfigError for other than 1 to 4 dimensions, an unknown kind, an axis of 0, more than 2^48 values, or a
        last axis that is no multiple of the kind's block."""
        dimensions = self._number(_U32)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise faults.corrupt(self._path, f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
        number = self._number(_U32)
        if number not in BLOCK_KINDS:
            raise faults.corrupt(self._path, f"tensor {name} is of the unknown kind {number}")
        kind = BLOCK_KINDS[number]
        if not all(shape) or prod(shape) > _LARGEST_SHAPE or shape[-1] % kind.values:
            raise faults.corrupt(self._path, f"tensor {name} of kind {kind.name} has the shape {list(shape)}")
        return kind, shape


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment

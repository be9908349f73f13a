"""SafetensorsFile: one memory-mapped safetensors file. Its header is checked in full, and its tensors are returned as
views.

It knows the format, and nothing of models or shards. A truncated file or a damaged header raises a typed error. A file
with a sound header is read without copying.
"""

from __future__ import annotations

import json
import mmap
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire_common.errors import ConfigError, Unsupported

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8

DTYPES: Final[dict[str, torch.dtype]] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_ITEM_BYTES: Final[dict[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `begin` and `end` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return self.end - self.begin


class SafetensorsFile:
    """An open file; a context manager. A view that outlives it keeps the map alive, not the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < _LENGTH_BYTES:
                    raise self._truncated(f"it has {size} bytes")
                # A private writable map: torch warns of read-only buffers. Nothing writes, so nothing is copied.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ConfigError(
                "UNREADABLE_FILE", f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions."
            ) from error
        try:
            self.entries = self._read_header(size)
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BufferError):  # a view lives on: the map goes with it
            self._map.close()

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Return a tensor as a view of the mapped file; one without elements is no view. Raises Unsupported for kinds
        of numbers that no model here computes with."""
        if entry.dtype not in DTYPES:
            raise Unsupported(
                "UNSUPPORTED_WEIGHT_DTYPE",
                f"{self.path.name}: tensor {entry.name} is {entry.dtype}; supported are {', '.join(DTYPES)}.",
                "Serve an unquantised checkpoint.",
            )
        dtype = DTYPES[entry.dtype]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)  # torch makes no empty views of a buffer
        flat = torch.frombuffer(self._map, dtype=dtype, count=prod(entry.shape), offset=entry.begin)
        return flat.view(entry.shape)

    def _read_header(self, size: int) -> dict[str, TensorEntry]:
        """Parse and check the header of a file of `size` bytes; return its tensors by name. Raises ConfigError if it is
        too long, cut short or no JSON object, or if the tensors do not lie in the file without gaps, overlaps and a
        rest."""
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise self._corrupt(f"its header claims {length} bytes")
        data = _LENGTH_BYTES + length
        if data > size:
            raise self._truncated(f"its header alone needs {data} bytes, it has {size}")
        try:
            header = json.loads(self._map[_LENGTH_BYTES:data])
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        entries = [self._entry(name, value, data) for name, value in header.items() if name != "__metadata__"]
        expected = data
        for entry in sorted(entries, key=lambda found: (found.begin, found.end)):
            if entry.begin != expected:
                raise self._corrupt(f"tensor {entry.name} begins at byte {entry.begin}, not {expected}")
            expected = entry.end
        if expected > size:
            raise self._truncated(f"its tensors need {expected} bytes, it has {size}")
        if expected < size:
            raise self._corrupt(f"{size - expected} bytes follow its last tensor")
        return {entry.name: entry for entry in entries}

    def _entry(self, name: str, value: Any, data: int) -> TensorEntry:
        """Check one tensor's entry of the header and return it, with offsets in the file; `data` is where the data
        begins. Raises ConfigError for a malformed entry, or one whose size does not suit its shape and type."""
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise self._corrupt(f"the name of tensor {name[:80]!a} is not a text") from error
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            item_bytes = _ITEM_BYTES[dtype]
        except (TypeError, KeyError, ValueError) as error:
            raise self._corrupt(f"the entry of tensor {name[:80]} is malformed") from error
        if len(shape) > MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name[:80]} has {len(shape)} dimensions")
        numbers = (*shape, begin, end)
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
            raise self._corrupt(f"the entry of tensor {name[:80]} holds a value that is not a size")
        if end - begin != prod(shape) * item_bytes:
            raise self._corrupt(f"tensor {name[:80]} of shape {list(shape)} and {dtype} has {end - begin} bytes")
        if begin == end and prod(size or 1 for size in shape) >= 1 << 63:
            raise self._corrupt(f"tensor {name[:80]} has no elements, but sizes that no tensor can have")
        return TensorEntry(name, dtype, shape, data + begin, data + end)

    def _truncated(self, cause: str) -> ConfigError:
        return ConfigError("TRUNCATED_SAFETENSORS", f"{self.path} is cut short: {cause}.", "Download the file again.")

    def _corrupt(self, cause: str) -> ConfigError:
        return ConfigError("CORRUPT_SAFETENSORS", f"{self.path} is damaged: {cause}.", "Download the file again.")

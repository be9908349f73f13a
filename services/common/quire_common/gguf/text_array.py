"""A list of texts of a GGUF file, kept in the format of the file. Vocabularies are long, and most readers need only a
few texts.

The list takes the memory of its bytes in the file, and eight bytes for each text. This module knows nothing of what the
texts mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload


class TextArray(Sequence[str]):
    """Texts that are decoded when they are asked for; UnicodeDecodeError for one that is not UTF-8."""

    def __init__(self, data: bytes, ends: array[int]) -> None:
        """`data` holds each text behind eight bytes of length; `ends` are the offsets in it at which the texts end."""
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = self._ends[index]
        index %= len(self._ends)
        begin = self._ends[index - 1] if index else 0
        return self._data[begin + 8 : end].decode()

    def __iter__(self) -> Iterator[str]:
        data, begin = self._data, 0
        for end in self._ends:
            yield data[begin + 8 : end].decode()
            begin = end

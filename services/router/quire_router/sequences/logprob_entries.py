"""Logprobs of a sequence's tokens, packed: an answer may keep a hundred thousand of them until its client reads.

A packed entry is bytes, which Python's garbage collector does not visit. As objects, the entries of slow readers made
each full collection last 150 ms, for which all other streams of the router waited (bench/LOG.md, 2026-11-24).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, overload

from quire_router.sequences.delta import LogprobEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_HEAD = Struct("<ifi")
"""Token id, logprob, rank; then int32 ids of the alternatives, then their float32 logprobs."""


def pack_entry(token_id: int, logprob: float, rank: int, top_ids: bytes, top_logprobs: bytes) -> bytes:
    """Pack one token's entry. `top_ids` are int32 bytes, `top_logprobs` float32 bytes of as many alternatives."""
    return _HEAD.pack(token_id, logprob, rank) + top_ids + top_logprobs


def unpack_entry(packed: bytes) -> LogprobEntry:
    """Return the entry that `pack_entry` packed; its alternatives are arrays of int32 ids and float32 logprobs."""
    token_id, logprob, rank = _HEAD.unpack_from(packed)
    middle = (_HEAD.size + len(packed)) // 2
    return LogprobEntry(token_id, logprob, rank, array("i", packed[_HEAD.size : middle]), array("f", packed[middle:]))


class LogprobEntries:
    """A list of LogprobEntry, indexed by the token's position in the output. Reading unpacks the entries."""

    __slots__ = ("_packed",)

    def __init__(self, packed: Iterable[bytes] = ()) -> None:
        self._packed = list(packed)

    def append(self, packed: bytes) -> None:
        """Add the entry of the next token, as `pack_entry` packed it."""
        self._packed.append(packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[LogprobEntry]:
        return map(unpack_entry, self._packed)

    @overload
    def __getitem__(self, place: int) -> LogprobEntry: ...
    @overload
    def __getitem__(self, place: slice) -> list[LogprobEntry]: ...
    def __getitem__(self, place: int | slice) -> LogprobEntry | list[LogprobEntry]:
        if isinstance(place, slice):
            return [unpack_entry(packed) for packed in self._packed[place]]
        return unpack_entry(self._packed[place])


class PromptEntries(Sequence["LogprobEntry | None"]):
    """The logprob entries of a prompt's tokens, by position. Each entry is unpacked when it is read; the entry is None
    if the engine sent none for the position."""

    def __init__(self, packed: Mapping[int, bytes], count: int) -> None:
        self._packed = packed
        self._positions = range(count)

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, place: int) -> LogprobEntry | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[LogprobEntry | None]: ...
    def __getitem__(self, place: int | slice) -> LogprobEntry | list[LogprobEntry | None] | None:
        if isinstance(place, slice):
            return [self._entry(position) for position in self._positions[place]]
        return self._entry(self._positions[place])

    def _entry(self, position: int) -> LogprobEntry | None:
        packed = self._packed.get(position)
        return None if packed is None else unpack_entry(packed)

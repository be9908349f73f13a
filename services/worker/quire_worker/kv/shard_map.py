"""Maps the bytes of a KV page between two worker groups whose ranks hold different parts of a page.

A whole page is `[kv_head][layer][K,V][token][dim]`. A tensor-parallel rank holds a run of heads. If there are more
ranks than heads, several ranks hold the same head (MLA has one head, so every rank holds all of it). A pipeline stage
holds its own layers of each head. A rank stores its ranges of a page one after the other, in the order of the page.

A cut is an offset in the page at which some source rank's range begins or ends. Between two neighbouring cuts, the same
source ranks hold all bytes. This module does not know how bytes travel.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from quire_common.credit import ShardRange
from quire_common.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.credit import KvGroup


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of `length` bytes: its offset in a source rank's part of a page, and its offset in a target rank's part."""

    source: int
    source_offset: int
    target_offset: int
    length: int


class ShardMap:
    """The way in which ranks of the target group get their parts of a page from the ranks of the source group. A group
    without ranges is one rank that holds whole pages. Raises InvalidArgument BAD_SHARDS if a range is empty, leaves the
    page or overlaps another of its rank."""

    def __init__(self, source: KvGroup, target: KvGroup) -> None:
        size = source.page_bytes
        self._parts = _local_offsets(target.shards or (ShardRange(0, 0, size),), size)
        held = _local_offsets(source.shards or (ShardRange(0, 0, size),), size)
        self._cuts = sorted(
            {0, size, *(cut for ranges in held.values() for at, _, n in ranges for cut in (at, at + n))}
        )
        self._holders: list[list[tuple[int, int]]] = [[] for _ in pairwise(self._cuts)]
        for rank, ranges in held.items():
            for offset, local, length in ranges:
                first = bisect_left(self._cuts, offset)
                for index in range(first, bisect_left(self._cuts, offset + length)):
                    self._holders[index].append((rank, local + self._cuts[index] - offset))
        self._turns: dict[int, dict[int, tuple[Piece, ...]]] = {}
        self._period = max(map(len, self._holders), default=1) or 1

    def part_bytes(self, rank: int) -> int:
        """Bytes of a target rank's part of a page."""
        return sum(length for _, _, length in self._parts.get(rank, ()))

    def pieces(self, rank: int, page: int = 0) -> tuple[Piece, ...]:
        """Return the pieces of a target rank's part of a page: in order, and each byte once; none for an unknown rank.
        Source ranks that hold the same bytes take turns, within a page and from page to page. `page` is the page's
        number in its move. Raises InvalidArgument SHARDS_INCOMPLETE if no source rank holds some bytes that a target
        rank needs."""
        turn = page % self._period
        if turn not in self._turns:
            self._turns[turn] = self._deal(turn)
        return self._turns[turn].get(rank, ())

    def _deal(self, turn: int) -> dict[int, tuple[Piece, ...]]:
        """Compute the pieces of every target rank for one turn. If several source ranks hold the same bytes, the rank
        that has supplied the fewest bytes so far supplies them; among equals, the turn decides."""
        given: defaultdict[int, int] = defaultdict(int)
        dealt = {}
        for rank, ranges in self._parts.items():
            pieces: list[Piece] = []
            for offset, local, length in ranges:
                index = bisect_right(self._cuts, offset) - 1
                at = offset
                while at < offset + length:
                    end = min(self._cuts[index + 1], offset + length)
                    source, begin = self._choose(index, turn, given, at)
                    given[source] += end - at
                    _append_or_extend(
                        pieces, Piece(source, begin + at - self._cuts[index], local + at - offset, end - at)
                    )
                    at, index = end, index + 1
            dealt[rank] = tuple(pieces)
        return dealt

    def _choose(self, index: int, turn: int, given: dict[int, int], at: int) -> tuple[int, int]:
        """Choose the source rank that supplies the bytes between cut `index` and the next cut: the one with the fewest
        bytes in `given`, among equals by `turn`. Returns this rank and the offset of the bytes in its part; `given`
        stays as it is. Raises SHARDS_INCOMPLETE if no rank holds them; `at` is for its text."""
        holders = self._holders[index]
        if not holders:
            raise InvalidArgument(
                "SHARDS_INCOMPLETE",
                f"No rank of the other group holds bytes {at} to {self._cuts[index + 1]} of a page.",
                "Run prefill and decode replicas of one release, and report it with both sides' geometry.",
            )
        ordered = holders[turn % len(holders) :] + holders[: turn % len(holders)]
        return min(ordered, key=lambda holder: given[holder[0]])


def shard_ranges(group: KvGroup, tensor: int, pipeline: int = 1) -> tuple[ShardRange, ...]:
    """Return the ranges of a page that each rank holds. There are `pipeline` stages of layers, and the `tensor` ranks
    of a stage share the heads; rank = stage x tensor + place. Raises ConfigError BAD_PARALLELISM if neither of `tensor`
    and the number of heads divides the other, or unless there are 1 to `group.layers` stages."""
    heads, layers = group.kv_heads, group.layers
    even = heads % tensor == 0 if tensor <= heads else tensor % heads == 0
    if not even or not 1 <= pipeline <= layers:
        raise ConfigError(
            "BAD_PARALLELISM",
            f"{heads} KV heads and {layers} layers cannot be shared by {tensor} ranks in each of {pipeline} stages.",
            "Choose a tensor-parallel size that divides the KV heads or is a multiple of them.",
        )
    per_head = group.page_bytes // heads
    per_layer = per_head // layers
    ranges = []
    for stage in range(pipeline):
        low, high = stage * layers // pipeline, (stage + 1) * layers // pipeline
        for place in range(tensor):
            rank = stage * tensor + place
            first, end = place * heads // tensor, max((place + 1) * heads // tensor, place * heads // tensor + 1)
            if pipeline == 1:
                ranges.append(ShardRange(rank, first * per_head, (end - first) * per_head))
            else:
                begins = (head * per_head + low * per_layer for head in range(first, end))
                ranges.extend(ShardRange(rank, begin, (high - low) * per_layer) for begin in begins)
    return tuple(ranges)


def _local_offsets(shards: Sequence[ShardRange], page_bytes: int) -> dict[int, list[tuple[int, int, int]]]:
    """Return, by rank, each of its ranges as (offset in the page, offset in the rank's part, length), in the order of
    the page. Ranges of different ranks may overlap. Raises InvalidArgument BAD_SHARDS if two ranges of one rank
    overlap, or if a range is empty or leaves the page."""
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for shard in sorted(shards, key=lambda each: (each.rank, each.offset)):
        ranges = parts.setdefault(shard.rank, [])
        end, local = (ranges[-1][0] + ranges[-1][2], ranges[-1][1] + ranges[-1][2]) if ranges else (0, 0)
        if not end <= shard.offset < shard.offset + shard.length <= page_bytes:
            raise InvalidArgument(
                "BAD_SHARDS",
                f"Bytes {shard.offset} to {shard.offset + shard.length} of rank {shard.rank} are not part of a page of "
                f"{page_bytes}, or are named twice.",
                "Run prefill and decode replicas of one release, and report it with both sides' geometry.",
            )
        ranges.append((shard.offset, local, shard.length))
    return parts


def _append_or_extend(pieces: list[Piece], piece: Piece) -> None:
    """Append `piece`. If it continues the last piece both in the source and in the target, extend the last piece
    instead."""
    if pieces:
        last = pieces[-1]
        if (last.source, last.source_offset + last.length, last.target_offset + last.length) == (
            piece.source,
            piece.source_offset,
            piece.target_offset,
        ):
            pieces[-1] = Piece(last.source, last.source_offset, last.target_offset, last.length + piece.length)
            return
    pieces.append(piece)

"""Pages that two worker groups cut differently: every rank gets its own bytes, each once, from whoever has them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import KvGroup, ShardRange
from quire_common.errors import ConfigError, InvalidArgument
from quire_worker.kv.shard_map import Piece, ShardMap, shard_ranges

UNIT = 6
"""Bytes of one head's keys and values in one layer."""


def group(heads: int, layers: int, tensor: int = 1, pipeline: int = 1) -> KvGroup:
    whole = KvGroup("full", heads * layers * UNIT, "kv_head.layer.kv.token.dim", "bfloat16", layers, heads, 8)
    return replace(whole, shards=shard_ranges(whole, tensor, pipeline))


def part_of(page: np.ndarray, rank: int, tensor: int, pipeline: int) -> bytes:
    """What a rank holds of a page [head, layer, UNIT], by what parallelism means."""
    heads, layers = page.shape[:2]
    stage, place = divmod(rank, tensor)
    of_stage = slice(stage * layers // pipeline, (stage + 1) * layers // pipeline)
    if tensor <= heads:
        share = heads // tensor
        return page[place * share : (place + 1) * share, of_stage].tobytes()
    return page[place // (tensor // heads), of_stage].tobytes()


@st.composite
def cuts(draw: st.DrawFn, heads: int, layers: int) -> tuple[int, int]:
    """Tensor and pipeline sizes that are possible."""
    tensor = draw(st.sampled_from([n for n in range(1, 17) if (heads % n == 0 if n <= heads else n % heads == 0)]))
    return tensor, draw(st.integers(1, layers))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    heads, layers = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 5))
    return heads, layers, draw(cuts(heads, layers)), draw(cuts(heads, layers))


@given(cases(), st.integers(0, 40))
def test_every_rank_gets_its_part(case: tuple[int, int, tuple[int, int], tuple[int, int]], index: int) -> None:
    heads, layers, theirs, ours = case
    page = np.random.default_rng(index).integers(0, 256, (heads, layers, UNIT), dtype=np.uint8)
    held = {rank: part_of(page, rank, *theirs) for rank in range(theirs[0] * theirs[1])}
    shards = ShardMap(group(heads, layers, *theirs), group(heads, layers, *ours))
    for rank in range(ours[0] * ours[1]):
        wanted = part_of(page, rank, *ours)
        part, written = bytearray(len(wanted)), Counter[int]()
        for piece in shards.pieces(rank, index):
            source = held[piece.source][piece.source_offset : piece.source_offset + piece.length]
            assert len(source) == piece.length > 0
            part[piece.target_offset : piece.target_offset + piece.length] = source
            written.update(range(piece.target_offset, piece.target_offset + piece.length))
        assert bytes(part) == wanted and shards.part_bytes(rank) == len(wanted)
        assert set(written.values()) <= {1} and len(written) == len(wanted)


@given(cases())
def test_pieces_that_go_on_are_one(case: tuple[int, int, tuple[int, int], tuple[int, int]]) -> None:
    heads, layers, theirs, ours = case
    shards = ShardMap(group(heads, layers, *theirs), group(heads, layers, *ours))
    for rank in range(ours[0] * ours[1]):
        pieces = shards.pieces(rank)
        for last, piece in pairwise(pieces):
            goes_on = (last.source, last.source_offset + last.length) == (piece.source, piece.source_offset)
            assert last.target_offset + last.length == piece.target_offset and not goes_on
        if theirs == ours and theirs[0] <= heads:
            assert pieces == (Piece(rank, 0, 0, shards.part_bytes(rank)),)


@pytest.mark.parametrize(("theirs", "ours", "pages"), [(4, 1, 4), (4, 2, 4), (8, 3, 8), (2, 8, 2), (6, 6, 1)])
def test_ranks_that_hold_the_same_give_the_same(theirs: int, ours: int, pages: int) -> None:
    """One head that everybody has, as with MLA."""
    shards = ShardMap(group(1, 2, theirs), group(1, 2, ours))
    given = Counter[int]()
    for page in range(pages):
        for rank in range(ours):
            for piece in shards.pieces(rank, page):
                given[piece.source] += piece.length
    assert len(given) == theirs and len(set(given.values())) == 1


def test_one_process_has_whole_pages() -> None:
    whole = replace(group(4, 2), shards=())
    assert ShardMap(whole, whole).pieces(0) == (Piece(0, 0, 0, whole.page_bytes),)
    assert ShardMap(whole, group(4, 2, 2)).pieces(1) == (Piece(0, whole.page_bytes // 2, 0, whole.page_bytes // 2),)
    assert ShardMap(whole, whole).pieces(3) == () and ShardMap(whole, whole).part_bytes(3) == 0


def test_what_nobody_holds_is_named() -> None:
    halves = group(4, 2, 2)
    with pytest.raises(InvalidArgument, match=r"holds bytes 24 to 48") as error:
        ShardMap(replace(halves, shards=halves.shards[:1]), halves).pieces(1)
    assert error.value.code == "SHARDS_INCOMPLETE"


@pytest.mark.parametrize(
    "shards",
    [
        (ShardRange(0, 40, 9),),
        (ShardRange(0, 0, 0),),
        (ShardRange(1, 8, 8), ShardRange(1, 0, 9)),
        (ShardRange(0, 1 << 62, 1 << 62),),
    ],
)
def test_ranges_that_are_none_of_a_page_are_refused(shards: tuple[ShardRange, ...]) -> None:
    whole = group(4, 2)
    for source, target in ((replace(whole, shards=shards), whole), (whole, replace(whole, shards=shards))):
        with pytest.raises(InvalidArgument, match="BAD_SHARDS"):
            ShardMap(source, target)


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (6, 1), (1, 0), (1, 3)])
def test_heads_and_layers_that_cannot_be_shared(tensor: int, pipeline: int) -> None:
    with pytest.raises(ConfigError, match="BAD_PARALLELISM"):
        group(4, 2, tensor, pipeline)

"""Shares of keys: every key once, as even as there is room for, the longest first."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_worker.arrays import Int32
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.attention_plan import decode_programs, resident_programs
from quire_worker.ops.triton.kv_splits import (
    BEGIN,
    END,
    NARROW,
    PARTS,
    SEQUENCE,
    WIDE,
    extend_splits,
    max_splits,
    split_keys,
    wide_until,
)
from tests.kernels.ops.kv_split_rig import check_shares


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=20), st.integers(1, 40), st.sampled_from([NARROW, WIDE]))
def test_every_key_is_in_one_share(lengths: list[int], programs: int, tile: int) -> None:
    room = max_splits(len(lengths), programs)
    splits = split_keys(np.array(lengths, np.int32), programs, room, tile)
    check_shares(splits, lengths, tile)
    used = int((splits[SEQUENCE] >= 0).sum())
    assert (np.diff(splits[END, :used] - splits[BEGIN, :used]) <= 0).all()


@given(
    st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(1, 40),
    st.sampled_from([NARROW, WIDE]),
)
def test_shares_follow_sequences_that_grow_until_one_needs_another_tile(
    sequences: list[tuple[int, int]], programs: int, tile: int
) -> None:
    before = np.array([length for length, _ in sequences], np.int32)
    now = before + np.array([growth for _, growth in sequences], np.int32)
    splits = split_keys(before, programs, max_splits(len(before), programs), tile)
    fits = all(-(-old // tile) == -(-new // tile) for old, new in zip(before, now, strict=True))
    assert extend_splits(splits, before, now, tile) == fits
    check_shares(splits, (now if fits else before).tolist(), tile)


def shared(lengths: list[int], programs: int = 66) -> Int32:
    return split_keys(np.array(lengths, np.int32), programs, max_splits(len(lengths), programs))


def test_a_device_is_filled_and_no_share_is_shorter_than_it_must_be() -> None:
    assert shared([640] * 8)[PARTS].max() == 4  # 32 shares, of 66 that fill the device: none is shorter than it must be
    assert shared([640] * 256)[PARTS].max() == 1
    assert shared([1024] * 32)[PARTS].max() == 2
    long = shared([8192] * 32)
    assert 2 * 66 < (long[SEQUENCE] >= 0).sum() <= max_splits(32, 66) == 32 + 3 * 66
    assert shared([190])[PARTS].max() == 6
    assert shared([131_072])[PARTS].max() == 64
    ragged = shared([32_768] + [256] * 255)
    assert ragged[PARTS].max() > 16 and (ragged[SEQUENCE] >= 0).sum() <= 256 + 3 * 66


def test_what_fills_the_device_in_whole_rounds_is_not_cut() -> None:
    # 64 of 66, twice 64 of twice 66: cut in two, the same keys would be begun and merged twice as often.
    assert shared([1024] * 64)[PARTS].max() == shared([640] * 128)[PARTS].max() == 1
    # 96 of twice 66: a quarter of the device would have nothing to do in the second round.
    assert shared([1024] * 96)[PARTS].max() > 1


def test_even_shares_may_leave_some_of_the_device_idle() -> None:
    # 48 programs of 66 are each faster than 96 would be, the last 30 of which come late.
    assert shared([1024] * 24)[PARTS].max() == shared([1024] * 28)[PARTS].max() == 2
    # Not where one is longer than the others, and would go on alone.
    assert shared([1024] * 23 + [4096])[PARTS].max() > 6


def test_few_sequences_of_many_heads_have_wide_tiles() -> None:
    assert wide_until(HeadShape(32, 8, 128, 0.1)) == 2
    assert wide_until(HeadShape(16, 8, 128, 0.1)) == wide_until(HeadShape(32, 8, 256, 0.1)) == 0
    # Half as many, each twice as long.
    assert split_keys(np.array([1024], np.int32), 66, 140, WIDE)[PARTS].max() == 16
    assert split_keys(np.array([1024], np.int32), 66, 140, NARROW)[PARTS].max() == 32


def test_nobody_decodes() -> None:
    assert max_splits(0, 66) == 0
    assert split_keys(np.zeros(0, np.int32), 66, 4)[SEQUENCE].tolist() == [-1] * 4


def test_a_device_is_filled_by_its_own_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"cuda:0": 132, "cuda:1": 114}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=counts[str(device)]),
    )
    resident_programs.cache_clear()
    shape = HeadShape(heads=16, kv_heads=8, head_dim=128, score_scale=0.1)
    assert [decode_programs(shape, torch.device(name)) for name in ("cpu", *counts)] == [2, 66, 57]
    resident_programs.cache_clear()

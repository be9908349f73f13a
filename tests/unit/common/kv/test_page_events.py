"""Joined frames say the same as the changes that they were made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import common_pb2 as pb
from quire_common.kv.page_events import count_pages, joined

NS = b"n" * 32


def stored(sequence: int, *hashes: bytes, parent: bytes = b"", group: int = 0, tokens: bytes = b"") -> pb.PageEvents:
    chain = pb.StoredPages(namespace=NS, group=group, parent=parent, hashes=hashes, token_ids=tokens)
    return pb.PageEvents(epoch=pb.Epoch(boot_id=1), sequence=sequence, stored=[chain])


def removed(sequence: int, *hashes: bytes) -> pb.PageEvents:
    return pb.PageEvents(sequence=sequence, removed=hashes)


def test_chains_grow_together() -> None:
    changes = [stored(4, b"a", tokens=b"1"), stored(5, b"b", b"c", parent=b"a", tokens=b"23"), stored(6, b"x")]
    (frame,) = joined([*changes, removed(7, b"y")])
    assert (frame.first_sequence, frame.sequence, frame.epoch.boot_id) == (4, 7, 1)
    assert [(s.parent, list(s.hashes), s.token_ids) for s in frame.stored] == [
        (b"", [b"a", b"b", b"c"], b"123"),
        (b"", [b"x"], b""),
    ]
    assert list(frame.removed) == [b"y"] and count_pages(frame) == 5


def test_one_change_stays_as_it_is_and_none_is_none() -> None:
    assert list(joined([stored(1, b"a")])) == [stored(1, b"a")]
    assert not list(joined([]))


def test_frames_are_bounded_but_a_change_is_whole() -> None:
    changes = [stored(i + 1, bytes([i])) for i in range(5)]
    assert [(f.first_sequence, f.sequence) for f in joined(changes, 2)] == [(1, 2), (3, 4), (0, 5)]
    assert [count_pages(f) for f in joined([stored(1, b"a", b"b", b"c"), stored(2, b"d")], 2)] == [3, 1]


def test_other_pools_do_not_clash() -> None:
    gone = pb.PageEvents(sequence=2)
    gone.removed_pages.add(namespace=NS, group=1, hashes=[b"a"])
    assert len(list(joined([stored(1, b"a"), gone]))) == 1
    gone.removed_pages[0].group = 0
    assert len(list(joined([stored(1, b"a"), gone]))) == 2


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 5), min_size=1)), max_size=30), st.integers(1, 8))
def test_applied_in_any_order_within_a_frame(moves: list[tuple[bool, set[int]]], most: int) -> None:
    changes: list[pb.PageEvents] = []
    held: set[bytes] = set()
    for number, (stores, pages) in enumerate(moves, 1):
        hashes = [bytes([page]) for page in sorted(pages)]
        changes.append(stored(number, *hashes) if stores else removed(number, *hashes))
        held = held | set(hashes) if stores else held - set(hashes)
    frames = list(joined(changes, most))
    for removed_first in (True, False):
        found: set[bytes] = set()
        for frame in frames:
            gained = {digest for chain in frame.stored for digest in chain.hashes}
            found = found - set(frame.removed) | gained if removed_first else (found | gained) - set(frame.removed)
        assert found == held
    spans = [(f.first_sequence or f.sequence, f.sequence) for f in frames]
    assert [n for first, last in spans for n in range(first, last + 1)] == list(range(1, len(moves) + 1))

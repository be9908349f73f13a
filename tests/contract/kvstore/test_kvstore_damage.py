"""Pages that are not what their keys say, over a real server: refused, removed, counted, and wanted again."""

from __future__ import annotations

import pytest

from quire.v1 import kvstore_pb2
from quire_common.columns import i32
from quire_common.pages import check_page
from tests.contract.kvstore.test_kvstore_service import Running, begin, frame, refusal, running
from tests.unit.kvstore.pages import PLACE_BYTES, chain, framed

__all__ = ["running"]
A = chain("a", 8)


@pytest.mark.parametrize("name", ["flipped", "another page", "cut"])
def test_a_page_damaged_on_its_way_is_refused_and_the_others_stay(running: Running, name: str) -> None:
    begun = begin(running, A)
    assert i32(begun.wanted).tolist() == list(range(8))
    broken = {"flipped": b"\0" + framed(A, 3)[1:], "another page": framed(A, 4), "cut": framed(A, 3)[:-5]}[name]
    sent = [frame(begun.lease, i, broken if i == 3 else framed(A, i)) for i in range(8)]
    assert running.stub.Put(iter(sent)).pages == (7 if name == "cut" else 8)
    committed = running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=begun.lease))
    assert (committed.stored, committed.refused) == (7, 1)
    assert running.client.lookup(A, pin=False).pages == 3


def test_a_page_damaged_in_memory_is_a_miss_once_and_then_gone(running: Running) -> None:
    running.put(A)
    tier = running.service.store._ram
    page = tier.get(A.key(1))
    assert page is not None
    with tier.view(page) as view:
        view[500] ^= 1
    lookup, other = running.client.lookup(A), running.client.lookup(A)
    came: dict[int, bytes] = {}
    assert refusal(lambda: came.update(running.client.get_pages(lookup.lease))).code == "PAGE_LOST"
    check_page(next(running.client.get_pages(lookup.lease))[1], A.key(0))
    assert refusal(lambda: list(running.client.get_pages(other.lease, [1]))).code == "PAGE_LOST", "to all its readers"
    assert [index for index, _ in running.client.get_pages(other.lease, [0, 2])] == [0, 2]
    assert running.client.lookup(A, pin=False).pages == 1, "and nobody finds it again"
    assert running.service.store.stats().counts.corrupt == 1
    assert running.put(A) == 1, "until it is put again"
    assert running.client.lookup(A, pin=False).pages == 8
    running.client.release(lookup.lease, other.lease)
    assert tier.used_bytes == 8 * PLACE_BYTES, "its memory came back with the last lease"


def test_a_page_that_a_reader_found_wrong_is_looked_at_and_wanted_again_if_it_is(running: Running) -> None:
    running.put(A)
    lookup = running.client.lookup(A)
    tier = running.service.store._ram
    page = tier.get(A.key(1))
    assert page is not None
    assert running.client.check(lookup.lease, 1), "it was the way, or the reader"
    assert running.client.lookup(A, pin=False).pages == 8
    with tier.view(page) as view:
        view[500] ^= 1
    for _ in range(2):  # several readers may say so
        assert not running.client.check(lookup.lease, 1)
    assert running.client.lookup(A, pin=False).pages == 1
    assert running.service.store.stats().counts.corrupt == 1
    assert running.put(A) == 1
    assert not running.client.check(lookup.lease, 1), "what this lease held"
    assert running.client.lookup(A, pin=False).pages == 8, "is not what is there now"
    assert refusal(lambda: running.client.check(lookup.lease, 8)).code == "BAD_PAGE_INDEX"
    assert refusal(lambda: running.client.check(b"x" * 16, 0)).code == "LEASE_UNKNOWN"
    put = begin(running, chain("b", 1))
    assert refusal(lambda: running.client.check(put.lease, 0)).code == "LEASE_UNKNOWN", "a put's is none of a reader's"

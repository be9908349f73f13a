"""Pages that are written in place: by one writer at a time, checked when they are whole, out of reach afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from quire_common.errors import InvalidArgument, NotFound
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, PLACE_BYTES, chain, framed, length, part, put, read_all

if TYPE_CHECKING:
    from tests.unit.kvstore.conftest import MakeStore
    from tests.unit.kvstore.pages import Clock

A = chain("a", 4)


def test_a_page_is_written_in_place(make_store: MakeStore) -> None:
    store = make_store()
    wanted, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    for index in wanted:
        with store.page_buffer(lease.id, index) as buffer:
            assert len(buffer.view) == FRAMED_BYTES
            buffer.view[:] = framed(A, index)
    assert store.complete_pages(lease.id) == 4
    assert store.commit(lease.id) == (4, 0)
    _, found = store.lookup(A, 0, pin=True)
    assert found is not None
    for index in range(4):
        read_all(store, found.id, A, index)


@pytest.mark.parametrize("ending", ["release", "commit", "expiry"])
def test_memory_of_an_ended_put_is_nobodys_until_its_writer_has_left(
    make_store: MakeStore, clock: Clock, ending: str
) -> None:
    store = make_store(pages=4, default_lease_ms=1000)
    wanted, lease, _ = store.begin_put(part(A, 0, 2), BODY_BYTES, 0)
    assert lease is not None and wanted == [0, 1]
    store.write(lease.id, 0, 0, framed(A, 0))
    with store.page_buffer(lease.id, 1) as buffer:
        buffer.view[:] = framed(A, 1)
        if ending == "release":
            assert store.release([lease.id]) == 1
        elif ending == "commit":
            assert store.commit(lease.id) == (1, 1), "what is not done is not kept"
        else:
            clock.now_s += 2
            store.sweep()
        assert store.stats().pending_bytes == 0
        used = store.stats().used_bytes
        assert used == (2 if ending == "commit" else 1) * PLACE_BYTES, "the writer's page and what was committed"
        store.check_integrity()
        # Others take all the rest, and not this.
        assert put(store, chain("b", 4)) == (3, 0)
        assert buffer.view == framed(A, 1)
    assert store.stats().used_bytes == 3 * PLACE_BYTES
    assert length(store, A) == 0
    with pytest.raises(NotFound), store.page_buffer(lease.id, 1):
        pytest.fail("the put has ended")


def test_what_had_no_room_is_told(make_store: MakeStore) -> None:
    store = make_store(max_pending_bytes=2 * FRAMED_BYTES)
    wanted, lease, admitted = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None and wanted == [0, 1] and admitted == 2
    assert store.begin_put(A, BODY_BYTES, 0) == ([], None, 2), "what is on its way was not refused"
    for index in wanted:
        store.write(lease.id, index, 0, framed(A, index))
    store.commit(lease.id)
    wanted, _, admitted = store.begin_put(A, BODY_BYTES, 0)
    assert wanted == [2, 3] and admitted == 4
    assert store.begin_put(part(A, 0, 2), BODY_BYTES, 0) == ([], None, 2), "all of them are here"


def test_a_page_has_one_writer_at_a_time(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_kvstore.put_manager._WRITER_TIMEOUT_S", 0.05)
    store = make_store()
    _, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    with store.page_buffer(lease.id, 0) as buffer:
        with pytest.raises(InvalidArgument, match="being written"):
            store.write(lease.id, 0, 0, framed(A, 0))
        store.write(lease.id, 1, 0, framed(A, 1))
        buffer.view[:] = framed(A, 0)
    assert store.commit(lease.id) == (2, 2)


def test_a_page_started_anew_waits_for_the_writer_of_a_broken_connection(make_store: MakeStore) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(OSError), store.page_buffer(lease.id, 0) as buffer:
            buffer.view[:10] = b"x" * 10
            second = threads.submit(store.write, lease.id, 0, 0, framed(A, 0))
            with pytest.raises(TimeoutError):
                second.result(timeout=0.1)
            with pytest.raises(InvalidArgument, match="being written"):
                store.write(lease.id, 0, 10, b"y")
            raise OSError("the connection has broken")
        second.result(timeout=10)
    assert store.commit(lease.id) == (1, 3)


def test_a_writer_that_waits_for_a_put_that_ends_is_told_so(make_store: MakeStore) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    with ThreadPoolExecutor(1) as threads:
        with store.page_buffer(lease.id, 0) as buffer:
            second = threads.submit(store.write, lease.id, 0, 0, framed(A, 0))
            with pytest.raises(TimeoutError):
                second.result(timeout=0.1)
            buffer.view[:] = framed(A, 0)
            store.release([lease.id])
        with pytest.raises(NotFound):
            second.result(timeout=10)
    store.check_integrity()


def test_a_write_that_breaks_off_leaves_no_page_and_may_begin_anew(make_store: MakeStore) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    store.write(lease.id, 0, 0, framed(A, 0))
    assert store.complete_pages(lease.id) == 1
    with pytest.raises(OSError), store.page_buffer(lease.id, 0) as buffer:
        buffer.view[:10] = b"x" * 10
        raise OSError("the peer has gone")
    assert store.complete_pages(lease.id) == 0
    with pytest.raises(InvalidArgument, match="expected 0"):
        store.write(lease.id, 0, 10, b"y")
    store.write(lease.id, 0, 0, framed(A, 0))
    assert store.commit(lease.id) == (1, 3)


def test_pages_have_places_until_they_go_bad(make_store: MakeStore) -> None:
    store = make_store()
    put(store, A)
    _, lease = store.lookup(A, 0, pin=True)
    assert lease is not None
    same, offsets, generations = store.page_locations(lease.id)
    assert same is lease and len(set(offsets)) == len(set(generations)) == 4
    with store.page_view(lease.id, 2) as view:
        assert view == framed(A, 2)
    assert store.verify_page(lease.id, 2) and store.stats().counts.corrupt == 0
    store._ram._arena.view(offsets[2], FRAMED_BYTES)[200:201] = b"\xff" if framed(A, 2)[200] != 255 else b"\0"
    assert not store.verify_page(lease.id, 2)
    assert store.stats().counts.corrupt == 1 and length(store, A) == 2
    assert not store.verify_page(lease.id, 2), "and it is counted once"
    assert store.stats().counts.corrupt == 1
    store.release([lease.id])
    with pytest.raises(NotFound):
        store.page_locations(lease.id)


def test_a_handle_leads_to_a_living_lease_alone(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(default_lease_ms=1000)
    put(store, A)
    _, lease = store.lookup(A, 0, pin=True)
    assert lease is not None
    assert store.lease_key_of(lease.handle) == (lease.id, lease.key)
    assert store.lease_key_of(lease.id) is None
    clock.now_s += 2
    assert store.lease_key_of(lease.handle) is None, "expired, though nobody has swept"
    store.sweep()
    assert store.lease_key_of(lease.handle) is None

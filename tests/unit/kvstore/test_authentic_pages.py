"""Pages of a store with keys: what lies on a disk counts only with a MAC, and what is put there or sent has one."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from quire_common.kv.page_mac import PageMac
from quire_common.pages import HEADER_BYTES, PageHeader, PageKey, check_page, frame_page
from quire_kvstore.tiers.disk_files import DiskFiles
from tests.unit.kvstore import tiers
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, body, chain, framed, length, part, put
from tests.unit.kvstore.tiers import ON_DISK_BYTES, eventually, forget_memory, tier, tiered

if TYPE_CHECKING:
    from pathlib import Path

    from quire_common.pages import PageRun
    from quire_kvstore.page_store import PageStore

OLD, NEW = "11" * 32, "22" * 32
A, B = chain("a", 8), chain("b", 8)
NAMES = A.keys()


def mac_of(keys: str) -> PageMac:
    mac = PageMac.from_config(keys)
    assert mac is not None
    return mac


def file_of(root: Path, run: PageRun, index: int) -> Path:
    return DiskFiles(root).path(run.key(index))


def plant(root: Path, run: PageRun, index: int, page: bytes) -> None:
    """Write a file as the tier does, without a key."""
    file = file_of(root, run, index)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(page.ljust(ON_DISK_BYTES, b"\0"))


def found(store: PageStore, run: PageRun) -> tuple[int, str]:
    """As the other one; no page is being loaded any more then."""
    result = tiers.found(store, run)
    eventually(lambda: not store._tier_manager._loading)
    return result


def unauthenticated(store: PageStore) -> int:
    return tier(store, "disk").figures.unauthenticated


def store_a(store: PageStore, keys: str = OLD) -> None:
    assert put(store, A, mac_of(keys)) == (8, 0)
    store.flush(30)
    forget_memory(store)


def test_pages_on_the_disk_have_macs_and_come_back(tmp_path: Path) -> None:
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        store_a(store)
        for index in range(8):
            check_page(file_of(tmp_path, A, index).read_bytes()[:FRAMED_BYTES], A.key(index), mac=mac_of(OLD))
        assert found(store, A) == (8, "disk") and unauthenticated(store) == 0
    with tiered(disk=tmp_path, page_mac_key=OLD) as successor:
        assert found(successor, A) == (8, "disk")


@pytest.mark.parametrize("lives", [1, 2])
def test_planted_files_are_misses_and_removed_and_counted(tmp_path: Path, lives: int) -> None:
    """Under a store that wrote pages there, and under one that finds the files at its start."""
    wrong = b"\xff" * BODY_BYTES
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        store_a(store)
        planted = {
            2: frame_page(A.key(2), "uint8", wrong) + wrong,
            4: frame_page(A.key(4), "uint8", wrong, mac_of(NEW)) + wrong,
        }
        for index, page in planted.items():
            check_page(page, A.key(index))  # nothing is wrong with its checksum
            plant(tmp_path, A, index, page)
        if lives == 1:
            assert found(store, A) == (2, "disk")
            assert unauthenticated(store) >= 1
            assert not file_of(tmp_path, A, 2).exists() and length(store, A) == 2
            assert put(store, A, mac_of(OLD))[0] >= 1, "they are wanted again"
            return
    with tiered(disk=tmp_path, page_mac_key=OLD) as successor:
        assert found(successor, A) == (2, "disk")
        assert unauthenticated(successor) >= 1


def test_a_genuine_page_under_another_name_is_a_miss(tmp_path: Path) -> None:
    """Who can write to the disk has our pages, and their MACs, but no key."""
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        store_a(store)
        shutil.copy(file_of(tmp_path, A, 0), file_of(tmp_path, A, 1))
        assert found(store, A) == (1, "disk")
        assert (tier(store, "disk").figures.corrupt, unauthenticated(store)) == (1, 0)


def test_a_genuine_page_with_the_header_of_another_is_a_miss(tmp_path: Path) -> None:
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        store_a(store)
        genuine = file_of(tmp_path, A, 0).read_bytes()[:FRAMED_BYTES]
        header = bytearray(frame_page(A.key(2), "uint8", genuine[HEADER_BYTES:]))
        header[14:16], header[104:120] = genuine[14:16], genuine[104:120]
        plant(tmp_path, A, 2, bytes(header) + genuine[HEADER_BYTES:])
        assert found(store, A) == (2, "disk")
        assert (tier(store, "disk").figures.corrupt, unauthenticated(store)) == (1, 1)


def test_another_namespaces_page_is_a_miss(tmp_path: Path) -> None:
    """As a page of the same tokens by another model's weights would be."""
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        store_a(store)
        other = PageKey(b"o" * 32, A.hashes[0], A.group)
        genuine = PageHeader.unpack(file_of(tmp_path, A, 0).read_bytes())
        header = bytearray(frame_page(other, "uint8", body(A, 0), mac_of(OLD)))
        header[32:64] = genuine.key.namespace
        plant(tmp_path, A, 0, bytes(header) + body(A, 0))
        assert found(store, A) == (0, "")


def test_pages_of_before_the_key_are_misses(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as before:
        put(before, A)
        before.flush(30)
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        while any(store._tiers[0].may_have(key) for key in NAMES):
            for index in range(8):
                assert found(store, part(A, index, 8)) == (0, "")
        store_a(store)
        assert found(store, A) == (8, "disk")
    with tiered(disk=tmp_path) as keyless:
        assert found(keyless, A) == (8, "disk"), "who has no key goes by the checksum"


def test_keys_are_renewed_and_no_page_is_lost(tmp_path: Path) -> None:
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        store_a(store)
    with tiered(disk=tmp_path, page_mac_key=f"{NEW},{OLD}") as store:
        assert found(store, A) == (8, "disk")
        assert put(store, B, mac_of(OLD)) == (8, 0), "of a worker that has the old key still"
        store.flush(30)
    with tiered(disk=tmp_path, page_mac_key=NEW) as store:
        assert found(store, B) == (8, "disk"), "what was written meanwhile has a MAC under the new key"
        assert found(store, A) == (0, ""), "what was not must be gone after the old key"
        assert unauthenticated(store) >= 1


def test_puts_over_a_network_need_macs(tmp_path: Path) -> None:
    with tiered(page_mac_key=OLD) as store:
        assert put(store, A) == (0, 8)
        assert put(store, A, mac_of(NEW)) == (0, 8)
        assert store.stats().counts.corrupt == 16
        assert put(store, A, mac_of(OLD)) == (8, 0)


def test_pages_of_this_hosts_memory_need_no_mac_and_get_one_where_they_leave(tmp_path: Path) -> None:
    """Also where they bring one, which nobody has verified."""
    with tiered(disk=tmp_path, page_mac_key=OLD) as store:
        wanted, lease, _ = store.begin_put(A, BODY_BYTES, 0)
        assert lease is not None
        for index in wanted:
            page = bytearray(framed(A, index, mac=mac_of(OLD) if index % 2 else None))
            page[104:120] = os.urandom(16)
            with store.page_buffer(lease.id, index) as buffer:
                buffer.view[:] = page
                buffer.set_checksum(PageHeader.unpack(page).checksum)
        assert store.commit(lease.id) == (8, 0)
        store.flush(30)
        _, lookup = store.lookup(A, 0, pin=True)
        assert lookup is not None
        for index in range(8):
            with store.sendable_page(lookup.id, index) as sent:
                check_page(sent, A.key(index), mac=mac_of(OLD)).release()
        store.release([lookup.id])
        forget_memory(store)
        assert found(store, A) == (8, "disk")


def test_a_mac_that_went_bad_in_memory_is_made_anew() -> None:
    """Whoever gets such a page says that it is damaged, and asks again."""
    with tiered(page_mac_key=OLD) as store:
        put(store, A, mac_of(OLD))
        _, lookup = store.lookup(A, 0, pin=True)
        assert lookup is not None
        with store.sendable_page(lookup.id, 3) as page:
            page[110] ^= 1
        assert store.verify_page(lookup.id, 3), "its bytes are right"
        with store.sendable_page(lookup.id, 3) as page:
            check_page(page, A.key(3), mac=mac_of(OLD)).release()
        store.release([lookup.id])


@pytest.mark.parametrize("key_number", [b"\0\0", b"\1\1"], ids=["no MAC", "MAC of an unknown key"])
def test_a_check_of_a_page_leaves_the_mac_that_a_sender_writes_meanwhile(
    monkeypatch: pytest.MonkeyPatch, key_number: bytes
) -> None:
    with tiered(page_mac_key=OLD) as store, contextlib.ExitStack() as sending:
        put(store, A, mac_of(OLD))
        _, lookup = store.lookup(A, 0, pin=True)
        assert lookup is not None
        with store.page_view(lookup.id, 3) as page:
            page[14:16] = key_number
        sent: list[memoryview] = []
        verify = PageMac.verify

        def verify_then_send(mac: PageMac, *parts: Any) -> bool:
            """Between the check's look at the MAC and what follows from it, a sender begins."""
            authentic = verify(mac, *parts)
            if not sent:
                sent.append(sending.enter_context(store.sendable_page(lookup.id, 3)))
            return authentic

        monkeypatch.setattr(PageMac, "verify", verify_then_send)
        assert store.verify_page(lookup.id, 3)
        monkeypatch.undo()
        if not sent:  # the check found nothing to verify
            sent.append(sending.enter_context(store.sendable_page(lookup.id, 3)))
        check_page(bytes(sent[0]), A.key(3), mac=mac_of(OLD))
        store.release([lookup.id])

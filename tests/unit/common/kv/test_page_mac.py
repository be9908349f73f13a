"""MACs of pages: what they bind, whose keys count, and how keys are renewed."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from quire_common.errors import ConfigError
from quire_common.identity import watched_files
from quire_common.kv.page_mac import PageMac
from quire_common.pages import (
    HEADER_BYTES,
    PageHeader,
    PageKey,
    PageUnauthenticated,
    authenticate_page,
    check_page,
    copy_body,
    frame_page,
    remove_mac,
)
from quire_common.telemetry.metrics import registry

OLD, NEW, OTHER = "11" * 32, "22" * 32, "33" * 32
KEY = PageKey(b"n" * 32, b"h" * 32, 3)
BODY = bytes(range(250)) * 4


def mac_of(keys: str, file: str = "") -> PageMac:
    mac = PageMac.from_config(keys, file)
    assert mac is not None
    return mac


def page(mac: PageMac | None) -> bytes:
    return frame_page(KEY, "uint8", BODY, mac) + BODY


def accepts(mac: PageMac, framed: bytes, key: PageKey = KEY) -> bool:
    try:
        check_page(framed, key, "uint8", mac=mac)
    except PageUnauthenticated:
        return False
    return True


def test_without_keys_there_is_no_mac() -> None:
    assert PageMac.from_config("") is None
    assert PageHeader.unpack(page(None)).key_number == 0


def test_the_mac_is_the_one_that_others_make() -> None:
    """Pages of today are verified by the release of tomorrow, and by other workers."""
    header = PageHeader.unpack(page(mac_of(OLD)))
    covered = b"QKVP" + struct.pack("<HHIHH16s", 1, 128, 3, 1, 0, b"uint8") + KEY.namespace + KEY.hash
    covered += struct.pack("<Q16x", len(BODY)) + BODY
    assert header.mac == blake3(covered, key=b"\x11" * 32).digest(length=16)
    assert (header.key_number, header.mac.hex()) == (41833, "d12155f122d5f25c5589d8cc51a2df01")
    assert header.checksum == PageHeader.unpack(page(None)).checksum, "a MAC changes nothing else"


def test_only_a_key_holder_makes_pages_that_count() -> None:
    mac = mac_of(OLD)
    assert accepts(mac, page(mac))
    assert not accepts(mac, page(None)), "the checksum is right, and anybody can make it"
    assert not accepts(mac, page(mac_of(OTHER)))
    number = mac.key_number
    forged = replace(PageHeader.unpack(page(None)), key_number=number, mac=b"m" * 16)
    assert not accepts(mac, forged.pack() + BODY)
    check_page(page(mac), KEY)  # who has no keys goes by the checksum


@pytest.mark.parametrize(
    "other",
    [
        PageKey(b"N" * 32, KEY.hash, KEY.group),
        PageKey(KEY.namespace, b"H" * 32, KEY.group),
        PageKey(KEY.namespace, KEY.hash, 4),
    ],
)
def test_a_genuine_page_is_none_under_another_name(other: PageKey) -> None:
    """Who has no key, but has a page of ours, gives it another name, with a checksum that is right."""
    mac = mac_of(OLD)
    genuine = PageHeader.unpack(page(mac))
    renamed = bytearray(frame_page(other, "uint8", BODY))
    renamed[14:16], renamed[104:120] = genuine.key_number.to_bytes(2, "little"), genuine.mac
    check_page(renamed + BODY, other)
    assert not accepts(mac, bytes(renamed) + BODY, other)


def test_another_dtype_or_length_is_another_page() -> None:
    mac = mac_of(OLD)
    genuine = PageHeader.unpack(page(mac))
    for dtype, body in (("uint8", BODY[:-1]), ("uint8", BODY + b"x"), ("int8", BODY)):
        header = PageHeader.unpack(frame_page(KEY, dtype, body))
        forged = replace(header, key_number=genuine.key_number, mac=genuine.mac).pack() + body
        with pytest.raises(PageUnauthenticated):
            check_page(forged, KEY, mac=mac)


def test_a_mac_is_added_while_others_read() -> None:
    mac, framed = mac_of(OLD), bytearray(page(None))
    into = bytearray(len(BODY))
    before = bytes(framed[:HEADER_BYTES])
    authenticate_page(memoryview(framed)[:HEADER_BYTES], BODY, mac)
    assert bytes(framed) == page(mac)

    sums = {
        copy_body(head, np.frombuffer(BODY, np.uint8), memoryview(into)) for head in (before, framed[:HEADER_BYTES])
    }
    assert sums == {PageHeader.unpack(framed).checksum}
    remove_mac(memoryview(framed)[:HEADER_BYTES])
    assert bytes(framed) == page(None)


def test_a_page_that_has_a_mac_is_not_summed_again() -> None:
    mac, framed = mac_of(OLD), bytearray(page(mac_of(OLD)))
    framed[110] ^= 1
    spoilt = bytes(framed)
    authenticate_page(memoryview(framed)[:HEADER_BYTES], BODY, mac)
    assert bytes(framed) == spoilt


def test_keys_are_renewed_in_three_steps_and_no_page_is_lost() -> None:
    old, both, first, new = (mac_of(keys) for keys in (OLD, f"{OLD},{NEW}", f"{NEW}\n{OLD}\n", NEW))
    for maker, reader in ((old, both), (both, old), (both, first), (first, both), (first, new), (new, first)):
        assert accepts(reader, page(maker))
    assert not accepts(new, page(old))
    framed = bytearray(page(old))
    authenticate_page(memoryview(framed)[:HEADER_BYTES], BODY, first)
    assert accepts(new, bytes(framed)), "what is sent or written anew has a MAC under the first key"


def refusals() -> float:
    labels = {"what": "page MAC keys", "outcome": "refused"}
    return registry.get_sample_value("quire_reloads_total", labels) or 0.0


def test_keys_follow_their_file_and_a_bad_file_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "POLL_S", 0.02)
    monkeypatch.setattr(watched_files, "_watcher", watched_files._Watcher())  # that of other tests sleeps for a second
    file = tmp_path / "page_mac_key"
    file.write_text(OLD + "\n")
    mac = mac_of(OLD, str(file))
    framed, refused = page(mac), refusals()

    def write(text: str) -> None:
        file.write_text(text)
        past = time.time_ns() - int(10 * 1e9)
        os.utime(file, ns=(past, past))

    write("not a key")
    deadline = time.monotonic() + 30
    while refusals() == refused:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert accepts(mac, framed)
    write(f"{NEW} {OLD}")
    while accepts(mac_of(OLD), page(mac)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert accepts(mac, framed) and accepts(mac_of(NEW), page(mac))


@pytest.mark.parametrize("keys", ["secret", "11" * 31, "11" * 33, f"{OLD},{NEW[:-1]}", "zz" * 32, " , "])
def test_bad_keys_are_refused_at_the_start_and_not_told(keys: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PageMac.from_config(keys)
    assert caught.value.code == "BAD_PAGE_MAC_KEY" and "openssl rand -hex 32" in caught.value.fix
    assert keys not in str(caught.value)

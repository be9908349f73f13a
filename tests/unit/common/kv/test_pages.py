"""Page identity and framing: golden values, and that nothing wrong passes for right."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from quire_common.errors import InvalidArgument
from quire_common.kv.page_mac import PageMac
from quire_common.pages import (
    HEADER_BYTES,
    MediaSpan,
    PageCorrupt,
    PageExtras,
    PageHeader,
    PageKey,
    chain_hashes,
    check_page,
    check_parts,
    copy_body,
    frame_page,
    namespace_digest,
)

TOKENS = np.arange(100, 140, dtype=np.int32)
NAMESPACE = namespace_digest("demo", b"\x01" * 32, "float32", "kv_head.layer.kv.token.dim", 16)
KEY = PageKey(NAMESPACE, bytes(range(32)), 1)
MEDIA = PageExtras(media=(MediaSpan(b"m" * 32, 20, 9),))
BODY = np.arange(1000, dtype=np.float32)


def by_hand(parent: bytes, tokens: list[int], *extras: tuple[int, bytes]) -> bytes:
    """The definition, byte by byte, without the code under test."""
    data = (parent or bytes(32)) + struct.pack(f"<{len(tokens)}I", *tokens)
    for kind, payload in extras:
        data += bytes([kind]) + len(payload).to_bytes(4, "little") + payload
    return hashlib.sha256(data).digest()


def test_golden_values() -> None:
    """Other processes, and pages on disk, depend on these very bytes."""
    plain = [h.hex() for h in chain_hashes(TOKENS, 16)]
    assert plain == [
        "55d84b70612a6b5a0a14d30c43c16dfe4d95da819e947e62299c9f1ec3338cad",
        "a48d4726546b777007a12f1b303a953a5d7d7a92d53ee6a9ea8f2314dfa4497c",
    ]
    salted = chain_hashes(TOKENS, 16, PageExtras(adapter=b"\x02" * 32, salt="tenant"))
    assert salted[1].hex() == "76d060423ad5f65b94a859cbe0e177817d8e857daae1a87481ae3a013094621e"
    assert NAMESPACE.hex() == "e0c3472485f53b98a7411a4ba522032133d6086d69578a878e21983b82f69906"
    header = hashlib.sha256(frame_page(KEY, "float32", BODY)).hexdigest()
    assert header == "b0c7698c0690d608c2190255bcea4fb148b5352429f2d5b6e4da3cdcea33f6d2"


def test_the_chain_is_what_the_page_says() -> None:
    first = by_hand(b"", list(range(100, 116)), (1, b"\x02" * 32), (2, b"tenant"))
    second = by_hand(first, list(range(116, 132)))
    assert chain_hashes(TOKENS, 16, PageExtras(adapter=b"\x02" * 32, salt="tenant")) == [first, second]


def test_media_enters_every_page_it_touches() -> None:
    blob = b"\x07" * 32
    media = PageExtras(media=(MediaSpan(blob, start=10, length=20, offset=5),))
    first = by_hand(b"", list(range(100, 116)), (3, blob + struct.pack("<III", 10, 6, 5)))
    second = by_hand(first, list(range(116, 132)), (3, blob + struct.pack("<III", 0, 14, 11)))
    assert chain_hashes(TOKENS, 16, media) == [first, second]
    assert chain_hashes(TOKENS[16:], 16, media, parent=first, first_position=16) == [second]


@pytest.mark.parametrize("extras", [PageExtras(), PageExtras(salt="x"), MEDIA])
def test_a_chain_may_be_computed_in_pieces(extras: PageExtras) -> None:
    whole = chain_hashes(TOKENS, 8, extras)
    assert len(whole) == 5
    head = chain_hashes(TOKENS[:16], 8, extras)
    assert head + chain_hashes(TOKENS[16:], 8, extras, parent=head[-1], first_position=16) == whole


def test_only_full_pages_have_a_name() -> None:
    assert [len(chain_hashes(TOKENS[:n], 16)) for n in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


def test_what_differs_is_named_differently() -> None:
    changed = TOKENS.copy()
    changed[0] += 1
    blob = MediaSpan(b"m" * 32, 0, 4)
    variants = [
        (TOKENS, PageExtras()),
        (changed, PageExtras()),
        (TOKENS, PageExtras(salt="a")),
        (TOKENS, PageExtras(salt="b")),
        (TOKENS, PageExtras(adapter=b"a")),
        (TOKENS, PageExtras(adapter=b"a", salt="a")),
        (TOKENS, PageExtras(media=(blob,))),
        (TOKENS, PageExtras(media=(MediaSpan(b"m" * 32, 1, 4),))),
        (TOKENS, PageExtras(media=(MediaSpan(b"m" * 32, 0, 4, offset=1),))),
        (TOKENS, PageExtras(media=(blob, MediaSpan(b"n" * 32, 4, 1)))),
    ]
    lasts = [chain_hashes(tokens, 16, extras)[-1] for tokens, extras in variants]
    assert len(set(lasts)) == len(variants)


def test_lists_and_arrays_of_any_order_agree() -> None:
    assert chain_hashes(TOKENS.tolist(), 16) == chain_hashes(TOKENS, 16)
    assert chain_hashes(np.repeat(TOKENS, 2)[::2], 16) == chain_hashes(TOKENS, 16)


def test_a_namespace_depends_on_each_part() -> None:
    base = ("demo", b"d", "float32", "layout", 16)
    others = [
        ("dem", b"od", "float32", "layout", 16),
        ("x", *base[1:]),
        (*base[:4], 64),
        (*base[:2], "bf16", *base[3:]),
    ]
    digests = {namespace_digest(*arguments) for arguments in (base, *others)}
    assert len(digests) == 5


def test_a_framed_page_comes_back_without_a_copy() -> None:
    framed = bytearray(frame_page(KEY, "float32", BODY) + BODY.tobytes())
    body = check_page(framed, KEY, "float32", BODY.nbytes)
    assert np.array_equal(np.frombuffer(body, np.float32), BODY)
    framed[HEADER_BYTES] ^= 1
    assert body[0] == framed[HEADER_BYTES]
    body.release()


def test_an_empty_body_is_a_page() -> None:
    assert len(check_page(frame_page(KEY, "uint8", b""), KEY)) == 0


# What says of a MAC that there is one, and the MAC: who has no keys does not look there.
MAC_PLACES = {14, 15, *range(104, 120)}


@pytest.mark.parametrize("mac", [None, PageMac.from_config("ab" * 32)], ids=["no keys", "keys"])
def test_every_flipped_bit_is_noticed(mac: PageMac | None) -> None:
    framed = frame_page(KEY, "float32", BODY[:8], mac) + BODY[:8].tobytes()
    check_page(framed, KEY, mac=mac)
    for position in range(len(framed) * 8):
        broken = bytearray(framed)
        broken[position // 8] ^= 1 << position % 8
        if mac is None and position // 8 in MAC_PLACES:
            check_page(broken, KEY)
            continue
        with pytest.raises(PageCorrupt):
            check_page(broken, KEY, mac=mac)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 1000])
def test_a_cut_page_is_noticed(length: int) -> None:
    framed = frame_page(KEY, "float32", BODY) + BODY.tobytes()
    with pytest.raises(PageCorrupt):
        check_page(framed[:length], KEY)
    with pytest.raises(PageCorrupt):
        check_page(framed + b"\0", KEY)


def test_another_key_dtype_or_size_is_a_miss() -> None:
    framed = frame_page(KEY, "float32", BODY) + BODY.tobytes()
    for key in (PageKey(bytes(32), KEY.hash, 1), PageKey(NAMESPACE, bytes(32), 1), PageKey(NAMESPACE, KEY.hash, 0)):
        with pytest.raises(PageCorrupt, match="another key"):
            check_page(framed, key)
    with pytest.raises(PageCorrupt, match="bfloat16"):
        check_page(framed, KEY, "bfloat16")
    with pytest.raises(PageCorrupt, match="expected 8"):
        check_page(framed, KEY, "float32", 8)


def test_headers_pack_and_unpack() -> None:
    header = PageHeader.unpack(frame_page(KEY, "float32", BODY))
    assert (header.key, header.dtype, header.length) == (KEY, "float32", 4000)
    assert PageHeader.unpack(header.pack()) == header


def test_bad_parts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="31 bytes"):
        PageKey(bytes(31), bytes(32))
    with pytest.raises(InvalidArgument, match="group -1"):
        PageKey(bytes(32), bytes(32), -1)
    with pytest.raises(InvalidArgument, match="5 bytes"):
        chain_hashes(TOKENS, 16, parent=b"short")
    with pytest.raises(InvalidArgument, match="length 0"):
        MediaSpan(bytes(32), 0, 0)
    with pytest.raises(ValueError, match="longer than 16"):
        frame_page(KEY, "a_very_long_dtype_name", b"")


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 7, 1 << 20])
def test_a_copy_is_summed_as_it_is_made(size: int) -> None:
    body = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    into, head = bytearray(size), frame_page(KEY, "uint8", body)
    found = copy_body(head, body, memoryview(into))
    assert into == body.tobytes()
    check_parts(head, into, KEY, checksum=found)
    with pytest.raises(PageCorrupt, match="checksum"):
        check_parts(head, into, KEY, checksum=found ^ 1)

"""The identity of a KV page, and its framing on the way between processes. This module knows nothing of where pages are
stored.

Identity. A page's key is (namespace, H, group). Full pages have a hash, a partial last page has none:

    H_i = sha256(parent || tokens || extras)
    parent   32 bytes      H_{i-1}; 32 zero bytes for the first page of a sequence
    tokens   4 x page_size each token id as u32, little-endian
    extras   0 or more     each: type u8 | length u32 little-endian | payload
             type 1        adapter: digest of the LoRA's weights                       first page only
             type 2        salt: UTF-8 text that keeps tenants' pages apart            first page only
             type 3        media: sha256 of the blob (32) | start u32 | length u32 | offset u32
                           positions [start, start + length) of this page hold embeddings offset.. of the blob;
                           on every page that the blob touches, in order of start

Through the chain of hashes, adapter and salt affect every later page. The namespace contains page size, dtype and
layout, so one chain serves all pools of a page size. Ranks have no effect. There is no random seed, so all processes
compute the same hashes.

Framing. A page that leaves a worker is a header of 128 bytes and the body. Little-endian:

      0   4  magic "QKVP"          16  16  dtype, ASCII, zero-padded       96   8  body length, u64
      4   2  version, 1            32  32  namespace                      104  16  MAC, or zero
      6   2  header length, 128    64  32  H                              120   8  checksum, u64
      8   4  group, u32
     12   2  checksum algorithm: 1 = xxh3-64
     14   2  number of the MAC's key, or zero

Checksum and MAC both cover the body and bytes [0, 120), in which the MAC and its key's number count as zeros. So a page
can get a MAC later, while other processes read it. The checksum finds accidental damage. The MAC (see PageMac) also
finds pages that were made, changed or renamed without the cluster's key.

A page that does not match raises PageCorrupt. Callers treat it as a miss, and compute the page again.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from quire_common.kv.page_mac import PageMac

    PageBytes = Buffer | NDArray[Any]  # anything that memoryview takes

HASH_BYTES = 32
HEADER_BYTES = 128
VERSION = 1
XXH3_64 = 1
_MAGIC = b"QKVP"
_NO_PARENT = bytes(HASH_BYTES)
_ADAPTER, _SALT, _MEDIA = 1, 2, 3
_EXTRA = struct.Struct("<BI")
_MEDIA_PAYLOAD = struct.Struct("<32sIII")
_HEADER = struct.Struct("<4sHHIHH16s32s32sQ16s")  # all but the checksum
_CHECKSUM = struct.Struct("<Q")
_KEY_NUMBER = struct.Struct("<H")
_KEY_NUMBER_AT, _MAC_AT = 14, 104
_NO_MAC = bytes(16)
# What is copied and summed at once: it is in the nearest cache still.
_PIECE_BYTES = 256 << 10


class PageCorrupt(Exception):  # reads as the fact it is; callers turn it into a miss, never into an answer
    """A page is not what its key says: a miss."""


class PageUnauthenticated(PageCorrupt):
    """A page has no MAC under one of the cluster's keys."""


@dataclass(frozen=True)
class MediaSpan:
    """Positions [start, start + length) of a sequence hold embeddings from `offset` on of the blob with this sha256."""

    digest: bytes
    start: int
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        if len(self.digest) != HASH_BYTES or self.start < 0 or self.length <= 0 or self.offset < 0:
            raise InvalidArgument(
                "BAD_MEDIA_SPAN",
                f"A media span has a digest of {len(self.digest)} bytes, start {self.start}, length {self.length}.",
                "Send a sha256 digest and positions of the prompt.",
            )


@dataclass(frozen=True)
class PageExtras:
    """The data that distinguish pages beside their tokens. Media positions are absolute."""

    adapter: bytes = b""
    salt: str = ""
    media: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True)
class PageKey:
    """The name of one page."""

    namespace: bytes
    hash: bytes
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.namespace) != HASH_BYTES or len(self.hash) != HASH_BYTES or not 0 <= self.group < 1 << 32:
            raise InvalidArgument(
                "BAD_PAGE_KEY",
                f"A page key has a namespace of {len(self.namespace)} bytes, a hash of {len(self.hash)} bytes and "
                f"group {self.group}.",
                "Send 32 bytes, 32 bytes and a small number.",
            )


@dataclass(frozen=True)
class PageRun:
    """Pages of one chain in prefix order, within one namespace and group."""

    namespace: bytes
    group: int
    hashes: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.hashes)

    def key(self, index: int) -> PageKey:
        """The key of one page; raises InvalidArgument if a part of it is malformed."""
        return PageKey(self.namespace, self.hashes[index], self.group)

    def keys(self) -> tuple[PageKey, ...]:
        """All keys; raises InvalidArgument if a part of one is malformed."""
        return tuple(PageKey(self.namespace, digest, self.group) for digest in self.hashes)


NO_EXTRAS = PageExtras()


def chain_hashes(
    token_ids: NDArray[np.int32] | Sequence[int],
    page_size: int,
    extras: PageExtras = NO_EXTRAS,
    parent: bytes = b"",
    first_position: int = 0,
) -> list[bytes]:
    """Return the hash of every full page of the tokens, 32 bytes each; a partial last page has none. Adapter and salt
    of `extras` enter the hash of the first page of all, and media those of the pages that they cover. To continue a
    chain, pass the tokens after the page `parent`; the first of them is at `first_position` of the sequence. Adapter
    and salt are not used then. Raises InvalidArgument for a parent that is neither empty nor 32 bytes long."""
    if len(parent) not in (0, HASH_BYTES):
        raise InvalidArgument("BAD_PAGE_KEY", f"A parent hash has {len(parent)} bytes.", "Send 32 bytes or none.")
    data = np.asarray(token_ids, dtype="<i4").tobytes()
    page_bytes = 4 * page_size
    starts = range(0, len(data) - page_bytes + 1, page_bytes)
    first = b"" if parent else _first_page_extras(extras)
    media = _media_extras(extras.media, first_position, page_size, len(starts))
    sha256, hashes, last = hashlib.sha256, [], parent or _NO_PARENT
    if not first and not media:
        for start in starts:
            last = sha256(last + data[start : start + page_bytes]).digest()
            hashes.append(last)
        return hashes
    for index, start in enumerate(starts):
        extra = (first if index == 0 else b"") + media.get(index, b"")
        last = sha256(last + data[start : start + page_bytes] + extra).digest()
        hashes.append(last)
    return hashes


def namespace_digest(architecture: str, model_digest: bytes, kv_dtype: str, layout: str, page_size: int) -> bytes:
    """Return the namespace of a pool, 32 bytes: sha256 over the prefix "quire namespace 1" and the length-framed
    arguments. `architecture` is the Hugging Face architecture, for example LlamaForCausalLM, and no argument is the
    name that clients use. `model_digest` covers weights and config."""
    digest = hashlib.sha256(b"quire namespace 1")
    for field in (architecture.encode(), model_digest, kv_dtype.encode(), layout.encode(), str(page_size).encode()):
        digest.update(struct.pack("<I", len(field)) + field)
    return digest.digest()


@dataclass(frozen=True)
class PageHeader:
    """The contents of the first 128 bytes of a framed page."""

    key: PageKey
    dtype: str
    length: int
    checksum: int
    algorithm: int = XXH3_64
    key_number: int = 0
    mac: bytes = _NO_MAC

    def pack(self) -> bytes:
        """The bytes; checksum and MAC are taken as they are (see `frame_page`)."""
        return _pack(self) + _CHECKSUM.pack(self.checksum)

    @classmethod
    def unpack(cls, framed: PageBytes) -> PageHeader:
        """Decode the header at the beginning of a framed page. Raises PageCorrupt if it is too short, it is no header
        of this version, its checksum algorithm is unknown, or its dtype is not ASCII. The body is not looked at."""
        view = _bytes(framed)
        if len(view) < HEADER_BYTES:
            raise PageCorrupt(f"{len(view)} bytes are not a page header")
        magic, version, size, group, algorithm, key_number, dtype, namespace, digest, length, mac = _HEADER.unpack_from(
            view
        )
        if (magic, version, size) != (_MAGIC, VERSION, HEADER_BYTES):
            raise PageCorrupt("not a page header of version 1")
        if algorithm != XXH3_64:
            raise PageCorrupt(f"checksum algorithm {algorithm} is unknown")
        try:
            name = dtype.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            raise PageCorrupt("the dtype is not ASCII") from None
        (checksum,) = _CHECKSUM.unpack_from(view, _HEADER.size)
        return cls(PageKey(namespace, digest, group), name, length, checksum, algorithm, key_number, mac)


def frame_page(key: PageKey, dtype: str, body: PageBytes, mac: PageMac | None = None) -> bytes:
    """Return the header of a page with this body, with a MAC if `mac` is given. The framed page is the header followed
    by the body. Raises ValueError for a dtype that is not ASCII or has more than 16 characters."""
    view = _bytes(body)
    head = bytearray(PageHeader(key, dtype, len(view), 0).pack())
    _CHECKSUM.pack_into(head, _HEADER.size, _checksum(_covered(head), view))
    if mac is not None:
        authenticate_page(memoryview(head), view, mac)
    return bytes(head)


def authenticate_page(head: memoryview, body: PageBytes, mac: PageMac) -> None:
    """Write the page's MAC under the first key into its header, unless the header names that key already. Other threads
    may read the page or do the same at the same time. So the key's number, which says that there is a MAC, is written
    last."""
    if _KEY_NUMBER.unpack_from(head, _KEY_NUMBER_AT)[0] == mac.key_number:
        return
    _write_mac(head, body, mac)


def repair_mac(head: memoryview, body: PageBytes, mac: PageMac) -> None:
    """Replace a MAC that is wrong or of an unknown key, in the header of a page whose checksum was verified, by one
    under the first key. A page without a MAC stays without one. Other threads may read the page or write its MAC at the
    same time: all of them write the same bytes, and none removes the MAC of a page that is being sent."""
    if _KEY_NUMBER.unpack_from(head, _KEY_NUMBER_AT)[0] and not is_authentic(head, body, mac):
        _write_mac(head, body, mac)


def split_page(framed: memoryview) -> tuple[memoryview, memoryview]:
    """Return views of the header and the body of a framed page."""
    return framed[:HEADER_BYTES], framed[HEADER_BYTES:]


def is_authentic(head: PageBytes, body: PageBytes, mac: PageMac) -> bool:
    """Return whether the page's MAC is right under the key that its header names; False if it has no MAC, or one of an
    unknown key."""
    head = _bytes(head)
    (number,) = _KEY_NUMBER.unpack_from(head, _KEY_NUMBER_AT)
    return mac.verify(number, bytes(head[_MAC_AT : _HEADER.size]), _covered(head), _bytes(body))


def remove_mac(head: memoryview) -> None:
    """Remove the MAC from a header, since nobody has verified it. No other thread may read the header meanwhile."""
    _KEY_NUMBER.pack_into(head, _KEY_NUMBER_AT, 0)
    head[_MAC_AT : _HEADER.size] = _NO_MAC


def check_page(
    framed: PageBytes, key: PageKey, dtype: str = "", length: int | None = None, mac: PageMac | None = None
) -> memoryview:
    """Return the body of a framed page as a view, without a copy. Raises PageCorrupt unless header and checksum match
    the key and, if given, `dtype` and `length`. Raises PageUnauthenticated unless `mac`, if given, verifies the
    page."""
    view = _bytes(framed)
    body = view[HEADER_BYTES:]
    check_parts(view[:HEADER_BYTES], body, key, dtype, length, mac=mac)
    return body


def check_parts(
    head: PageBytes,
    body: PageBytes,
    key: PageKey,
    dtype: str = "",
    length: int | None = None,
    checksum: int | None = None,
    mac: PageMac | None = None,
) -> None:
    """Raise PageCorrupt unless header and body, which are separate buffers, are the page of the key; see `check_page`.
    `checksum` is the result of `copy_body`, if that copied the body."""
    head, body = _bytes(head), _bytes(body)
    header = PageHeader.unpack(head)
    if header.key != key:
        raise PageCorrupt("the page carries another key")
    if dtype and header.dtype != dtype:
        raise PageCorrupt(f"the page holds {header.dtype}, not {dtype}")
    if header.length != len(body) or (length is not None and length != len(body)):
        raise PageCorrupt(f"the page has {len(body)} bytes, its header says {header.length}, expected {length}")
    if header.checksum != (_checksum(_covered(head), body) if checksum is None else checksum):
        raise PageCorrupt("the checksum does not match")
    if mac is not None and not is_authentic(head, body, mac):
        raise PageUnauthenticated("the page has no MAC under a key of --page-mac-key")


def copy_body(head: PageBytes, source: NDArray[np.uint8], into: memoryview) -> int:
    """Copy a body into memory of equal length, and return the checksum of the copy under this header. Works piece by
    piece, so that each is summed while it is in the cache. Other threads run meanwhile."""
    target = np.frombuffer(into, np.uint8)
    state = xxhash.xxh3_64(_covered(_bytes(head)))
    for start in range(0, len(target), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        np.copyto(piece, source[start : start + _PIECE_BYTES])
        state.update(piece.data)
    return int(state.intdigest())


def _bytes(data: PageBytes) -> memoryview:
    return memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy's stubs know of buffers from 3.12 on


def _pack(header: PageHeader) -> bytes:
    """Pack a page's header, all 120 bytes before the checksum. Raises ValueError for a dtype that is not ASCII or has
    more than 16 characters."""
    name, key = header.dtype.encode("ascii"), header.key
    if len(name) > 16:
        raise ValueError(f"the dtype name {header.dtype!r} is longer than 16 bytes")
    return _HEADER.pack(
        _MAGIC,
        VERSION,
        HEADER_BYTES,
        key.group,
        header.algorithm,
        header.key_number,
        name,
        key.namespace,
        key.hash,
        header.length,
        header.mac,
    )


def _write_mac(head: memoryview, body: PageBytes, mac: PageMac) -> None:
    """Write the MAC under the first key into a header. The key's number is written last."""
    number, made = mac.make(_covered(head), _bytes(body))
    head[_MAC_AT : _HEADER.size] = made
    _KEY_NUMBER.pack_into(head, _KEY_NUMBER_AT, number)


def _covered(head: Buffer) -> bytes:
    """Return the bytes of a header that checksum and MAC cover: all up to the checksum, with the MAC and its key's
    number as zeros."""
    covered = bytearray(memoryview(head)[: _HEADER.size])
    remove_mac(memoryview(covered))
    return bytes(covered)


def _checksum(head: Buffer, body: Buffer) -> int:
    """Return the XXH3-64 of a header's bytes and a page's body in a row."""
    state = xxhash.xxh3_64(head)
    state.update(body)
    return int(state.intdigest())


def _extra(kind: int, payload: bytes) -> bytes:
    return _EXTRA.pack(kind, len(payload)) + payload


def _first_page_extras(extras: PageExtras) -> bytes:
    adapter = _extra(_ADAPTER, extras.adapter) if extras.adapter else b""
    return adapter + (_extra(_SALT, extras.salt.encode()) if extras.salt else b"")


def _media_extras(spans: Iterable[MediaSpan], first_position: int, page_size: int, pages: int) -> dict[int, bytes]:
    """Return, by page index, the bytes that enter the page's hash for the media on it, in order of start. Only the
    first `pages` pages count; the first of them begins at `first_position`. A page without media has no entry."""
    frames: dict[int, bytes] = {}
    for span in sorted(spans, key=lambda span: span.start):
        begin, end = span.start - first_position, span.start + span.length - first_position
        for page in range(max(begin, 0) // page_size, min(-(-end // page_size), pages)):
            low, high = max(begin, page * page_size), min(end, (page + 1) * page_size)
            payload = _MEDIA_PAYLOAD.pack(span.digest, low - page * page_size, high - low, span.offset + low - begin)
            frames[page] = frames.get(page, b"") + _extra(_MEDIA, payload)
    return frames

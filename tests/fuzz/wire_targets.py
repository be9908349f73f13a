"""Targets: headers of KV pages and of data frames, which are read before anything of them is known to be right."""

from __future__ import annotations

import random

from quire_common.kv_data.frame import (
    HEAD_BYTES,
    HELLO_BYTES,
    DataConnectionError,
    FrameKind,
    Head,
    pack_places,
    unpack_hello,
    unpack_places,
)
from quire_common.pages import HEADER_BYTES, PageCorrupt, PageHeader, PageKey, check_page, frame_page
from tests.fuzz.changes.byte_changes import NUMBERS_64, changed_bytes
from tests.fuzz.target import Finding, Outcome, Target


class PageTarget(Target):
    """A framed KV page: its header, checked against its key. Half of the changes make the checksum right again."""

    covers = ("common/quire_common/pages.py",)

    def seeds(self) -> list[bytes]:
        return [frame_page(self._key, "bfloat16", body) + body for body in (bytes(64), b"", bytes(range(256)))]

    @property
    def _key(self) -> PageKey:
        return PageKey(b"n" * 32, b"h" * 32, 1)

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        body = data[HEADER_BYTES:]
        match choose.randrange(4):
            case 0:
                return changed_bytes(data, choose)
            case 1:
                body = changed_bytes(body, choose)
                return data[:HEADER_BYTES] + body
            case 2:
                group = choose.choice((0, 1, 2**32 - 1))
                key = PageKey(choose.choice((b"n", b"m")) * 32, choose.choice((b"h", b"i")) * 32, group)
                return frame_page(key, choose.choice(("bfloat16", "", "int8")), body) + body
            case _:
                at = choose.randrange(8, HEADER_BYTES)
                return data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :]

    def run(self, data: bytes) -> Outcome:
        try:
            header = PageHeader.unpack(data[:HEADER_BYTES])
        except PageCorrupt:
            return Outcome.UNREADABLE
        if header.pack() != data[:HEADER_BYTES]:
            raise Finding("a header that was read packs to other bytes")
        try:
            check_page(data, self._key, "bfloat16")
        except PageCorrupt:
            return Outcome.REFUSED
        return Outcome.ACCEPTED


class FrameTarget(Target):
    """The head of a data frame, the places of a SHOWN payload, and a greeting. The first byte says which."""

    covers = ("common/quire_common/kv_data/frame.py",)

    def seeds(self) -> list[bytes]:
        heads = [Head(kind, b"h" * 16, 3, 128, 64, last=True, page_header=b"p" * 128).pack() for kind in FrameKind]
        places = pack_places([(64, b"p" * 128), (4096, b"q" * 128)])
        return [*(b"\0" + head for head in heads), b"\1" + places, b"\2QKVD\1\0\0\0" + bytes(16)]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        if data[:1] != b"\0" or choose.random() < 0.2:
            return data[:1] + changed_bytes(data[1:], choose)
        number = choose.choice(NUMBERS_64)
        kind = choose.choice(list(FrameKind))
        length = min(number, choose.choice((number, 4 << 20, 1 << 20))) & 0xFFFFFFFF
        return (
            b"\0" + Head(kind, choose.randbytes(16), number & 0xFFFFFFFF, number, length, choose.random() < 0.5).pack()
        )

    def run(self, data: bytes) -> Outcome:
        body = data[1:]
        try:
            match data[:1]:
                case b"\1":
                    unpack_places(body)
                case b"\2":
                    unpack_hello(body[:HELLO_BYTES].ljust(HELLO_BYTES, b"\0"))
                case _:
                    head = Head.unpack(body[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"))
                    if head.pack() != body[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"):
                        raise Finding("a head that was read packs to other bytes")
        except DataConnectionError as error:
            return Outcome.UNREADABLE if error.reason == "garbage" else Outcome.REFUSED
        return Outcome.ACCEPTED

"""What engine and KV transfer agent say to each other, and what the KV transfer agent is set up with."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest

from quire_common.credit import KvGroup, MoveKind, PageGeometry, PageMove
from quire_common.errors import ConfigError
from quire_common.sequence import RequestContext
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.wire import AgentFrameKind, pack_move, unpack_move
from quire_worker.side_process.frames import MAX_FRAME_BYTES, Frame, FrameReader, WireError

MOVE = PageMove(
    1 << 40, MoveKind.LOAD, 2, np.array([3, 4], np.int32), (b"a" * 32, b"b" * 32), b"lease",
    context=RequestContext("r1", 2, "tenant", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)  # fmt: skip
FRAMES = [
    Frame(AgentFrameKind.READY),
    Frame.of(AgentFrameKind.FILLED, 7, 1 << 40, [0, 5, 1, 6]),
    pack_move(MOVE, 3, 5, 12345),
    Frame.of(AgentFrameKind.RETURNED, 0, 0, []),
    Frame(AgentFrameKind.SETUP, payload=b"x" * 5000),
]


def geometry(page_bytes: int) -> PageGeometry:
    return PageGeometry(16, (KvGroup("full", page_bytes, "layout", "float32", 1, 1, 1),), b"n" * 32)


def test_frames_arrive_however_they_are_cut() -> None:
    data = b"".join(frame.pack() for frame in FRAMES)
    cut = random.Random(1)
    for _ in range(50):
        reader, frames, rest = FrameReader(AgentFrameKind), [], data
        while rest:
            size = cut.choice((1, 2, 3, 17, 4000))
            frames += reader.feed(rest[:size])
            rest = rest[size:]
        assert frames == FRAMES


def test_columns_and_moves_are_what_they_were() -> None:
    assert FRAMES[1].numbers() == [0, 5, 1, 6] and FRAMES[1].pairs() == [(0, 5), (1, 6)]
    move, submitted_ns = unpack_move(FRAMES[2])
    assert submitted_ns == 12345 and (FRAMES[2].generation, FRAMES[2].subject, move.id) == (3, 5, 5)
    assert move.device_page.tolist() == [3, 4]
    for each in fields(MOVE):
        if each.name not in ("id", "device_page", "source_page"):
            assert getattr(move, each.name) == getattr(MOVE, each.name), each.name


@pytest.mark.parametrize(
    "data",
    [
        (0).to_bytes(4, "little") + bytes(20),
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        (13).to_bytes(4, "little") + bytes([99]) + bytes(12),
    ],
)
def test_what_is_no_frame_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader(AgentFrameKind).feed(data)


def test_columns_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(WireError):
        Frame(AgentFrameKind.RELEASED, payload=b"abc").numbers()
    with pytest.raises(WireError):
        Frame.of(AgentFrameKind.FILLED, 0, 0, [1, 2, 3]).pairs()
    for numbers in ([], [1, 2]):
        with pytest.raises(WireError, match=f"{len(numbers)} numbers in KEPT"):
            Frame.of(AgentFrameKind.KEPT, 0, 0, numbers).number()
    assert Frame.of(AgentFrameKind.KEPT, 0, 0, [3]).number() == 3


@pytest.mark.parametrize(
    ("ring_bytes", "page_bytes", "slots"),
    [(0, 16, 64), (0, 2 << 20, 64), (0, 8 << 20, 32), (0, 1 << 30, 2), (1 << 20, 4096, 256), (1 << 20, 5000, 128)],
)
def test_the_ring_is_as_large_as_asked(ring_bytes: int, page_bytes: int, slots: int) -> None:
    config = WorkerConfig(kvstore="h:1", tls_ca="ca.pem", log_level="error", mover_ring_bytes=ring_bytes)
    setup = AgentSetup.of(config, geometry(page_bytes), peer_hosts=("10.0.0.7",))
    assert setup.slots == slots and setup.peer_hosts == ("10.0.0.7",)
    assert [*setup.load_slots, *setup.store_slots] == list(range(slots)) and setup.load_slots and setup.store_slots
    assert AgentSetup.from_json(setup.to_json()) == setup
    assert (setup.service_config().tls_ca, setup.log_level, setup.kvstore) == ("ca.pem", "error", "h:1")


def test_a_ring_without_room_for_two_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="8191 bytes") as error:
        AgentSetup.of(WorkerConfig(mover_ring_bytes=8191), geometry(100))
    assert error.value.code == "MOVER_RING_TOO_SMALL" and "8192" in error.value.fix


def test_two_maps_of_a_ring_are_one_memory() -> None:
    ring = Ring.create(5000, 3)
    other = Ring(ring.fd, 5000, 3)
    try:
        for slot in range(3):
            ring.slot(slot)[:] = bytes([slot + 1]) * 5000
        assert [bytes(other.slot(slot)) for slot in range(3)] == [bytes([slot + 1]) * 5000 for slot in range(3)]
        ring.cancellations += 7
        assert other.cancellations == 7 and bytes(other.slot(2)) == bytes([3]) * 5000
        for wrong in (-1, 3):
            with pytest.raises(IndexError):
                ring.slot(wrong)
    finally:
        other.fd = -1  # the descriptor is the first one's
        ring.close()
        ring.close()

"""A consumer of vLLM's KV events, written from its description alone: shares no code with the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

LIMIT_MS = 60_000


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(KVEventBatch)
decode = _decoder.decode


class Subscriber:
    """SUB for what comes, DEALER for what was missed (REQ takes but one answer). `last` is the number heard last."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.last = -1
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self.context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay = self.context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self._topic = topic.encode()

    def next(self, timeout_ms: int = LIMIT_MS) -> tuple[int, KVEventBatch]:
        if not self._sub.poll(timeout_ms):
            raise TimeoutError
        topic, number, payload = self._sub.recv_multipart()
        assert topic == self._topic
        self.last = int.from_bytes(number, "big")
        return self.last, decode(payload)

    def joined(self, publish: Callable[[bytes], bool], payload: bytes) -> None:
        """Publish until something arrives: who subscribes late misses the beginning; and take all of it."""
        deadline = time.monotonic() + LIMIT_MS / 1000
        while not self._sub.poll(20):
            assert time.monotonic() < deadline
            publish(payload)
        while self._sub.poll(200):
            self.next()

    def replay(self, first: int) -> list[tuple[int, KVEventBatch]]:
        """One question, framed as a REQ socket does, and answers until the end's mark."""
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, KVEventBatch]] = []
        while True:
            if not self._replay.poll(LIMIT_MS):
                raise TimeoutError
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), decode(payload)))

    def close(self) -> None:
        self.context.destroy(linger=0)

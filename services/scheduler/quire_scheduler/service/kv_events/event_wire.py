"""Page events as vLLM's consumers decode them: msgpack arrays, tagged by their first element.

    EventBatch        [ts, events, data_parallel_rank]
    BlockStored       ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                       lora_name, extra_keys, group_idx]
    BlockRemoved      ["BlockRemoved", block_hashes, medium, group_idx]
    AllBlocksCleared  ["AllBlocksCleared"]

Hashes are the low 64 bits of ours as unsigned integers, which is vLLM's default. group_idx is told only where a model
has several KV groups; lora_id, lora_name and extra_keys are null.
"""

from __future__ import annotations

import sys
import time
from array import array
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from quire_scheduler.kv.page_names import PageEvent, Removed, Stored

_DEVICE_TIER = "GPU"
_LOW = (1 << 64) - 1


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks that are now held, one after the other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks that are no longer held."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Nothing is held."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What is sent at once."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventWire:
    """For one model: `groups` KV groups, pages of `page_size` tokens."""

    def __init__(self, page_size: int, groups: int) -> None:
        self._page_size = page_size
        self._several = groups > 1
        self._encoder = msgspec.msgpack.Encoder()

    def changes(self, events: Iterable[PageEvent]) -> bytes:
        """A batch of changes, in their order."""
        return self._batch(self._change(events))

    def snapshot(self, stored: Iterable[Stored]) -> bytes:
        """A batch of what is held."""
        return self._batch(map(self._stored, stored))

    def cleared(self) -> bytes:
        """A batch that says that nothing is held."""
        return self._batch([AllBlocksCleared()])

    def _change(self, events: Iterable[PageEvent]) -> Iterator[BlockStored | BlockRemoved]:
        for event in events:
            yield from map(self._removed, event.removed)
            yield from map(self._stored, event.stored)

    def _stored(self, chain: Stored) -> BlockStored:
        """Convert a chain of named pages to vLLM's event."""
        tokens = array("i", chain.tokens)
        if sys.byteorder == "big":
            tokens.byteswap()
        return BlockStored(
            block_hashes=list(map(_number, chain.hashes)),
            parent_block_hash=_number(chain.parent) if chain.parent else None,
            token_ids=tokens.tolist(),
            block_size=self._page_size,
            lora_id=None,
            medium=_DEVICE_TIER,
            lora_name=None,
            group_idx=chain.group if self._several else None,
        )

    def _removed(self, pages: Removed) -> BlockRemoved:
        return BlockRemoved(list(map(_number, pages.hashes)), _DEVICE_TIER, pages.group if self._several else None)

    def _batch(self, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> bytes:
        return self._encoder.encode(EventBatch(time.time(), list(events), 0))


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big") & _LOW

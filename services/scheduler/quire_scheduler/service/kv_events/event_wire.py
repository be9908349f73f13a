"""Encodes page events in the form that vLLM's consumers decode: msgpack arrays, tagged by their first element.

    EventBatch        [ts, events, data_parallel_rank]
    BlockStored       ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                       lora_name, extra_keys, group_idx]
    BlockRemoved      ["BlockRemoved", block_hashes, medium, group_idx]
    AllBlocksCleared  ["AllBlocksCleared"]

A hash is the low 64 bits of the page's hash as an unsigned integer, which is vLLM's default. group_idx is null unless
the model has several KV groups; lora_id, lora_name and extra_keys are always null. ts is in seconds since the Unix
epoch, and data_parallel_rank is always 0.
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
    """A chain of blocks that are now held."""

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
    """An event that says that no blocks are held."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventWire:
    """Encodes the events of one model, which has `groups` KV groups and pages of `page_size` tokens."""

    def __init__(self, page_size: int, groups: int) -> None:
        self._page_size = page_size
        self._several = groups > 1
        self._encoder = msgspec.msgpack.Encoder()

    def changes(self, events: Iterable[PageEvent]) -> bytes:
        """Encode a batch of changes, in their order."""
        return self._batch(self._change(events))

    def snapshot(self, stored: Iterable[Stored]) -> bytes:
        """Encode a batch of pages that are held."""
        return self._batch(map(self._stored, stored))

    def cleared(self) -> bytes:
        """Encode a batch that says that no pages are held."""
        return self._batch([AllBlocksCleared()])

    def _change(self, events: Iterable[PageEvent]) -> Iterator[BlockStored | BlockRemoved]:
        """Yield vLLM's events for these changes, in order; of each change, the removed pages come first."""
        for event in events:
            yield from map(self._removed, event.removed)
            yield from map(self._stored, event.stored)

    def _stored(self, chain: Stored) -> BlockStored:
        """Convert a chain of named pages to vLLM's event: hashes as 64-bit numbers, token ids, the page size and the
        medium GPU. The parent is None for the first page of a sequence. The group is None if the model has only one."""
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

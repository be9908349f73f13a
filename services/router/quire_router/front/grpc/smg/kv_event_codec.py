"""Converts a scheduler's page events to SMG's KvEventBatch.

The hash of a block is the first eight bytes of its page's hash, as the signed integer of the contract. Sequence numbers
are those of the scheduler. A snapshot is one batch that begins with Cleared, so that a subscriber replaces its whole
state by it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2 as cb

from quire_common.columns import i32

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.v1 import common_pb2 as pb
    from quire_router.placement.load import Load

_TIERS = {"device": cb.KV_CACHE_TIER_DEVICE, "ram": cb.KV_CACHE_TIER_HOST, "disk": cb.KV_CACHE_TIER_DISK}


def tail_batch(frame: pb.PageEvents, page_size: int) -> cb.KvEventBatch:
    """Convert a frame of changes to a batch with the frame's sequence number: a clear if the frame has one, then the
    pages that the device has removed, by KV group, then stored pages. A frame without changes gives a batch without
    events. The order does not matter for a page, since no page is both removed and stored in a frame."""
    events = [cb.KvCacheEvent(event_id=frame.sequence, cleared=cb.KvCacheCleared())] if frame.cleared else []
    gone = [(0, list(frame.removed)), *((removed.group, list(removed.hashes)) for removed in frame.removed_pages)]
    for group, hashes in gone:
        if hashes:
            removed = cb.KvBlocksRemoved(
                block_hashes=list(map(block_hash, hashes)), tier=cb.KV_CACHE_TIER_DEVICE, group_idx=group
            )
            events.append(cb.KvCacheEvent(event_id=frame.sequence, removed=removed))
    events += _stored_events(frame.stored, page_size, frame.sequence)
    return cb.KvEventBatch(sequence_number=frame.sequence, timestamp=time.time(), events=events, dp_rank=0)


def snapshot_batch(frames: Iterable[pb.PageEvents], page_size: int) -> cb.KvEventBatch:
    """Convert all frames of a snapshot to one batch that begins with Cleared. The batch has the last frame's sequence
    number (0 without frames), and says how many blocks it stores."""
    events, sequence = [cb.KvCacheEvent(cleared=cb.KvCacheCleared())], 0
    for frame in frames:
        sequence = frame.sequence
        events += _stored_events(frame.stored, page_size, 0)
    blocks = sum(len(event.stored.blocks) for event in events)
    return cb.KvEventBatch(
        sequence_number=sequence,
        timestamp=time.time(),
        events=events,
        dp_rank=0,
        snapshot=cb.KvSnapshotChunk(index=0, count=1, blocks=blocks),
    )


def engine_load(load: Load, sample: int, *, load_only: bool = False) -> cb.EngineLoad:
    """Convert a scheduler's load to SMG's EngineLoad. `token_usage` is the share of pages that are not free, and
    `active_token_usage` the share that requests hold. `sample` numbers the loads of a stream; `load_only`: the batch
    has no events."""
    used = 1 - load.free_pages / load.pages if load.pages else 0.0
    active = load.referenced_pages / load.pages if load.pages else 0.0
    return cb.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_prefill_tokens,
        token_usage=used,
        active_token_usage=active,
        gen_throughput=load.decode_tokens_per_s,
        max_running_requests=load.max_num_seqs,
        sample=sample,
        load_only=load_only,
    )


def block_hash(digest: bytes) -> int:
    """Return the first 64 bits of a page's hash, as the signed integer that the contract has."""
    return int.from_bytes(digest[:8], "little", signed=True)


def _stored_events(chains: Iterable[pb.StoredPages], page_size: int, event_id: int) -> list[cb.KvCacheEvent]:
    """Convert stored pages to events, one for each chain, with its parent's hash, if it has a parent, and the hash and
    `page_size` token ids of every page. The chain's medium decides the tier; an unknown medium is the external tier."""
    events = []
    for chain in chains:
        tokens = i32(chain.token_ids, "token_ids").tolist()
        blocks = [
            cb.KvBlock(
                block_hash=block_hash(digest),
                token_ids=tokens[number * page_size : (number + 1) * page_size],
                block_size=page_size,
            )
            for number, digest in enumerate(chain.hashes)
        ]
        stored = cb.KvBlocksStored(
            blocks=blocks,
            parent_block_hash=block_hash(chain.parent) if chain.parent else None,
            tier=_TIERS.get(chain.medium, cb.KV_CACHE_TIER_EXTERNAL),
            medium=chain.medium,
            group_idx=chain.group,
            locality=cb.KV_CACHE_LOCALITY_LOCAL,
        )
        events.append(cb.KvCacheEvent(event_id=event_id, stored=stored))
    return events

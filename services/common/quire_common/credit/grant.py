"""Grant: what the scheduler allows the worker to do. The worker applies its fields in order, between two steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.v1 import worker_pb2
from quire_common.columns import NO_I32, NO_I64, equal_lengths, i32, i64, pack_i32, pack_i64
from quire_common.credit.hello import Epoch, RankAddress, addresses_from_pb, addresses_to_pb, epoch_from_pb, epoch_to_pb
from quire_common.errors import InvalidArgument
from quire_common.logit_controls import controls_bytes
from quire_common.sequence import (
    RequestContext,
    Sequence,
    context_from_pb,
    context_into_pb,
    context_to_pb,
    sequence_from_pb,
    sequence_into_pb,
    unsupported,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What `start_bytes` counts: numbers and tags of a Start and of a move; a token id; a page's number, in a table and in a
# move, and its hash with tag and length; a character.
_START_BYTES, _TOKEN_BYTES, _PAGE_BYTES, _UTF8_BYTES = 512, 4, 4 + 4 + 34, 4
# Kind, digest and tags of a constraint.
_CONSTRAINT_BYTES = 64


def empty() -> NDArray[np.int32]:
    """A column without rows."""
    return NO_I32


def empty_i64() -> NDArray[np.int64]:
    """The same, of int64."""
    return NO_I64


class MoveKind(enum.IntEnum):
    """The kinds of page moves, with their numbers in the contract."""

    STORE = 1
    LOAD = 2
    PULL = 3
    COPY = 4
    EXPORT = 5


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one step. `prefill_tokens_beside_decoders` is the number of its prompt tokens if the step also
    decodes, and `chunk_cap` that of one prompt. At most `partial_prefills` prompts are left unfinished. `step_limit` is
    the number of steps that one Grant allows: 0 is no limit, 1 is lockstep."""

    tokens_per_step: int
    prefill_tokens_beside_decoders: int
    chunk_cap: int
    partial_prefills: int
    step_limit: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a sequence in a slot. `pages` has one int32 page table per KV group; `limit` is an absolute
    position."""

    slot: int
    order_key: int
    sequence: Sequence
    cached_len: int
    pages: tuple[NDArray[np.int32], ...]
    limit: int
    context: RequestContext
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PageMove:
    """Pages to store, load, pull, copy or export. There is one hash of 32 bytes for each device page.

    In an export or a pull, the last page may be partial. Then it holds `tail_tokens` tokens, and its hash is the
    ticket's tail handle. In a load, `lease` is the kvstore's. In an export or a pull, `lease` and `lease_key` are those
    of the ticket. In a pull, `first_index` is the index of the first page in the export.
    """

    id: int
    kind: MoveKind
    group: int
    device_page: NDArray[np.int32]
    hashes: tuple[bytes, ...] = ()
    lease: bytes = b""
    source_page: NDArray[np.int32] = field(default_factory=empty)
    context: RequestContext = field(default_factory=lambda: RequestContext(""))
    tail_tokens: int = 0
    lease_key: bytes = field(default=b"", repr=False)
    first_index: int = 0
    source: tuple[RankAddress, ...] = ()


@dataclass(slots=True)
class Grant:
    """A Grant. Columns of one group have equal lengths. `order_slot` is empty if the order has not changed."""

    epoch: Epoch
    seq: int
    stop_slot: NDArray[np.int32] = field(default_factory=empty)
    stop_keep_pages: NDArray[np.int32] = field(default_factory=empty)
    start: list[Start] = field(default_factory=list)
    limit_slot: NDArray[np.int32] = field(default_factory=empty)
    limit_position: NDArray[np.int32] = field(default_factory=empty)
    grow_slot: NDArray[np.int32] = field(default_factory=empty)
    grow_group: NDArray[np.int32] = field(default_factory=empty)
    grow_page: NDArray[np.int32] = field(default_factory=empty)
    order_slot: NDArray[np.int32] = field(default_factory=empty)
    move: list[PageMove] = field(default_factory=list)
    budget: Budget | None = None
    cancel_move: NDArray[np.int64] = field(default_factory=empty_i64)
    """Ids of moves to end early."""


def encode_grant(grant: Grant) -> worker_pb2.Grant:
    """Encode a Grant. Groups of columns without rows are left out, and so is an absent budget."""
    message = worker_pb2.Grant(
        epoch=epoch_to_pb(grant.epoch),
        seq=grant.seq,
        move=[_move_to_pb(move) for move in grant.move],
    )
    for start in grant.start:
        _start_into_pb(start, message.start.add())
    # A group is written where any of its columns has rows: the receiver refuses columns that do not fit together.
    if len(grant.stop_slot) or len(grant.stop_keep_pages):
        message.stop_slot = pack_i32(grant.stop_slot)
        message.stop_keep_pages = pack_i32(grant.stop_keep_pages)
    if len(grant.limit_slot) or len(grant.limit_position):
        message.limit_slot = pack_i32(grant.limit_slot)
        message.limit_position = pack_i32(grant.limit_position)
    if len(grant.grow_slot) or len(grant.grow_group) or len(grant.grow_page):
        message.grow_slot = pack_i32(grant.grow_slot)
        message.grow_group = pack_i32(grant.grow_group)
        message.grow_page = pack_i32(grant.grow_page)
    if len(grant.order_slot):
        message.order_slot = pack_i32(grant.order_slot)
    if len(grant.cancel_move):
        message.cancel_move = pack_i64(grant.cancel_move)
    if grant.budget is not None:
        b, budget = grant.budget, message.budget
        budget.tokens_per_step = b.tokens_per_step
        budget.prefill_tokens_beside_decoders = b.prefill_tokens_beside_decoders
        budget.chunk_cap = b.chunk_cap
        budget.partial_prefills = b.partial_prefills
        budget.step_limit = b.step_limit
    return message


def decode_grant(message: worker_pb2.Grant) -> Grant:
    """Decode a Grant. Raises InvalidArgument for columns of unequal lengths or with a part of a number, and for a bad
    Start. Raises Unsupported for an unknown kind of move, and for adapter moves and controls, which no worker does
    yet."""
    if message.adapter_move:
        raise unsupported("adapter_move")
    if message.control:
        raise unsupported("control")
    grant = Grant(
        epoch=epoch_from_pb(message.epoch),
        seq=message.seq,
        stop_slot=i32(message.stop_slot, "stop_slot"),
        stop_keep_pages=i32(message.stop_keep_pages, "stop_keep_pages"),
        start=[_start_from_pb(start) for start in message.start],
        limit_slot=i32(message.limit_slot, "limit_slot"),
        limit_position=i32(message.limit_position, "limit_position"),
        grow_slot=i32(message.grow_slot, "grow_slot"),
        grow_group=i32(message.grow_group, "grow_group"),
        grow_page=i32(message.grow_page, "grow_page"),
        order_slot=i32(message.order_slot, "order_slot"),
        move=[_move_from_pb(move) for move in message.move],
        cancel_move=i64(message.cancel_move, "cancel_move"),
    )
    equal_lengths("stop", slot=grant.stop_slot, keep_pages=grant.stop_keep_pages)
    equal_lengths("limit", slot=grant.limit_slot, position=grant.limit_position)
    equal_lengths("grow", slot=grant.grow_slot, group=grant.grow_group, page=grant.grow_page)
    if message.HasField("budget"):
        b = message.budget
        grant.budget = Budget(
            b.tokens_per_step, b.prefill_tokens_beside_decoders, b.chunk_cap, b.partial_prefills, b.step_limit
        )
    return grant


def start_bytes(sequence: Sequence, context: RequestContext, pages: int) -> int:
    """Return the most bytes that a Start takes in a Grant. The one move that it may bring along (a load, or an export),
    which names each page again with its hash, is counted too. `pages` counts those of all KV groups."""
    thinking = sequence.thinking
    return (
        _START_BYTES
        + _TOKEN_BYTES * sequence.known_len
        + _PAGE_BYTES * pages
        + 2 * _UTF8_BYTES * sum(map(len, (context.request_id, context.tenant, context.traceparent, context.tracestate)))
        + _UTF8_BYTES * len(sequence.cache_salt)
        + _UTF8_BYTES * sum(map(len, sequence.sampling.processors))
        + _TOKEN_BYTES * len(sequence.stop.stop_token_ids)
        + (0 if thinking is None else _TOKEN_BYTES * (len(thinking.start_ids) + len(thinking.end_ids)))
        + (0 if sequence.constraint is None else _CONSTRAINT_BYTES + _UTF8_BYTES * len(sequence.constraint.text))
        + (0 if sequence.sampling.controls is None else controls_bytes(sequence.sampling.controls))
    )


def encode_move(move: PageMove) -> bytes:
    """One move by itself, as a worker hands it to the process that carries it out."""
    return bytes(_move_to_pb(move).SerializeToString())


def decode_move(data: bytes) -> PageMove:
    """The inverse of `encode_move`."""
    return _move_from_pb(worker_pb2.PageMove.FromString(data))


def _start_into_pb(start: Start, message: worker_pb2.Start) -> None:
    """Write a Start into an empty message."""
    message.slot = start.slot
    message.order_key = start.order_key
    sequence_into_pb(start.sequence, message.sequence)
    message.cached_len = start.cached_len
    for group, table in enumerate(start.pages):
        message.pages.add(group=group, pages=pack_i32(table))
    message.limit = start.limit
    context_into_pb(start.context, message.context)
    message.max_model_len = start.max_model_len


def _start_from_pb(message: worker_pb2.Start) -> Start:
    """Decode a Start. Raises InvalidArgument unless its page tables are of groups 0, 1 and so on, each once, or for a
    bad sequence."""
    tables = sorted(message.pages, key=lambda table: table.group)
    if [table.group for table in tables] != list(range(len(tables))):
        raise InvalidArgument("BAD_PAGE_TABLES", "Page tables do not name groups 0, 1, ...", "Send one per group.")
    return Start(
        slot=message.slot,
        order_key=message.order_key,
        sequence=sequence_from_pb(message.sequence),
        cached_len=message.cached_len,
        pages=tuple(i32(table.pages, "pages") for table in tables),
        limit=message.limit,
        context=context_from_pb(message.context),
        max_model_len=message.max_model_len,
    )


def _move_to_pb(move: PageMove) -> worker_pb2.PageMove:
    """Encode a move."""
    return worker_pb2.PageMove(
        id=move.id,
        kind=worker_pb2.PageMove.Kind.Name(move.kind.value),
        group=move.group,
        device_page=pack_i32(move.device_page),
        hashes=move.hashes,
        lease=move.lease,
        source_page=pack_i32(move.source_page),
        context=context_to_pb(move.context),
        tail_tokens=move.tail_tokens,
        lease_key=move.lease_key,
        first_index=move.first_index,
        source=addresses_to_pb(move.source),
    )


def _move_from_pb(message: worker_pb2.PageMove) -> PageMove:
    """Decode a move. Raises Unsupported for an unknown kind. Raises InvalidArgument for a column with a part of a
    number."""
    try:
        kind = MoveKind(message.kind)
    except ValueError as error:
        raise unsupported(f"move kind {message.kind}") from error
    return PageMove(
        id=message.id,
        kind=kind,
        group=message.group,
        device_page=i32(message.device_page, "device_page"),
        hashes=tuple(message.hashes),
        lease=message.lease,
        source_page=i32(message.source_page, "source_page"),
        context=context_from_pb(message.context),
        tail_tokens=message.tail_tokens,
        lease_key=message.lease_key,
        first_index=message.first_index,
        source=addresses_from_pb(message.source),
    )

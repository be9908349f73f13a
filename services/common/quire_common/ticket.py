"""Tickets of disaggregated prefill and decode: what lets one engine pull the pages that another computes.

A ticket comes from the scheduler that made it and names one transfer of one life of its worker. Its lease key is a
secret between both workers; it is neither logged nor given to clients. Holds no state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.v1 import common_pb2, scheduler_pb2
from quire_common.credit.hello import (
    Epoch,
    PageGeometry,
    RankAddress,
    ShardRange,
    addresses_from_pb,
    addresses_to_pb,
    epoch_from_pb,
    epoch_to_pb,
    geometry_from_pb,
    geometry_to_pb,
)
from quire_common.errors import FailedPrecondition, InvalidArgument
from quire_common.pages import chain_hashes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire_common.credit.hello import KvGroup
    from quire_common.errors import QuireError
    from quire_common.pages import PageExtras

HASH_BYTES = 32
_COMPARED = ("page_bytes", "layout", "dtype", "layers", "kv_heads", "head_dim", "window")


@dataclass(frozen=True, slots=True)
class Ticket:
    """The offer of a prompt's pages by a prefill side. `page_hashes` name the full pages of the prompt. `tail_handle`
    names the page after them, which has `tail_tokens`; without such a page both are empty. The pages also have the KV
    of the last known token. So a decode side that has all pages and the sampled token need not compute anything
    again."""

    transfer_id: bytes
    instance: str
    epoch: Epoch
    page_hashes: tuple[bytes, ...]
    tail_handle: bytes
    tail_tokens: int
    lease_key: bytes = field(repr=False)
    sources: tuple[RankAddress, ...]
    geometry: PageGeometry
    lease_ms: int = 0
    host: bytes = b""
    """Of the workers, as in their hello."""

    @property
    def pages(self) -> int:
        """Pages in each group, the partial one included."""
        return len(self.page_hashes) + (self.tail_tokens > 0)

    @property
    def handles(self) -> tuple[bytes, ...]:
        """The name of each page, the partial one's included."""
        return (*self.page_hashes, self.tail_handle) if self.tail_tokens else self.page_hashes

    def tokens(self) -> int:
        """Positions whose KV the pages hold."""
        return len(self.page_hashes) * self.geometry.page_size + self.tail_tokens


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """What a Submit says of the request's pages. `lease_ms` 0: the scheduler's own. `refusal`: there was a ticket,
    which is of no use."""

    prefill_only: bool = False
    ticket: Ticket | None = None
    await_handover: bool = False
    lease_ms: int = 0
    refusal: QuireError | None = None

    def check(self) -> None:
        """Raise InvalidArgument if the request is to be prefilled here alone, and at the same time has or awaits a
        ticket of another side's prefill."""
        if self.prefill_only and (self.ticket or self.refusal or self.await_handover):
            raise InvalidArgument(
                "BAD_TRANSFER",
                "The request is to be prefilled here alone, and to take over what another side prefilled.",
                "Submit it to each side with what that side does.",
                param="transfer",
            )


def tail_handle(tokens: NDArray[np.int32], extras: PageExtras, parent: bytes, first: int) -> bytes:
    """Return the name of a partial page with these tokens, from position `first` on. There must be at least one token.
    The name is the hash that a page of exactly this size would have, so no full page of the pool can have it."""
    return chain_hashes(tokens, len(tokens), extras, parent, first)[0]


def compatibility_digest(geometry: PageGeometry) -> bytes:
    """Return a digest that is equal for two engines whose pages are interchangeable: same namespace, same page size,
    and same groups, whatever their division into shards."""
    digest = hashlib.sha256(b"quire compatibility 1")
    facts = [geometry.namespace.hex(), str(geometry.page_size)]
    for group in geometry.groups:
        facts += [group.name, *(str(getattr(group, name)) for name in _COMPARED)]
    for fact in facts:
        data = fact.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def check_compatible(theirs: PageGeometry, ours: PageGeometry) -> None:
    """Raise FailedPrecondition INCOMPATIBLE_PAGES unless the pages of the two engines are interchangeable; the error
    names the first field that differs. Shards must be equal too, since a transfer agent takes each rank's part of a
    page as that rank has it."""
    _compare("page_size", theirs.page_size, ours.page_size)
    _compare("number of KV groups", len(theirs.groups), len(ours.groups))
    for index, (their, our) in enumerate(zip(theirs.groups, ours.groups, strict=True)):
        for name in ("name", *_COMPARED):
            _compare(f"groups[{index}].{name}", getattr(their, name), getattr(our, name))
        _compare(f"groups[{index}].shards", _cut(their), _cut(our))
    _compare("namespace", theirs.namespace.hex(), ours.namespace.hex())


def ticket_to_pb(ticket: Ticket) -> scheduler_pb2.Ticket:
    """Encode a ticket, with the compatibility digest of its geometry. The transfer's id is also the lease's name."""
    pages = geometry_to_pb(ticket.geometry)
    return scheduler_pb2.Ticket(
        transfer_id=ticket.transfer_id,
        instance=ticket.instance,
        epoch=epoch_to_pb(ticket.epoch),
        compatibility_digest=compatibility_digest(ticket.geometry),
        page_hashes=ticket.page_hashes,
        tail_page_handle=ticket.tail_handle,
        tail_tokens=ticket.tail_tokens,
        lease=ticket.transfer_id,
        lease_key=ticket.lease_key,
        ranks=addresses_to_pb(ticket.sources),
        compatibility=scheduler_pb2.Compatibility(
            namespace=pages.namespace, page_size=pages.page_size, groups=pages.groups
        ),
        lease_ms=ticket.lease_ms,
        host=ticket.host,
    )


def ticket_from_pb(message: scheduler_pb2.Ticket) -> Ticket:
    """Decode a ticket. Raises InvalidArgument if the transfer id is missing, a hash is not 32 bytes long, the tail is
    no partial page, the digest is of another geometry, or a part is malformed."""
    compatibility = message.compatibility
    geometry = geometry_from_pb(
        common_pb2.PageGeometry(
            page_size=compatibility.page_size, groups=compatibility.groups, namespace=compatibility.namespace
        )
    )
    ticket = Ticket(
        transfer_id=message.transfer_id,
        instance=message.instance,
        epoch=epoch_from_pb(message.epoch),
        page_hashes=tuple(message.page_hashes),
        tail_handle=message.tail_page_handle,
        tail_tokens=message.tail_tokens,
        lease_key=message.lease_key,
        sources=addresses_from_pb(message.ranks),
        geometry=geometry,
        lease_ms=message.lease_ms,
        host=message.host,
    )
    if (
        not ticket.transfer_id
        or any(len(handle) != HASH_BYTES for handle in ticket.handles)
        or not 0 <= ticket.tail_tokens < max(geometry.page_size, 1)
        or message.compatibility_digest != compatibility_digest(geometry)
    ):
        raise InvalidArgument(
            "BAD_TICKET", "The ticket contradicts itself.", "Pass tickets on as the prefill side made them."
        )
    return ticket


def _cut(group: KvGroup) -> str:
    """Return a text that says which rank holds which bytes of a page; without shards, rank 0 holds all."""
    shards = group.shards or (ShardRange(0, 0, group.page_bytes),)
    return ", ".join(f"rank {shard.rank}: {shard.offset}-{shard.offset + shard.length}" for shard in shards)


def _compare(name: str, theirs: object, ours: object) -> None:
    """Raise FailedPrecondition INCOMPATIBLE_PAGES, with `name` and both values, if the two values differ."""
    if theirs != ours:
        raise FailedPrecondition(
            "INCOMPATIBLE_PAGES",
            f"Pages of the other engine are of no use here: {name} is {theirs} there and {ours} here.",
            "Run prefill and decode replicas of one pool with the same model, weights, KV dtype, page size and ranks.",
            param=name,
        )

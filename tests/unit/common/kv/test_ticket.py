"""Tickets: over the wire unchanged, contradictions refused, and what differs between two engines named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire_common.credit import Epoch, KvGroup, PageGeometry, RankAddress, ShardRange
from quire_common.errors import FailedPrecondition, InvalidArgument
from quire_common.pages import PageExtras, chain_hashes
from quire_common.ticket import (
    Ticket,
    check_compatible,
    compatibility_digest,
    tail_handle,
    ticket_from_pb,
    ticket_to_pb,
)

GEOMETRY = PageGeometry(16, (KvGroup("full", 4096, "kv_head.layer.kv.token.dim", "float32", 2, 2, 16),), b"n" * 32)
TICKET = Ticket(
    transfer_id=b"transfer",
    instance="prefill-1",
    epoch=Epoch(2**63 + 5, 3),
    page_hashes=(b"a" * 32, b"b" * 32),
    tail_handle=b"c" * 32,
    tail_tokens=5,
    lease_key=b"k" * 32,
    sources=(RankAddress(0, "tcp", b"10.0.0.1:7000"),),
    geometry=GEOMETRY,
    lease_ms=5000,
    host=b"boot/net",
)


def test_a_ticket_travels_unchanged() -> None:
    assert ticket_from_pb(ticket_to_pb(TICKET)) == TICKET
    assert (TICKET.pages, TICKET.tokens(), TICKET.handles[-1]) == (3, 37, b"c" * 32)


def test_groups_that_cut_pages_differently_hold_the_same_and_cannot_pull_it_yet() -> None:
    halves = (ShardRange(0, 0, 2048), ShardRange(1, 2048, 2048))
    cut = replace(GEOMETRY, groups=(replace(GEOMETRY.groups[0], shards=halves),))
    assert ticket_from_pb(ticket_to_pb(replace(TICKET, geometry=cut))).geometry.groups[0].shards == halves
    assert compatibility_digest(cut) == compatibility_digest(GEOMETRY)
    for theirs, ours in ((cut, GEOMETRY), (GEOMETRY, cut)):
        with pytest.raises(FailedPrecondition, match=r"rank 0: 0-2048, rank 1: 2048-4096") as refused:
            check_compatible(theirs, ours)
        assert refused.value.param == "groups[0].shards"
    one = replace(GEOMETRY, groups=(replace(GEOMETRY.groups[0], shards=(ShardRange(0, 0, 4096),)),))
    check_compatible(one, GEOMETRY)
    check_compatible(cut, cut)


def test_the_key_is_not_told() -> None:
    assert "kkkk" not in repr(TICKET)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(TICKET, page_hashes=(b"a" * 31,)),
        replace(TICKET, tail_handle=b""),
        replace(TICKET, tail_tokens=16),
        replace(TICKET, transfer_id=b""),
    ],
    ids=["hash", "handle", "tail", "id"],
)
def test_contradictions_are_refused(wrong: Ticket) -> None:
    with pytest.raises(InvalidArgument, match="contradicts itself"):
        ticket_from_pb(ticket_to_pb(wrong))


def test_a_digest_of_something_else_is_refused() -> None:
    message = ticket_to_pb(TICKET)
    message.compatibility.page_size = 64
    with pytest.raises(InvalidArgument, match="contradicts itself"):
        ticket_from_pb(message)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(GEOMETRY, page_size=64), "page_size"),
        (replace(GEOMETRY, namespace=b"m" * 32), "namespace"),
        (replace(GEOMETRY, groups=GEOMETRY.groups * 2), "number of KV groups"),
        (replace(GEOMETRY, groups=(replace(GEOMETRY.groups[0], dtype="bfloat16"),)), "groups[0].dtype"),
        (replace(GEOMETRY, groups=(replace(GEOMETRY.groups[0], layers=3),)), "groups[0].layers"),
    ],
)
def test_what_differs_is_named(other: PageGeometry, named: str) -> None:
    assert compatibility_digest(other) != compatibility_digest(GEOMETRY)
    with pytest.raises(FailedPrecondition) as refused:
        check_compatible(other, GEOMETRY)
    assert refused.value.param == named


def test_equal_geometries_are_compatible() -> None:
    check_compatible(replace(GEOMETRY), GEOMETRY)


def test_the_tail_has_a_name_that_no_full_page_has() -> None:
    tokens = np.arange(21, dtype=np.int32)
    full = chain_hashes(tokens[:16], 16, PageExtras(), b"", 0)
    tail = tail_handle(tokens[16:], PageExtras(), full[0], 16)
    assert tail != tail_handle(tokens[16:20], PageExtras(), full[0], 16)
    assert tail != tail_handle(tokens[16:], PageExtras(), b"", 0)
    salted = PageExtras(salt="tenant")
    assert tail_handle(tokens[:5], salted, b"", 0) != tail_handle(tokens[:5], PageExtras(), b"", 0)

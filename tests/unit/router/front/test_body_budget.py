"""Request bodies share one memory budget, which small bodies and other tenants never find full."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from quire_common.errors import Aborted, QuireError, TooLarge, Unavailable
from quire_router.front.http.body import read_body
from quire_router.front.http.body_budget import COPIES, FREE_BYTES, BodyBudget

if TYPE_CHECKING:
    from starlette.types import Message, Scope

MIB = 1 << 20


def refused(grow: Callable[[], None]) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        grow()
    error = caught.value
    assert (error.code, error.http_status) == ("BODY_MEMORY_FULL", 503)
    assert error.retry_after_s > 0 and "--max-bodies-mib" in error.fix
    return error


def test_small_bodies_are_accepted_while_the_budget_is_full() -> None:
    budget = BodyBudget(MIB)
    large = budget.lease("")
    large.grow(FREE_BYTES + MIB // COPIES)
    assert budget.held == MIB
    for _ in range(10_000):
        budget.lease("").grow(FREE_BYTES)
    assert budget.held == MIB
    refused(lambda: budget.lease("").grow(FREE_BYTES + 1))
    assert budget.held == MIB


def test_all_bodies_together_stay_within_the_budget() -> None:
    budget = BodyBudget(MIB)
    leases = [budget.lease("") for _ in range(100)]
    for _ in range(64):  # a kilobyte of each, until their free bytes are used up
        for lease in leases:
            lease.grow(1024)
    taken = 0
    with pytest.raises(Unavailable):
        while True:
            leases[taken % 100].grow(1024)
            taken += 1
    assert taken == 1024 // COPIES and budget.held == MIB
    for lease in leases:
        lease.release()
        lease.release()
    assert budget.held == 0
    budget.lease("").grow(MIB // COPIES)


def test_tenant_takes_at_most_half_of_the_free_budget() -> None:
    budget = BodyBudget(8 * COPIES * MIB)
    slow = [budget.lease("slow") for _ in range(4)]
    for lease in slow:
        lease.grow(FREE_BYTES + MIB)
    refused(lambda: budget.lease("slow").grow(FREE_BYTES + 1))
    other = budget.lease("other")
    other.grow(FREE_BYTES + 2 * MIB)
    refused(lambda: other.grow(1))
    third = budget.lease("third")
    third.grow(FREE_BYTES + MIB)
    for lease in (*slow, other, third):
        lease.release()
    assert budget.held == 0 and not budget._by_tenant


class Client:
    """Sends chunks, one at a time, and then what `last` says."""

    def __init__(self, chunks: list[bytes], last: Message) -> None:
        self._messages: list[Message] = [{"type": "http.request", "body": c, "more_body": True} for c in chunks]
        self._messages.append(last)
        self.held: list[int] = []
        self.budget = BodyBudget(MIB)
        self.lease = self.budget.lease("")

    async def receive(self) -> Message:
        self.held.append(self.budget.held)
        return self._messages.pop(0)

    async def read(self, limit: int, **headers: bytes) -> bytes:
        scope: Scope = {"headers": [(name.replace("_", "-").encode(), value) for name, value in headers.items()]}
        return await read_body(scope, self.receive, limit, self.lease)


LAST: Message = {"type": "http.request", "body": b"", "more_body": False}


async def test_bytes_count_when_they_arrive_not_by_content_length() -> None:
    chunk = b"x" * FREE_BYTES
    client = Client([chunk] * 4, LAST)
    body = await client.read(4 * MIB, content_length=b"4000000")
    assert client.held == [COPIES * num_bytes for num_bytes in (0, 0, FREE_BYTES, 2 * FREE_BYTES, 3 * FREE_BYTES)]
    assert len(body) == 4 * FREE_BYTES and client.budget.held == 3 * COPIES * FREE_BYTES
    client.lease.release()
    assert client.budget.held == 0


@pytest.mark.parametrize(
    ("last", "limit", "error"),
    [
        ({"type": "http.request", "body": b"x" * MIB, "more_body": True}, 4 * MIB, Unavailable),
        ({"type": "http.request", "body": b"x" * MIB, "more_body": True}, MIB, TooLarge),
        ({"type": "http.disconnect"}, 4 * MIB, Aborted),
    ],
)
async def test_refused_body_is_freed_at_once(last: Message, limit: int, error: type[QuireError]) -> None:
    """The error has the frame that read the body, until its client has the answer."""
    chunk = bytes([7]) * (512 * 1024)
    client = Client([chunk], last)
    with pytest.raises(error) as caught:
        await client.read(limit)
    del client._messages[:]
    assert client.budget.held == 0 and caught.value.__traceback__ is not None
    holders: list[Any] = [each for each in gc.get_referrers(chunk) if isinstance(each, list)]
    assert not holders

"""Leases: each has a name, a key and a deadline, for pages or a put that a peer holds. LeaseTable does not know the
held objects.

The name is used on the control channel (gRPC). On data connections, a handle names the lease; without the key, the
handle is useless. Unknown, ended and expired leases all give the same error, NOT_FOUND. The table is not thread-safe;
the store's lock guards it.
"""

from __future__ import annotations

import heapq
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from quire_common.errors import NotFound, Overloaded
from quire_common.kv_data.lease_key import KEY_BYTES, handle_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

H = TypeVar("H")
ID_BYTES = 16


@dataclass
class Lease(Generic[H]):
    """A lease. When it ends, its holder gives up `held`. `key` authenticates frames of data connections (see
    quire_common.kv_data)."""

    id: bytes
    key: bytes = field(repr=False)
    held: H
    granted_ms: int
    deadline_s: float

    @property
    def handle(self) -> bytes:
        """The lease's name on data connections."""
        return handle_of(self.key)


class LeaseTable(Generic[H]):
    """Holds `limit` leases at most. Neither a grant nor a renewal is for more than `max_ms` from then on; a renewed
    lease may live longer in all."""

    def __init__(self, limit: int, default_ms: int, max_ms: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._default_ms = default_ms
        self._max_ms = max_ms
        self._clock = clock
        self._leases: dict[bytes, Lease[H]] = {}
        self._by_handle: dict[bytes, Lease[H]] = {}
        # One entry per lease; one that is out of date is pushed again or dropped when it comes up.
        self._by_deadline: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease[H]]:
        return iter(self._leases.values())

    def granted_ms(self, lease_ms: int) -> int:
        """Return the life, in ms, of a lease that is asked for with `lease_ms`; 0 asks for the default, and `max_ms` is
        the most."""
        return min(lease_ms or self._default_ms, self._max_ms)

    def require_room(self) -> None:
        """Raise Overloaded if the table holds `limit` leases, so that no further one may be granted."""
        if len(self._leases) >= self._limit:
            raise Overloaded(
                "TOO_MANY_LEASES",
                f"All {self._limit} leases of the kvstore are taken.",
                "Release leases, retry later, or raise max_leases.",
                retry_after_s=1.0,
            )

    def grant(self, held: H, lease_ms: int) -> Lease[H]:
        """Grant a new lease on `held`, with a random name and key, for `granted_ms(lease_ms)` from now. Raises
        Overloaded if the table is full; leases that have expired and are still listed count."""
        self.require_room()
        granted_ms = self.granted_ms(lease_ms)
        key = secrets.token_bytes(KEY_BYTES)
        lease = Lease(secrets.token_bytes(ID_BYTES), key, held, granted_ms, self._clock() + granted_ms / 1000)
        self._leases[lease.id] = lease
        self._by_handle[lease.handle] = lease
        heapq.heappush(self._by_deadline, (lease.deadline_s, lease.id))
        return lease

    def find(self, lease_id: bytes) -> Lease[H]:
        """Return the lease of this name; raises NotFound where there is none, or where it has expired."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.deadline_s <= self._clock():
            raise NotFound(
                "LEASE_UNKNOWN",
                "The kvstore has no such lease: it was released, has expired, or is of another life of the service.",
                "Look the pages up again.",
                param="lease",
            )
        return lease

    def by_handle(self, handle: bytes) -> Lease[H] | None:
        """Return the lease with this handle; None if there is none, or if it has expired."""
        lease = self._by_handle.get(handle)
        return None if lease is None or lease.deadline_s <= self._clock() else lease

    def renew(self, lease_id: bytes, lease_ms: int) -> int:
        """Prolong a lease to at least `granted_ms(lease_ms)` from now; it is never shortened. Returns its life from now
        on, in milliseconds. Raises NotFound if there is no such lease, or if it has expired."""
        lease = self.find(lease_id)
        now = self._clock()
        lease.deadline_s = max(lease.deadline_s, now + self.granted_ms(lease_ms) / 1000)
        return round((lease.deadline_s - now) * 1000)

    def end(self, lease_id: bytes) -> Lease[H] | None:
        """Remove a lease and return it; None if there is none (any more). A lease that has expired and is still listed
        is returned too. Giving up what it holds is left to the caller. The heap of deadlines is rebuilt when most of
        its entries are out of date."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            del self._by_handle[lease.handle]
        if len(self._by_deadline) > 2 * len(self._leases) + 64:
            self._by_deadline = [(lease.deadline_s, lease.id) for lease in self._leases.values()]
            heapq.heapify(self._by_deadline)
        return lease

    def expire(self) -> list[Lease[H]]:
        """Remove and return all leases whose deadline has passed, in no certain order. Giving up what they hold is left
        to the caller."""
        now, expired = self._clock(), []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._by_deadline)[1])
            if lease is None:
                continue
            if lease.deadline_s > now:
                heapq.heappush(self._by_deadline, (lease.deadline_s, lease.id))
            else:
                del self._leases[lease.id], self._by_handle[lease.handle]
                expired.append(lease)
        return expired

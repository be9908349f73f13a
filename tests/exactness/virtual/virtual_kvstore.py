"""A kvstore in virtual time: bounded, slow, forgetful, sometimes wrong and sometimes gone.

It never lies: a page whose bytes are not those that were put is dropped when it is read, as the real one's checksum has
it. What it does not have, it does not have: every fault is a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from quire_scheduler.kv.kv_traffic import LookupResult
from tests.exactness.events import Events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from quire_scheduler.core.scheduler import Scheduler
    from quire_scheduler.kv.kv_traffic import Lookup
    from tests.exactness.virtual.virtual_time import VirtualTime

_LEASE_US = 30_000_000
_SHORT_LEASE_US = 20_000
_SLOW = 12


@dataclass(frozen=True)
class StoreWeather:
    """How good a kvstore it is. Shares are probabilities; times are virtual microseconds."""

    pages: int = 1_000_000
    """Room; the page whose use is longest ago goes first, but none that is leased."""
    delay_us: int = 500
    """Longest usual time of a lookup and of a move."""
    fail_moves: float = 0.0
    """Moves that end early or are refused."""
    slow_moves: float = 0.0
    """Moves that take a dozen times as long."""
    fail_lookups: float = 0.0
    """Lookups that are given up at their deadline."""
    deadline_us: int = 50_000
    corrupt: float = 0.0
    """Pages that rot before they are read."""
    short_leases: float = 0.2
    """Leases that end while their request may still wait for its slot."""
    down_us: tuple[int, int] | None = None
    """From when to when it is gone; it comes back empty."""


class _Page(NamedTuple):
    body: bytes
    checksum: int


class VirtualStore:
    """`changed` is called after an answer. `leases` are those that nobody has given back, each with its pages."""

    def __init__(
        self, time: VirtualTime, rng: np.random.Generator, weather: StoreWeather, changed: Callable[[], None]
    ) -> None:
        self.events = Events()
        self.leases: dict[bytes, tuple[bytes, ...]] = {}
        self.weather = weather
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._time = time
        self._rng = rng
        self._changed = changed
        self._next_lease = 0
        self._given_back: set[bytes] = set()
        if weather.down_us is not None:
            time.at(weather.down_us[0], self._crash)

    @property
    def down(self) -> bool:
        """Nobody answers."""
        down_us = self.weather.down_us
        return down_us is not None and down_us[0] <= self._time.now_us < down_us[1]

    def chance(self, share: float) -> bool:
        """Whether something befalls."""
        return bool(share) and bool(self._rng.random() < share)

    def move_us(self) -> int:
        """How long the next move takes."""
        slow = self.chance(self.weather.slow_moves)
        self.events["slow moves"] += slow
        return int(self._rng.integers(0, self.weather.delay_us + 1)) * (_SLOW if slow else 1)

    def carry_out(self, core: Scheduler) -> None:
        """Look up what the core asks for, take back what it releases."""
        effects = core.take_effects()
        for lookup in effects.lookups:
            if self.down or self.chance(self.weather.fail_lookups):
                self.events["lookups failed"] += 1
                self._answer_late(core, lookup, self.weather.deadline_us, found=False)
            else:
                self._answer_late(core, lookup, self._lookup_us(lookup), found=True)
        self._take_back(effects.releases)

    def put(self, digest: bytes, body: bytes) -> bool:
        """Take a page; False where there is nobody to take it. What there is no room for is dropped in silence."""
        if self.down:
            return False
        self.events["pages stored"] += digest not in self._pages
        self._pages[digest] = _Page(body, crc32(body))
        self._pages.move_to_end(digest)
        self._evict()
        return True

    def get(self, lease: bytes, digest: bytes) -> bytes | None:
        """The page, whole, or None: a miss."""
        page = self._pages.get(digest)
        if page is None or self.down:
            self.events["leased pages missed"] += 1
            return None
        assert lease not in self._given_back, "a load under a lease that was given back"
        if self.chance(self.weather.corrupt):
            at = int(self._rng.integers(len(page.body)))
            page = page._replace(body=page.body[:at] + bytes([page.body[at] ^ 1]) + page.body[at + 1 :])
        if crc32(page.body) != page.checksum:
            self.events["corrupt pages"] += 1
            del self._pages[digest]
            return None
        self.events["pages loaded"] += 1
        return page.body

    def holds(self, digest: bytes) -> bool:
        """Whether the page is there, right or wrong."""
        return digest in self._pages

    def check_integrity(self) -> None:
        """Of a store that nobody uses."""
        assert not self.leases, "a lease is kept"

    def _lookup_us(self, lookup: Lookup) -> int:
        """Return the microseconds that an answer takes."""
        late_us = int(self._rng.integers(0, self.weather.delay_us + 1))
        return min(late_us, self.weather.deadline_us)

    def _take_back(self, leases: Sequence[bytes]) -> None:
        for lease in leases:
            assert lease not in self._given_back, "a lease is given back twice"
            self._given_back.add(lease)
            # A lease that is not among these is of a kvstore that is gone.
            self.leases.pop(lease, None)
            self._evict()

    def _answer_late(self, core: Scheduler, lookup: Lookup, late_us: int, *, found: bool) -> None:
        self._time.after(late_us, lambda: self._answer(core, lookup, found=found))

    def _answer(self, core: Scheduler, lookup: Lookup, *, found: bool) -> None:
        if found and not self.down:
            core.on_lookup(lookup.uid, self._find(lookup))
        else:
            core.on_lookup(lookup.uid, LookupResult(0, (), self.weather.deadline_us, 0.0, failed=True))
        self.carry_out(core)
        self._changed()

    def _find(self, lookup: Lookup) -> LookupResult:
        hashes = lookup.hashes
        found = next((index for index, digest in enumerate(hashes) if digest not in self._pages), len(hashes))
        if not found:
            return LookupResult(0, (), 50, 0.0)
        self.events["kvstore hits"] += 1
        self._next_lease += 1
        lease = self._next_lease.to_bytes(8, "big")
        self.leases[lease] = hashes[:found]
        for digest in reversed(hashes[:found]):
            self._pages.move_to_end(digest)
        expires_us = _SHORT_LEASE_US if self.chance(self.weather.short_leases) else _LEASE_US
        self._time.after(expires_us, lambda: self._expire(lease))
        return LookupResult(found, (lease,), 50, self._time.now_s + expires_us / 1e6)

    def _expire(self, lease: bytes) -> None:
        """Its pages may go; the lease is still to be given back."""
        if lease in self.leases:
            self.leases[lease] = ()
            self._evict()

    def _evict(self) -> None:
        if len(self._pages) <= self.weather.pages:
            return
        leased = {digest for pages in self.leases.values() for digest in pages}
        for digest in [digest for digest in self._pages if digest not in leased]:
            if len(self._pages) <= self.weather.pages:
                return
            del self._pages[digest]
            self.events["pages evicted from the store"] += 1

    def _crash(self) -> None:
        """All that it held is gone, and its leases."""
        self.events["kvstores lost"] += 1
        self._pages.clear()
        self.leases.clear()

"""Leases: lives, ends and bounds, and the thread that looks for their ends."""

from __future__ import annotations

import threading

import pytest

from quire_common.errors import NotFound, Overloaded
from quire_kvstore.leases import LeaseTable
from quire_kvstore.server import KvstoreService
from tests.unit.kvstore.pages import Clock, config


def table(clock: Clock, limit: int = 4) -> LeaseTable[str]:
    return LeaseTable(limit, default_ms=1000, max_ms=5000, clock=clock)


def test_a_lease_lives_until_its_time_and_not_longer() -> None:
    clock = Clock()
    leases = table(clock)
    lease = leases.grant("pages", 0)
    assert leases.find(lease.id).held == "pages" and lease.granted_ms == 1000
    clock.now_s += 0.999
    assert leases.expire() == []
    clock.now_s += 0.001
    with pytest.raises(NotFound) as caught:
        leases.find(lease.id)
    assert caught.value.code == "LEASE_UNKNOWN"
    assert leases.expire() == [lease], "expired for callers at once, taken out at the next sweep"
    assert leases.expire() == [] and len(leases) == 0


def test_renewal_prolongs_and_never_shortens() -> None:
    clock = Clock()
    leases = table(clock)
    lease = leases.grant("pages", 2000)
    assert leases.renew(lease.id, 1) == 2000
    clock.now_s += 1.5
    assert leases.renew(lease.id, 3000) == 3000
    clock.now_s += 2.9
    assert leases.expire() == []
    clock.now_s += 0.1
    with pytest.raises(NotFound):
        leases.renew(lease.id, 3000)
    assert [expired.held for expired in leases.expire()] == ["pages"]


def test_nobody_gets_more_than_the_most() -> None:
    leases = table(Clock())
    lease = leases.grant("pages", 10**9)
    assert lease.granted_ms == 5000
    assert leases.renew(lease.id, 10**9) == 5000


def test_ending_twice_is_ending_once() -> None:
    leases = table(Clock())
    lease = leases.grant("pages", 0)
    assert leases.end(lease.id) is lease
    assert leases.end(lease.id) is None
    assert leases.end(b"never there") is None


def test_the_table_is_bounded_and_room_comes_back() -> None:
    leases = table(Clock(), limit=2)
    first = leases.grant("a", 0)
    leases.grant("b", 0)
    with pytest.raises(Overloaded) as caught:
        leases.grant("c", 0)
    assert caught.value.code == "TOO_MANY_LEASES" and caught.value.retry_after_s > 0
    leases.end(first.id)
    leases.grant("c", 0)


def test_ended_leases_leave_nothing_behind() -> None:
    leases = table(Clock())
    for _ in range(10_000):
        leases.end(leases.grant("x", 0).id)
    assert len(leases._by_deadline) < 100


def test_names_cannot_be_guessed_from_each_other() -> None:
    leases = table(Clock(), limit=1000)
    names = {leases.grant("x", 0).id for _ in range(1000)}
    assert len(names) == 1000 and {len(name) for name in names} == {16}


def test_sweeper_goes_on_after_a_sweep_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    service = KvstoreService(config(8, sweep_s=0.01, data_port=-1))
    sweeps, swept_again = 0, threading.Event()

    def sweep() -> None:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 1:
            raise RuntimeError("a broken lease")
        swept_again.set()

    monkeypatch.setattr(service.store, "sweep", sweep)
    service.start()
    try:
        assert swept_again.wait(30)
    finally:
        service.close()

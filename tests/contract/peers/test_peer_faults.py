"""What goes wrong between two workers that exchange pages ends as moves that failed, each told of once, with the pages
that came; nothing of it stays, and no page is ever a wrong one."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import replace

import pytest

from tests.fakes.kv_transfer import peer_rig as sides
from tests.fakes.kv_transfer.peer_pulls import (
    EACH,
    LATE_S,
    LEAST_S,
    NOTICED_S,
    PAGES,
    TARGETS,
    a_relay,
    failed,
    know_of_all,
    pulling,
    through,
)
from tests.fakes.kv_transfer.peer_rig import EMPTY, content, peer_rig


def test_a_connection_that_breaks_under_way_is_made_again() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        with a_relay(here, "pass") as relay:
            here.export(1, *PAGES, offered=0)
            there.pull(1, through(relay), PAGES, TARGETS)
            for filled in range(1, 6):
                here.transfer_agent.offer_pages(1, filled)
                rig.until(lambda filled=filled: there.pool.pages[TARGETS[filled - 1]] != EMPTY)  # type: ignore[misc]  # a lambda's default
                relay.hang_up()
            here.transfer_agent.offer_pages(1, 6)
            rig.until(lambda: 1 in there.told and 1 in here.told)
            assert there.told[1].ok and here.told[1].ok
        rig.assert_nothing_left()


def test_a_network_that_swallows_everything_ends_a_pull() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        with a_relay(here, "pass") as relay:
            here.export(1, *PAGES, offered=2)
            there.pull(1, through(relay), PAGES, TARGETS)
            rig.until(lambda: there.pool.pages[TARGETS[1]] != EMPTY)
            began = time.monotonic()
            relay.mode = "silent"
            assert rig.until(lambda: 1 in there.told) < LATE_S
            assert time.monotonic() - began > LEAST_S
            failed(there, 2)
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


def test_an_exporter_that_is_dead_before_it_was_asked_is_noticed_at_once() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        sources = here.sources
        here.close()
        rig.sides.remove(here)
        there.pull(2, sources, PAGES, TARGETS)
        assert rig.until(lambda: 2 in there.told) < LATE_S
        assert (there.told[2].ok, there.came(2)) == (False, 0)


@EACH
def test_an_exporter_that_is_killed_under_way_leaves_what_has_come(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        pid = here.pid
        here.signal(signal.SIGKILL)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        failed(there, 2)
        assert (here.told[1].ok, here.came(1)) == (False, 0)
        rig.until(lambda: here.transfer_agent.pid not in (None, pid))
        rig.assert_nothing_left()


@EACH
def test_an_exporter_that_is_killed_afterwards_changes_nothing(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.transfer_agent.offer_pages(1, 6)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        pid = here.pid
        here.signal(signal.SIGKILL)
        rig.until(lambda: here.transfer_agent.pid not in (None, pid))
        assert there.told[1].ok and here.told[1].ok
        rig.assert_nothing_left()


def test_a_run_that_ends_while_the_exporter_has_no_process_is_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sides, "PATIENT", replace(sides.PATIENT, first_backoff_s=1.0))
    with peer_rig() as rig:
        here, _ = rig.side(), rig.side()
        here.signal(signal.SIGKILL)
        rig.until(lambda: here.transfer_agent.pid is None)
        rig.go_on_for(0.2)  # and the engine's side knows
        here.transfer_agent.cancel_all()
        rig.assert_nothing_left()


@EACH
def test_an_exporter_that_is_stopped_is_noticed_and_may_go_on_afterwards(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        began = time.monotonic()
        here.signal(signal.SIGSTOP)
        here.transfer_agent.offer_pages(1, 6)
        assert rig.until(lambda: 1 in there.told) < LATE_S
        assert time.monotonic() - began > LEAST_S
        failed(there, 2)
        here.signal(signal.SIGCONT)
        there.pull(2, here.sources, PAGES[2:], TARGETS[2:], first=2)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
        rig.assert_nothing_left()


@EACH
def test_a_mover_whose_engine_is_silent_gives_no_signs_of_life(transport: str) -> None:
    """The engine's process was stopped, and its KV transfer agent was not."""
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.transfer_agent._link.send = lambda incarnation, frame: True  # type: ignore[method-assign]  # a worker that is stopped
        assert rig.until(lambda: 1 in there.told) < LATE_S
        failed(there, 2)


@EACH
def test_a_puller_that_is_killed_holds_nothing_and_comes_again(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        pid = there.pid
        there.signal(signal.SIGKILL)
        rig.until(lambda: 1 in there.told)
        failed(there, 2)
        rig.until(lambda: there.transfer_agent.pid not in (None, pid))
        here.transfer_agent.offer_pages(1, 6)
        rig.until(lambda: here.sockets() == here.idle_sockets)
        assert here.told == {}
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_a_puller_that_is_stopped_goes_on_where_it_was(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        there.signal(signal.SIGSTOP)
        here.transfer_agent.offer_pages(1, 6)
        rig.go_on_for(NOTICED_S + 1)
        assert here.told == there.told == {}
        there.signal(signal.SIGCONT)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok
        assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_a_pull_that_is_cancelled_ends_at_once_with_what_has_come(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        there.transfer_agent.end_move(1)
        assert rig.until(lambda: 1 in there.told) < LATE_S
        rig.until(lambda: here.sockets() == here.idle_sockets)
        here.transfer_agent.offer_pages(1, 6)
        rig.go_on_for(0.2)
        failed(there, 2)
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_an_export_that_is_cancelled_ends_its_pull_at_once(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.transfer_agent.end_move(1)
        here.transfer_agent.end_move(1)
        assert rig.until(lambda: 1 in here.told and 1 in there.told) < LATE_S
        failed(there, 2)
        assert (here.told[1].ok, here.came(1)) == (False, 0)
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_a_new_run_of_the_exporter_refuses_those_of_the_last(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.transfer_agent.cancel_all()
        for page in PAGES:
            here.pool.pages[page] = content(99)
        assert rig.until(lambda: 1 in there.told) < LATE_S
        failed(there, 2)
        there.pull(2, here.sources, PAGES, TARGETS)
        assert rig.until(lambda: 2 in there.told) < LATE_S
        assert there.came(2) == 0 and here.told == {}
        for page in PAGES:
            here.pool.pages[page] = content(page)
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_a_new_run_of_the_puller_lets_its_pulls_go(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        there.transfer_agent.cancel_all()
        rig.until(lambda: here.sockets() == here.idle_sockets)
        here.transfer_agent.offer_pages(1, 6)
        rig.go_on_for(0.2)
        assert there.told == here.told == {} and there.pool.pages[TARGETS[2]] == EMPTY
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


@pytest.mark.deep
def test_pulls_end_when_their_worker_does() -> None:
    with peer_rig() as rig:
        here, there = pulling(rig)
        began, pidfd = time.monotonic(), os.pidfd_open(there.pid)
        there.close()
        rig.sides.remove(there)
        assert select.select([pidfd], [], [], 30)[0] and time.monotonic() - began < LATE_S
        os.close(pidfd)
        rig.until(lambda: here.sockets() == here.idle_sockets)
        assert here.told == {}

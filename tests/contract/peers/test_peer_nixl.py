"""Pages by NIXL where both ends ask for it, and nothing but a miss where one does not. What holds for every transport
is in the other tests of peers."""

from __future__ import annotations

import pytest

from quire_common.errors import ConfigError
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.peers import peer_listeners
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from quire_worker.kv_transfer.transports.nixl_agent import IDLE_S
from quire_worker.kv_transfer.transports.registry import missing_package
from tests.fakes.kv_transfer.peer_pulls import PAGES, TARGETS, failed, know_of_all
from tests.fakes.kv_transfer.peer_rig import content, peer_rig

by_nixl = pytest.mark.skipif(bool(missing_package("nixl")), reason="the package nixl is not installed: make test-nixl")


def test_a_worker_that_is_to_use_nixl_and_has_it_not_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_listeners, "missing_package", lambda choice: "nixl")
    with pytest.raises(ConfigError, match="nixl") as error:
        PeerListeners(WorkerConfig(peer_transport="nixl"))
    assert error.value.code == "NIXL_MISSING"


@by_nixl
def test_a_peer_that_was_not_told_of_nixl_gives_no_pages_by_it_and_others_by_tcp() -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport="tcp"), rig.side(transport="nixl")
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in there.told)
        failed(there, 0)
        there.export(2, *PAGES)
        here.pull(2, there.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 2 in here.told)
        assert here.told[2].ok and [here.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]


@by_nixl
def test_agents_end_when_nobody_needs_them_and_come_again() -> None:
    """What NIXL opens is a process's sockets too."""
    with peer_rig() as rig:
        here, there = rig.side(transport="nixl"), rig.side(transport="nixl")
        for _ in range(2):
            know_of_all(rig, here, there)
            for side in rig.sides:
                side.told.clear()
            rig.go_on_for(IDLE_S + 0.5)
            rig.until(lambda: all(side.sockets() == side.idle_sockets for side in rig.sides))

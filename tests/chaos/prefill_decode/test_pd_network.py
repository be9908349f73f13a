"""Prefill and decode replicas with a network between them: spoilt pages, partitions, and a hundred random faults under
load. Every member has a network namespace of its own, where that is allowed.

CHAOS_FAULTS (100) says how many random faults there are, CHAOS_SECONDS (300) how long they may take, CHAOS_SEED which.
CHAOS_NO_NAMESPACES: where namespaces are not allowed, do without what needs them; else that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from quire.local.private_network import PrivateNetwork
from tests.chaos.judge import assert_unharmed
from tests.chaos.load import Load
from tests.chaos.prefill_decode.crowd import Crowd
from tests.chaos.prefill_decode.partition import partition
from tests.chaos.prefill_decode.pd_rig import NO_CACHES, PdRig, flags_of, private_network
from tests.chaos.prefill_decode.pd_saboteur import PdSaboteur
from tests.chaos.scripts import make_long_scripts

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
STREAMS = 12
PREFILL_US = 150.0
# A fault a second, where a request is at two engines: that three of them in a row are lost without a token is no sign
# that it is the cause.
LIMITS = {"scheduler": {"worker-timeout-s": "3", "transfer-lease-s": "3"}, "router": {"migration-limit": "10"}}


@pytest.fixture(scope="module")
def network() -> Iterator[PrivateNetwork | None]:
    with private_network() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(network: PrivateNetwork | None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PdRig]:
    # The other one's pages go straight, so that a partition parts it.
    relayed = ("worker-prefill-1",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        flags = flags_of(PREFILL_US, NO_CACHES, LIMITS)
        async with PdRig("paced 10", flags=flags, network=network, relayed=relayed) as one:
            yield one


@pytest.mark.parametrize("mode", ["flip", "garbage", "silent", "slow"])
async def test_handovers_survive_pages_damaged_in_transit(rig: PdRig, seed: int, mode: str) -> None:
    before = sum(relay.harmed for relay in rig.relays.values())
    with rig.relayed_as(mode):
        async with Crowd(rig, seed) as crowd:
            crowd.ask(6)
            await crowd.done()
    await rig.judge(crowd)
    assert sum(relay.harmed for relay in rig.relays.values()) > before


async def test_handovers_survive_connections_that_break_in_transit(rig: PdRig, seed: int) -> None:
    async with Crowd(rig, seed) as crowd:
        crowd.ask(6)
        await rig.until_load("prefill", lambda loads: any(load.open_transfers for load in loads))
        for relay in rig.relays.values():
            relay.hang_up()
        await rig.judge(crowd)


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_handovers_survive_a_partition_between_workers(rig: PdRig, seed: int, moment: str) -> None:
    """What the workers say to each other is dropped in silence; everybody else hears everybody."""
    network = rig.network
    if network is None:
        if os.environ.get("CHAOS_NO_NAMESPACES"):
            pytest.skip("network namespaces are not allowed here")
        pytest.fail("network namespaces are not allowed here: allow them, or set CHAOS_NO_NAMESPACES=1 to go without")
    sides = [rig.of_role("worker", role) for role in ("prefill", "decode")]
    async with Crowd(rig, seed) as crowd:
        if moment == "during":
            crowd.ask(6)
            await rig.until_load("prefill", lambda loads: any(load.open_transfers for load in loads))
        with partition(network, *sides), rig.relayed_as("silent"):
            crowd.ask(6)
            await crowd.done()
        crowd.ask(2)
        await rig.judge(crowd)


async def test_handovers_survive_random_faults(rig: PdRig, seed: int) -> None:
    count = int(os.environ.get("CHAOS_FAULTS", "100"))
    seconds = float(os.environ.get("CHAOS_SECONDS", "300"))
    load = Load(rig, STREAMS, seed)
    await load.learn(make_long_scripts(16, seed, 20, 100))
    saboteur = PdSaboteur(rig, load, seed)
    load.start()
    await saboteur.disturb(count, seconds)
    await load.finish()
    print(f"{load.answers} answers and {load.left} left early, {load.tokens} tokens, {len(load.failures)} bad")
    print(f"{sum(saboteur.kinds.values())} faults: {dict(saboteur.kinds)}")
    print(saboteur.summary(), flush=True)
    assert_unharmed(load, saboteur)
    await rig.assert_at_rest()
    handoffs = await rig.router_counts("quire_router_pd_handoffs_total")
    assert handoffs["reserved"] > STREAMS, handoffs
    assert sum(saboteur.kinds.values()) >= count or "CHAOS_SECONDS" in os.environ

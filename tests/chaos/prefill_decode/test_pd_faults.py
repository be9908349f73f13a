"""What may befall prefill and decode replicas, one row after the other on one stack: every client gets the tokens of an
undisturbed run, and what was lent is back within seconds.

A row asks, waits for its moment, does its harm, and judges: `before` pages travel (prompts have just come), `during`
(transfers are open and no prompt is done), `after` (all have their first token).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from quire.models import find_model
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_common.sequence import Sequence, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts
from tests.chaos.prefill_decode.crowd import Crowd
from tests.chaos.prefill_decode.pd_rig import BACK_S, Flags, PdRig, flags_of
from tests.fakes.scheduler.scheduler_stack import Router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
# Of a prompt token: prompts of a thousand take so long that moments can be told apart.
PREFILL_US = 300.0
CROWD = 8
# A process that stands still for longer than anybody waits for it.
FROZEN_S = 4.0


@dataclass(frozen=True)
class Row:
    """What is done to the first member of a service and role, and when. `frozen_s` 0: it is killed."""

    service: str
    role: str
    moment: str
    frozen_s: float = 0.0

    def __str__(self) -> str:
        done = f"stands still {self.frozen_s:g} s" if self.frozen_s else "killed"
        return f"{self.role} {self.service} {done} {self.moment}"


# Few places to decode, so that they can be outrun, and leases that must be renewed while one waits for a place.
FEW: Flags = {
    "scheduler": {"worker-timeout-s": "3", "transfer-lease-s": "2"},
    "worker-decode-1": {"max-num-seqs": "8"},
    "worker-decode-2": {"max-num-seqs": "8"},
}
KILLS = [(service, role) for service in ("worker", "scheduler") for role in ("prefill", "decode")]
ROWS = [
    *(Row(*member, moment) for member in KILLS for moment in ("before", "during", "after")),
    *(Row("worker", role, "during", FROZEN_S) for role in ("prefill", "decode")),
    *(Row("scheduler", role, "during", FROZEN_S) for role in ("prefill", "decode")),
]

# What a side says while some request is in a state, from its prompt's arrival to its last step.
LOADS: dict[str, tuple[str, Callable[[scheduler_pb2.Load], bool]]] = {
    "prompt waits": ("prefill", lambda load: load.waiting_prefill_tokens > 0),
    "place is kept": ("decode", lambda load: load.waiting > 0),
    "prefilling": ("prefill", lambda load: load.running > 0),
    "pages are lent": ("prefill", lambda load: load.open_transfers > 0),
    "pulling": ("decode", lambda load: load.referenced_pages > 0),
    "decoding": ("decode", lambda load: load.running > 0),
}
STATES = (*LOADS, "first token has come")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PdRig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        async with PdRig("paced 10", flags=flags_of(PREFILL_US, FEW)) as one:
            yield one


@dataclass
class Reachable:
    """A scheduler of the stack, past its router."""

    stub: Any


def lent(loads: Iterable[scheduler_pb2.Load]) -> int:
    return sum(load.open_transfers for load in loads)


async def until(rig: PdRig, crowd: Crowd, moment: str) -> None:
    """Ask, and wait for the moment."""
    asked = crowd.ask(CROWD)
    if moment == "before":
        await rig.until_load("prefill", lambda loads: any(load.waiting_prefill_tokens for load in loads))
    elif moment == "during":
        await rig.until_load("prefill", lambda loads: lent(loads) > 1)
    else:
        await crowd.begun(asked)


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_handovers_survive_a_killed_or_frozen_member(rig: PdRig, seed: int, row: Row) -> None:
    async with Crowd(rig, seed) as crowd:
        await until(rig, crowd, row.moment)
        member = rig.of_role(row.service, row.role)[0]
        process = rig.service(member).process
        assert process.signal(signal.SIGSTOP if row.frozen_s else signal.SIGKILL)
        if row.frozen_s:
            try:
                await asyncio.sleep(row.frozen_s)
            finally:
                process.signal(signal.SIGCONT)
        await rig.judge(crowd, struck=[member])


async def test_handovers_survive_clients_that_leave_at_any_moment(rig: PdRig, seed: int) -> None:
    """From the first millisecond to the middle of the answer, in steps of some milliseconds."""
    async with Crowd(rig, seed) as crowd:
        for first in range(0, 60, 10):
            crowd.ask(10, leave_after_s=[0.012 * (first + place) for place in range(10)])
            await asyncio.sleep(0.1)
        crowd.ask(4)
        await rig.judge(crowd)
        assert sum(one.left for one in crowd.asked) > 30


@pytest.mark.parametrize("state", STATES)
async def test_handovers_survive_clients_that_leave_in_any_state(rig: PdRig, seed: int, state: str) -> None:
    """All at once but two, who notice nothing."""
    async with Crowd(rig, seed) as crowd:
        asked = crowd.ask(CROWD)
        if state in LOADS:
            role, is_so = LOADS[state]
            await rig.until_load(role, lambda loads: any(map(is_so, loads)))
            for one in asked[2:]:
                one.leave()
        else:
            # Each with its own: when another's comes it may have ended.
            await asyncio.gather(*(crowd.leave_begun(one) for one in asked[2:]))
        await rig.judge(crowd)
        assert sum(one.left for one in crowd.asked) > CROWD // 2


async def test_handovers_survive_an_overloaded_decode_side(rig: PdRig, seed: int) -> None:
    """So many at once that most wait at the decode side with their pages lent, for longer than a lease lasts."""
    async with Crowd(rig, seed, prompt=(200, 400), answer=(60, 100)) as crowd:
        crowd.ask(200)
        await rig.judge(crowd)


async def prefill_alone(rig: PdRig, lease_ms: int) -> tuple[Sequence, scheduler_pb2.Ticket, list[int]]:
    """A sequence, the ticket of its pages, and its first token: asked of the prefill side by nobody's router."""
    sequence = Sequence(np.arange(300, 1300, dtype=np.int32), Stop(24, ignore_eos=True))
    async with session(rig, rig.of_role("scheduler", "prefill")[0]) as front:
        await front.submit({1: sequence}, scheduler_pb2.KvTransfer(prefill_only=True, lease_ms=lease_ms))
        await front.until(lambda: 1 in front.prefilled)
        return sequence, front.admitted[1].ticket, front.tokens[1]


async def go_on(rig: PdRig, sequence: Sequence, ticket: scheduler_pb2.Ticket, first: list[int]) -> list[int]:
    """What the decode side answers to the ticket: the tokens after the first."""
    async with session(rig, rig.of_role("scheduler", "decode")[0]) as back:
        known = replace(sequence, output_ids=np.array(first, np.int32))
        await back.submit({1: known}, scheduler_pb2.KvTransfer(ticket=ticket))
        await back.done(1)
        return back.tokens[1]


async def is_known(rig: PdRig, ticket: scheduler_pb2.Ticket) -> bool:
    async with grpc.aio.insecure_channel(rig.address(rig.of_role("scheduler", "prefill")[0])) as channel:
        try:
            request = scheduler_pb2.GetTicketRequest(transfer_id=ticket.transfer_id)
            await scheduler_pb2_grpc.SchedulerStub(channel).GetTicket(request)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
            return False
    return True


@asynccontextmanager
async def session(rig: PdRig, scheduler: str) -> AsyncIterator[Router]:
    async with grpc.aio.insecure_channel(rig.address(scheduler)) as channel:
        router = Router(Reachable(scheduler_pb2_grpc.SchedulerStub(channel)))
        await router.open()
        yield router
        await router.half_close()


def pure(sequence: Sequence) -> list[int]:
    facts = read_facts(str(find_model(None)))
    return paced_tokens(sequence.prompt_ids.tolist(), sequence.stop, facts=facts).tokens


async def test_ticket_is_valid_until_its_lease_ends(rig: PdRig) -> None:
    sequence, ticket, first = await prefill_alone(rig, lease_ms=60_000)
    assert await is_known(rig, ticket)
    assert first + await go_on(rig, sequence, ticket, first) == pure(sequence)
    await rig.until_load("prefill", lambda loads: not lent(loads), BACK_S)
    assert not await is_known(rig, ticket)
    await rig.assert_at_rest()


async def test_expired_ticket_costs_time_but_no_answer(rig: PdRig) -> None:
    sequence, ticket, first = await prefill_alone(rig, lease_ms=300)
    await rig.until_load("prefill", lambda loads: not lent(loads), BACK_S)
    assert not await is_known(rig, ticket)
    assert first + await go_on(rig, sequence, ticket, first) == pure(sequence)
    await rig.assert_at_rest()


async def test_ticket_from_before_a_restart_costs_time_but_no_answer(rig: PdRig) -> None:
    sequence, ticket, first = await prefill_alone(rig, lease_ms=60_000)
    worker = rig.of_role("worker", "prefill")[0]
    before = rig.service(worker).process
    assert before.signal(signal.SIGKILL)
    while rig.service(worker).process == before:
        await asyncio.sleep(0.05)
    await rig.wait_whole()
    assert not await is_known(rig, ticket)
    assert first + await go_on(rig, sequence, ticket, first) == pure(sequence)
    await rig.assert_at_rest()

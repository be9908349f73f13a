"""Schedulers get the held tokens of siblings, migrated requests, and both sides of a pair."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quire.v1 import scheduler_pb2 as pb
from quire_common.pages import chain_hashes
from tests.fakes.router.fake_pages import NAMESPACE
from tests.fakes.router.pd_rig import sides
from tests.fakes.router.router_faults import until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import PAGE_SIZE, FakeScheduler
from tests.fakes.scheduler.scheduler_stack import FakeKvStore, kvstore

PROMPT = list(range(3, 3 + 4 * PAGE_SIZE + 1))


@contextlib.asynccontextmanager
async def followed(fakes: Sequence[FakeScheduler], **config: Any) -> AsyncIterator[tuple[RouterRig, FakeKvStore]]:
    """All of them have met one kvstore, which the router follows."""
    async with kvstore() as (store, address):
        store.told.namespace = NAMESPACE
        for fake in fakes:
            fake.rates["kvstore_boot_id"] = store.told.boot_id
        async with router_rig(fakes, kvstores=(address,), **config) as rig:
            view, replicas = rig.router._placement._view, rig.router.fleet.replicas
            await until(lambda: bool(view.lives) and all(replica.accepts for replica in replicas.values()))
            yield rig, store


def held(submit: pb.Submit) -> int | None:
    return submit.held_tokens if submit.HasField("held_tokens") else None


async def test_siblings_get_the_same_held_tokens() -> None:
    fake = FakeScheduler()
    async with followed([fake]) as (rig, store):
        await rig.complete(PROMPT, max_tokens=1, n=2)
        hashes = chain_hashes(PROMPT, PAGE_SIZE)
        store.told.store(hashes[:3])
        await until(lambda: len(rig.router._placement.directory.reported) == 3)
        await rig.complete(PROMPT, max_tokens=1, n=2)
        await rig.complete(PROMPT, max_tokens=1, prompt_logprobs=0)
    assert [held(submit) for submit in fake.submits] == [0, 0, 3 * PAGE_SIZE, 3 * PAGE_SIZE, None]


async def test_held_tokens_are_looked_up_again_after_a_migration() -> None:
    first, second = fakes = [FakeScheduler(), FakeScheduler()]
    first.breaks, second.breaks = [2], [2]
    async with followed(fakes) as (rig, _):
        answer = await rig.complete(PROMPT, max_tokens=8, temperature=0)
        assert answer.json()["usage"]["completion_tokens"] == 8
    begun, resumed, *_ = sorted([*first.submits, *second.submits], key=lambda submit: submit.context.attempt)
    assert held(begun) == 0
    assert resumed.sequence.output_ids and held(resumed) is None, "what it has drawn may be stored, and nobody told yet"


async def test_only_the_prefill_side_gets_held_tokens() -> None:
    front, back = fakes = sides()
    async with followed(fakes, pd_least_tokens=1, pd_threshold_tokens=1) as (rig, _):
        answer = await rig.complete(PROMPT, max_tokens=4, temperature=0)
        assert answer.status_code == 200, answer.text
    (prefill,), (reservation,) = front.submits, back.submits
    assert prefill.transfer.prefill_only and held(prefill) == 0
    assert reservation.transfer.await_handover and held(reservation) is None

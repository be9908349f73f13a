"""Cold prompts are not looked up, stored ones are: a real router, two real schedulers, a kvstore that they share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quire_router.server import RouterService
from quire_scheduler.kv import kv_traffic
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.scheduler_stack import FakeKvStore, Stack, kvstore, stack

LIMIT_S = 60.0
PAGE = 4


@pytest.fixture(autouse=True)
def long_belief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a second is looked up after all: on a busy machine that may be anybody."""
    monkeypatch.setattr(kv_traffic, "_BELIEVED_S", LIMIT_S)


PAGES = 10


def prompt(seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 90, PAGES * PAGE + 1)]


@dataclass
class House:
    """`draining` replicas take no requests, so that a test says who does."""

    rig: RouterRig
    store: FakeKvStore
    stacks: list[Stack]

    @property
    def router(self) -> RouterService:
        return self.rig.router

    async def ask(self, seed: int, at: int | None = None) -> int:
        """A prompt of that number, by either replica or by that one; how many of its tokens came from the kvstore."""
        for index, one in enumerate(self.stacks):
            one.engine.draining = at not in (None, index)
            one.engine.phase_changed.set()
        rows = [self.router.fleet.replicas[one.address] for one in self.stacks]
        await self.until(lambda: [row.accepts for row in rows] == [at in (None, index) for index in range(2)])
        answer = await self.rig.http.post(
            "/v1/completions", json={"model": self.model, "prompt": prompt(seed), "max_tokens": 2, "temperature": 0}
        )
        assert answer.status_code == 200, answer.text
        for one in self.stacks:
            await one.until_quiet()
        return int((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def model(self) -> str:
        return str(self.stacks[0].core.hello.model.name)

    @property
    def asked(self) -> int:
        """Lookups so far."""
        return len(self.store.requests)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                await asyncio.sleep(0.01)

    async def acquainted(self) -> None:
        """Each replica has met the kvstore, said so, and the router follows that one."""
        for at in range(2):
            await self.ask(1000 + at, at)
        table, view = self.router.fleet.table, self.router._placement._view
        rows = [self.router.fleet.replicas[one.address].row.row for one in self.stacks]
        life = self.store.told.boot_id
        await self.until(lambda: all(table.kvstore[row] == life for row in rows) and life in view.lives.values())

    def tell(self) -> None:
        """The kvstore tells of all that it has."""
        self.store.told.store([key[1:] for key in self.store.pages])


@contextlib.asynccontextmanager
async def a_house(**router: Any) -> AsyncIterator[House]:
    async with contextlib.AsyncExitStack() as held:
        store, address = await held.enter_async_context(kvstore())
        store.watched = True
        sizes: dict[str, Any] = {"page_size": PAGE, "num_pages": 200, "vocab_size": 97}
        stacks = [
            await held.enter_async_context(
                stack(kvstore=address, kvstore_timeout_ms=5000, load_interval_ms=10, **sizes)
            )
            for _ in range(2)
        ]
        for one in stacks:
            await one.share(store.pages)
        further = tuple(one.address for one in stacks)
        rig = await held.enter_async_context(router_rig([], further=further, kvstores=(address,), **router))
        yield House(rig, store, stacks)


async def test_cold_prompts_are_not_looked_up_and_stored_ones_are() -> None:
    async with a_house(expected_pages_s=1.0) as house:
        await house.acquainted()
        before = house.asked
        assert await house.ask(1, at=0) == 0 and house.asked == before, "nobody has it: it starts at once"
        assert await house.ask(1, at=1) == PAGES * PAGE, "stored a moment ago, and the kvstore has told of nothing"
        assert house.asked == before + 1
        house.tell()
        await asyncio.sleep(1.2)  # what was expected of the replicas is over: it is the kvstore's word now
        assert await house.ask(1, at=1) == await house.ask(1, at=0) == PAGES * PAGE
        assert house.asked == before + 3
        assert await house.ask(2, at=1) == 0 and house.asked == before + 3
        assert sum(one.core.stats.lookups_spared for one in house.stacks) == 2


async def test_unwatched_kvstore_is_always_looked_up() -> None:
    async with a_house() as house:
        await house.acquainted()
        pages, view = house.store.told, house.router._placement._view
        before = house.asked
        pages.away = True
        pages.cut()
        await house.until(lambda: not view.lives)
        await house.ask(1)
        assert house.asked == before + 1, "the stream broke"
        pages.away = False
        await house.until(lambda: bool(view.lives))
        await house.ask(2)
        assert house.asked == before + 1, "nothing was missed meanwhile"
        pages.restart()
        await house.until(lambda: pages.boot_id in view.lives.values())
        await house.ask(3, at=0)
        assert house.asked == before + 2, "another life, which the replica has not met"
        await house.acquainted()
        before = house.asked
        await house.ask(4)
        assert house.asked == before

"""Large pieces of work share each turn of the event loop, in order."""

from __future__ import annotations

import asyncio
from itertools import groupby

from quire_router.loop_budget import LoopBudget
from quire_router.off_loop import MOST_VALUES
from tests.unit.router.makers import make_generation, make_job


class Turns:
    """Counts the turns of the loop; a context."""

    def __init__(self) -> None:
        self.number = 0

    async def __aenter__(self) -> Turns:
        self._task = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)


async def test_work_over_the_budget_waits_for_a_later_turn_in_order() -> None:
    budget, done = LoopBudget(10), list[tuple[int, int]]()
    async with Turns() as turns:

        async def work(values: int) -> None:
            await budget.acquire(values)
            done.append((turns.number, values))

        await asyncio.gather(*(work(values) for values in (4, 6, 3, 25, 1, 9, 2)))
    assert [[values for _, values in turn] for _, turn in groupby(done, key=lambda item: item[0])] == [
        [4, 6],
        [3],
        [25],
        [1, 9],
        [2],
    ]


async def test_turn_in_which_waiting_work_resumes_has_no_second_budget() -> None:
    budget, done = LoopBudget(10), list[int]()
    async with Turns() as turns:

        async def work(times: int) -> None:
            for _ in range(times):
                await budget.acquire(10)
                done.append(turns.number)

        await asyncio.gather(work(1), work(2))
    assert len(set(done)) == 3, "the second call of the work that had waited comes in the turn in which it resumes"


async def test_call_does_not_overtake_one_that_was_let_in() -> None:
    budget, done = LoopBudget(10), list[str]()

    async def work(name: str, values: int) -> None:
        await budget.acquire(values)
        done.append(name)

    async with asyncio.TaskGroup() as group:
        for name, values in (("a", 10), ("b", 3)):
            group.create_task(work(name, values))
        await asyncio.sleep(0)
        group.create_task(work("c", 4))  # it calls after `_renew` has let b in, and before b resumes
    assert done == ["a", "b", "c"]


async def test_cancelled_work_uses_no_budget() -> None:
    budget = LoopBudget(10)
    await budget.acquire(10)
    waiting = [asyncio.create_task(budget.acquire(10)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[:4]:
        task.cancel()
    async with asyncio.timeout(5):
        await waiting[4]
    for _ in range(3):  # a budget that is free again is given at once
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await budget.acquire(10)


async def test_simultaneous_readers_are_spread_over_turns() -> None:
    budget, taken = LoopBudget(), list[tuple[int, int]]()
    tokens = MOST_VALUES // 22
    generations = [make_generation(make_job(logprobs=20, stream=True), budget) for _ in range(12)]
    for generation in generations:
        (sequence,) = generation.sequences
        sequence.engine.add_row(bytes(4 * tokens), 2, 1)
        sequence.text.add_offsets(list(range(1, tokens + 1)))
        assert sequence.add_text("x" * tokens, -1, tokens)
    async with Turns() as turns:

        async def read(index: int) -> None:
            (delta,) = await generations[index].next_deltas()
            taken.append((turns.number, delta.tokens))

        await asyncio.gather(*map(read, range(12)))
    assert [count for _, count in taken] == [tokens] * 12
    assert len({turn for turn, _ in taken}) == 12

"""A request that hangs or kills tokenizers fails after two of them, and requests beside it continue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_faults import nothing_left, text, until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

POISON = "poison"


def poisoned_rig(tokenizers: int, *, streams: bool = True) -> Any:
    fakes = [FakeTokenizer(streams=streams) for _ in range(tokenizers)]
    for fake in fakes:
        fake.poison = POISON
    return router_rig([FakeScheduler(step_s=0.005)], fakes, tokenizer_timeout_s=0.4, connect_timeout_s=2.0)


def arm(rig: RouterRig, mode: str) -> None:
    """The way they end. A process that has died says nothing to the calls that it had."""
    if mode == "die":
        for fake, host in zip(rig.tokenizers, rig.tokenizer_hosts, strict=True):
            fake.dies = host.stop


@pytest.mark.parametrize("mode", ["hang", "die"])
async def test_sequence_that_breaks_two_tokenizers_is_not_sent_to_a_third(mode: str) -> None:
    async with poisoned_rig(3) as rig:
        arm(rig, mode)
        beside = [asyncio.create_task(rig.complete("one two three", max_tokens=80, stop=["zzz"])) for _ in range(6)]
        await until(lambda: sum(map(len, (fake.open_handles for fake in rig.tokenizers))) == 6)
        bad = await rig.complete("one two three", max_tokens=80, stop=[POISON])
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "TOKENIZER_LIMIT")
        for answer in await asyncio.gather(*beside):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text(80, "one two three"), answer.text
        assert sum(fake.poisoned for fake in rig.tokenizers) == 2
        (left,) = [fake for fake in rig.tokenizers if not fake.poisoned]
        await until(lambda: not left.open_handles)


@pytest.mark.parametrize("mode", ["hang", "die"])
async def test_two_poison_requests_at_once_fail_alone(mode: str) -> None:
    async with poisoned_rig(5) as rig:
        arm(rig, mode)
        beside = [asyncio.create_task(rig.complete("one two three", max_tokens=80)) for _ in range(6)]
        bad = await asyncio.gather(*(rig.complete("one two three", max_tokens=80, stop=[POISON]) for _ in range(2)))
        assert {answer.json()["error"]["code"] for answer in bad} == {"TOKENIZER_LIMIT"}
        for answer in await asyncio.gather(*beside):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text(80, "one two three"), answer.text
        assert sum(fake.poisoned for fake in rig.tokenizers) <= 4


async def test_requests_that_make_progress_survive_successive_tokenizer_losses() -> None:
    # The answer takes so long that it does not end before the third loss, also on a busy machine.
    async with router_rig([FakeScheduler(step_s=0.03)], [FakeTokenizer() for _ in range(4)]) as rig:
        asked = asyncio.create_task(rig.complete("one two three", max_tokens=90))
        for _ in range(3):
            await until(lambda: any(fake.open_handles for fake in rig.tokenizers))
            (busy,) = [fake for fake in rig.tokenizers if fake.open_handles]
            steps = busy.steps
            await until(lambda fake=busy, since=steps: fake.steps > since + 3 or asked.done())  # type: ignore[misc]  # a default binds it
            await rig.tokenizer_hosts[rig.tokenizers.index(busy)].stop()
        assert (await asked).json()["choices"][0]["text"] == text(90, "one two three")
        await until(lambda: nothing_left(rig))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("mode", ["hang", "die"])
async def test_a_prompt_that_breaks_two_tokenizers_is_not_sent_to_a_third(mode: str, streams: bool) -> None:
    async with poisoned_rig(3, streams=streams) as rig:
        arm(rig, mode)
        asked = [
            asyncio.create_task(rig.complete(prompt, max_tokens=3)) for prompt in ["abc"] * 5 + [POISON] + ["abc"] * 5
        ]
        answers = await asyncio.gather(*asked)
        bad = answers.pop(5)
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "TOKENIZER_LIMIT")
        for answer in answers:
            assert answer.status_code == 200, answer.text
        assert sum(fake.poisoned for fake in rig.tokenizers) == 2


async def test_unreachable_tokenizers_do_not_count_as_poison() -> None:
    async with router_rig([FakeScheduler()], [FakeTokenizer(), FakeTokenizer()], connect_timeout_s=0.5) as rig:
        for host in rig.tokenizer_hosts:
            await host.stop()
        answer = await rig.complete("abc")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_TOKENIZER")

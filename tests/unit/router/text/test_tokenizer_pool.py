"""A unary call that lost its tokenizer is retried alone, so that no other call can cost it a second tokenizer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from quire_common.errors import Internal, QuireError, Unavailable
from quire_router.config import RouterConfig
from quire_router.text.tokenizer_pool import TokenizerPool


class Tokenizer:
    """As a TokenizerLink. What runs there ends when its test says so; `die` takes all of it along."""

    connected = True

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.healthy = True
        self.running: dict[str, asyncio.Future[str]] = {}
        self.deaths = 0

    def suspect(self) -> None:
        self.healthy = False

    async def answers(self, within_s: float) -> bool:
        return True

    async def work(self, prompt: str) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running[prompt] = future
        try:
            return await future
        finally:
            self.running.pop(prompt, None)

    def finish(self, prompt: str) -> None:
        self.running.pop(prompt).set_result(prompt)

    def die(self) -> None:
        self.deaths += 1
        self.healthy = False
        for prompt in list(self.running):
            self.running.pop(prompt).set_exception(Unavailable("TOKENIZER_LOST", "m", "f"))


class Rig:
    """Tokenizers `a`, `b` and so on."""

    def __init__(self, tokenizers: int, **options: Any) -> None:
        self.pool = TokenizerPool(RouterConfig(**options), lambda: None)
        self.tokenizers = [Tokenizer(name) for name in "abcdef"[:tokenizers]]
        self.pool.peers.update({each.instance: each for each in self.tokenizers})  # type: ignore[misc]  # fakes

    def ask(self, prompt: str) -> asyncio.Task[str]:
        async def work(peer: Any) -> str:
            return str(await peer.work(prompt))

        return asyncio.create_task(self.pool.call(work))

    def where(self, prompt: str) -> Tokenizer | None:
        return next((each for each in self.tokenizers if prompt in each.running), None)

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    def heal(self, tokenizer: Tokenizer) -> None:
        tokenizer.healthy = True
        self.pool._on_change()

    async def suspect(self, prompt: str) -> tuple[asyncio.Task[str], Tokenizer]:
        """A call that has lost a tokenizer; and the only tokenizer that is left, where it is tried again."""
        asked = self.ask(prompt)
        await self.settle()
        first = self.where(prompt)
        assert first is not None
        for other in self.tokenizers:
            if other is not first:
                other.healthy = True
        first.die()
        await self.settle()
        (left,) = [each for each in self.tokenizers if each.healthy]
        return asked, left


async def test_new_call_waits_while_a_suspect_uses_the_only_tokenizer() -> None:
    rig = Rig(2)
    suspect, left = await rig.suspect("innocent")
    fresh = [rig.ask("poison"), rig.ask("other")]
    await rig.settle()
    assert list(left.running) == ["innocent"]
    left.finish("innocent")
    assert await suspect == "innocent"
    await rig.settle()
    assert sorted(left.running) == ["other", "poison"]
    for prompt in ("poison", "other"):
        left.finish(prompt)
    assert await asyncio.gather(*fresh) == ["poison", "other"]


async def test_new_call_uses_another_tokenizer_beside_a_suspect() -> None:
    rig = Rig(2)
    suspect, left = await rig.suspect("innocent")
    (healed,) = [each for each in rig.tokenizers if each is not left]
    rig.heal(healed)
    fresh = [rig.ask(f"new {i}") for i in range(3)]
    await rig.settle()
    assert list(left.running) == ["innocent"] and len(healed.running) == 3
    for i in range(3):
        healed.finish(f"new {i}")
    left.finish("innocent")
    assert await asyncio.gather(suspect, *fresh) == ["innocent", "new 0", "new 1", "new 2"]


@pytest.mark.parametrize("code", ["COMPILE_PROCESS_FAILED", "RENDER_PROCESS_FAILED"])
async def test_tokenizer_that_refuses_one_request_is_not_lost(code: str) -> None:
    rig = Rig(1)
    asked = rig.ask("heavy")
    await rig.settle()
    rig.tokenizers[0].running.pop("heavy").set_exception(Unavailable(code, "m", "f"))
    with pytest.raises(QuireError) as caught:
        await asked
    assert caught.value.code == code and rig.pool.ready
    again = rig.ask("light")
    await rig.settle()
    rig.tokenizers[0].finish("light")
    assert await again == "light"


@pytest.mark.parametrize("code", ["TOKENIZER_DRAINING", "TOKENIZER_LOADING", "PEER_CANCELLED"])
async def test_call_goes_to_another_where_a_tokenizer_takes_none(code: str) -> None:
    rig = Rig(2)
    asked = rig.ask("a")
    await rig.settle()
    first = rig.where("a")
    assert first is not None
    first.running.pop("a").set_exception(Unavailable(code, "m", "f"))
    await rig.settle()
    second = rig.where("a")
    assert second is not None and second is not first and not first.healthy
    second.finish("a")
    assert await asked == "a"


async def test_suspect_waits_until_its_tokenizer_is_idle() -> None:
    rig = Rig(2)
    asked = {prompt: rig.ask(prompt) for prompt in ("one", "two")}
    await rig.settle()
    first, other = rig.where("one"), rig.where("two")
    assert first is not None and other is not None and first is not other
    first.die()
    await rig.settle()
    assert list(other.running) == ["two"]
    other.finish("two")
    await rig.settle()
    assert list(other.running) == ["one"]
    other.finish("one")
    assert await asyncio.gather(*asked.values()) == ["one", "two"]


async def test_suspects_and_new_calls_take_turns() -> None:
    rig = Rig(2)
    rig.tokenizers[1].healthy = False
    asked = [rig.ask(f"lost {i}") for i in range(3)]
    await rig.settle()
    rig.heal(rig.tokenizers[1])
    rig.tokenizers[0].die()
    await rig.settle()
    left = rig.tokenizers[1]
    asked.append(rig.ask("new"))
    seen = []
    while not all(each.done() for each in asked):
        await rig.settle()
        seen.append(list(left.running))
        for prompt in list(left.running):
            left.finish(prompt)
        await rig.settle()
    assert seen[:4] == [["lost 0"], ["new"], ["lost 1"], ["lost 2"]]


async def test_suspect_beside_a_long_call_gets_no_strike() -> None:
    rig = Rig(2, tokenizer_timeout_s=0.05)
    asked = {prompt: rig.ask(prompt) for prompt in ("innocent", "long")}
    await rig.settle()
    first, other = rig.where("innocent"), rig.where("long")
    assert first is not None and other is not None
    first.die()
    while "innocent" not in other.running:
        await asyncio.sleep(0.01)
    assert "long" in other.running
    rig.heal(first)
    other.die()  # of either
    await rig.settle()
    while first.running:
        (alone,) = first.running
        first.finish(alone)
        await rig.settle()
    assert await asyncio.gather(*asked.values()) == ["innocent", "long"]


async def test_new_call_waits_for_a_suspect_at_most_connect_timeout() -> None:
    rig = Rig(2, connect_timeout_s=0.3)
    suspect, left = await rig.suspect("innocent")
    fresh = [rig.ask("poison")]
    await asyncio.sleep(0.1)
    fresh.append(rig.ask("other"))
    while "poison" not in left.running:
        await asyncio.sleep(0.01)
    await rig.settle()
    assert left.running.keys() == {"innocent", "poison", "other"}
    (healed,) = [each for each in rig.tokenizers if each is not left]
    rig.heal(healed)
    left.die()
    while not all(each.done() for each in (suspect, *fresh)):
        await rig.settle()
        for prompt in list(healed.running):
            healed.finish(prompt)
    assert await asyncio.gather(suspect, *fresh) == ["innocent", "poison", "other"]


async def test_cancelled_suspect_frees_its_tokenizer() -> None:
    for waiting in (False, True):
        rig = Rig(2)
        beside = rig.ask("beside") if waiting else None
        suspect, left = await rig.suspect("gone")
        assert ("gone" in left.running) is not waiting
        fresh = rig.ask("new")
        await rig.settle()
        assert "new" not in left.running
        suspect.cancel()
        await rig.settle()
        assert "new" in left.running
        for prompt in list(left.running):
            left.finish(prompt)
        assert await fresh == "new"
        if beside is not None:
            assert await beside == "beside"


@pytest.mark.parametrize("seed", range(50))
async def test_only_poison_prompts_fail_and_each_costs_two_tokenizers(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(rng.randint(2, 4))
    poison, prompts = {f"poison {i}" for i in range(rng.randint(1, 4))}, [f"good {i}" for i in range(40)]
    order = [*prompts, *poison]
    rng.shuffle(order)
    asked: dict[str, asyncio.Task[str]] = {}
    while order or not all(each.done() for each in asked.values()):
        for _ in range(min(len(order), rng.randint(0, 4))):
            prompt = order.pop()
            asked[prompt] = rig.ask(prompt)
        for _ in range(rng.randint(1, 20)):
            await asyncio.sleep(0)
        for tokenizer in rig.tokenizers:
            if not tokenizer.healthy and rng.random() < 0.5:
                rig.heal(tokenizer)
            if poison & tokenizer.running.keys() and rng.random() < 0.5:
                tokenizer.die()
            elif tokenizer.running.keys() - poison:
                tokenizer.finish(rng.choice(sorted(tokenizer.running.keys() - poison)))
    for prompt in prompts:
        assert await asked[prompt] == prompt
    for prompt in poison:
        with pytest.raises(Internal, match="TOKENIZER_LIMIT"):
            await asked[prompt]
    assert sum(each.deaths for each in rig.tokenizers) <= 2 * len(poison)

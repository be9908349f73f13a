"""Short prompts go to a tokenizer over a standing stream, and are encoded whatever happens to the stream."""

from __future__ import annotations

import asyncio

from quire_router.text.tokenize_stream import MOST_BYTES
from tests.fakes.call_writers import call_writers
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_faults import until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler


async def until_streaming(rig: RouterRig) -> None:
    """A prompt that comes before goes by a call."""

    async def streams(fake: FakeTokenizer) -> bool:
        before = fake.streamed
        assert (await rig.complete("abc", max_tokens=3)).status_code == 200
        return fake.streamed > before

    for fake in rig.tokenizers:
        while not await streams(fake):
            await asyncio.sleep(0.01)


async def test_only_short_prompts_and_conversations_use_the_stream() -> None:
    async with router_rig() as rig:
        await until_streaming(rig)
        fake, before = rig.tokenizer, rig.tokenizer.streamed
        assert (await rig.complete("abc", max_tokens=3)).json()["choices"][0]["text"] == "abc"
        assert (await rig.chat("abc", max_tokens=3)).status_code == 200
        assert fake.streamed == before + 2
        assert (await rig.complete("a" * MOST_BYTES, max_tokens=3, truncate_prompt_tokens=8)).status_code == 200
        assert fake.streamed == before + 2


async def test_bad_prompt_on_the_stream_fails_alone() -> None:
    async with router_rig() as rig:
        await until_streaming(rig)
        asked = len(rig.tokenizer.encode_contexts)
        rig.tokenizer.hold_encode = asyncio.Event()
        other, wrong = (asyncio.ensure_future(rig.complete(text, max_tokens=3)) for text in ("abc", "a" * 60_000))
        await until(lambda: len(rig.tokenizer.encode_contexts) == asked + 2)
        rig.tokenizer.hold_encode.set()
        assert (await wrong).json()["error"]["code"] == "PROMPT_TOO_LONG"
        assert (await other).status_code == 200


async def test_client_disconnect_cancels_tokenization() -> None:
    async with router_rig() as rig:
        await until_streaming(rig)
        rig.tokenizer.hold_encode = asyncio.Event()
        asked = len(rig.tokenizer.encode_contexts)
        gone = asyncio.ensure_future(rig.complete("abc"))
        await until(lambda: len(rig.tokenizer.encode_contexts) > asked)
        gone.cancel()
        await until(lambda: len(rig.tokenizer.cancelled) == 1)
        rig.tokenizer.hold_encode.set()
        assert (await rig.complete("abc", max_tokens=3)).status_code == 200


async def test_prompt_is_encoded_by_another_tokenizer_after_a_loss() -> None:
    async with router_rig([FakeScheduler()], [FakeTokenizer(), FakeTokenizer()]) as rig:
        await until_streaming(rig)
        for fake in rig.tokenizers:
            fake.hold_encode = asyncio.Event()
        before = [len(fake.encode_contexts) for fake in rig.tokenizers]
        asked = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        await until(lambda: [len(fake.encode_contexts) for fake in rig.tokenizers] != before)
        holder = next(n for n, fake in enumerate(rig.tokenizers) if len(fake.encode_contexts) > before[n])
        if (held := rig.tokenizers[1 - holder].hold_encode) is not None:
            held.set()
        await rig.tokenizer_hosts[holder].stop()
        assert (await asked).json()["choices"][0]["text"] == "abc"
        await rig.tokenizer_hosts[holder].start()
        rig.tokenizers[holder].hold_encode = None
        await until_streaming(rig)


async def test_tokenizer_without_the_stream_gets_unary_calls() -> None:
    async with router_rig(tokenizers=[FakeTokenizer(streams=False)]) as rig:
        for _ in range(3):
            assert (await rig.complete("abc", max_tokens=3)).json()["choices"][0]["text"] == "abc"
        assert rig.tokenizer.streamed == 0


async def test_hanging_stream_is_replaced_and_unary_calls_serve_meanwhile() -> None:
    async with router_rig(tokenizer_timeout_s=0.3) as rig:
        await until_streaming(rig)
        fake = rig.tokenizer
        fake.mute = True
        for ask in (rig.complete, rig.chat):
            opened = fake.opened
            assert (await ask("abc", max_tokens=3)).status_code == 200
            await until(lambda opened=opened: fake.opened > opened)  # type: ignore[misc]  # a lambda's default
            await asyncio.sleep(0.1)  # the new one is open, most likely: else there was nothing to hang
        fake.mute = False
        await until_streaming(rig)
        assert all(peer.healthy for peer in rig.router.pool.peers.values())


async def test_tokenizer_upgraded_to_the_stream_is_used_by_stream() -> None:
    async with router_rig(tokenizers=[FakeTokenizer(streams=False)]) as rig:
        assert (await rig.complete("abc", max_tokens=3)).status_code == 200
        await rig.tokenizer_hosts[0].stop()
        rig.tokenizer.streams = True
        await rig.tokenizer_hosts[0].start()
        await until_streaming(rig)


async def test_empty_tokenizer_answer_is_an_error() -> None:
    async with router_rig() as rig:
        await until_streaming(rig)
        rig.tokenizer.blank = True
        for ask in (rig.complete, rig.chat):
            answer = await ask("abc", max_tokens=3)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "INTERNAL")


async def test_lost_peers_leave_no_writer_tasks() -> None:
    async with router_rig() as rig:
        await until_streaming(rig)
        before = call_writers()
        assert before >= 3
        for host in (*rig.tokenizer_hosts, *rig.scheduler_hosts):
            await host.stop()
        await until(lambda: call_writers() == 0)
        for host in (*rig.tokenizer_hosts, *rig.scheduler_hosts):
            await host.start()
        await until_streaming(rig)
        await until(lambda: call_writers() == before)

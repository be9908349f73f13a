"""Streams that break: a client goes on where it was, and its caller sees one answer."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from quire import Aborted, AsyncClient, BeamSearchParams, Client, SamplingParams, Unavailable, Usage
from quire.columns import unpack_i32
from quire.generate_call import GenerateCall
from tests.fakes.router.fake_router import FakeRouter

Fake = tuple[FakeRouter, str]


def test_a_stream_that_breaks_goes_on(fake: Fake) -> None:
    router, address = fake
    router.breaks = [3, 0, 2]
    with Client(address) as client:
        deltas = list(client.generate("hi", SamplingParams(max_tokens=8, seed=5), return_token_ids=True))
    assert [delta.text for delta in deltas] == [f"{i} " for i in range(8)]
    assert [token for delta in deltas for token in delta.token_ids] == list(range(8))
    assert [bool(delta.prompt_token_ids) for delta in deltas] == [True] + [False] * 7
    resumes = [(unpack_i32(r.resume.output_ids), r.resume.characters) for r in router.requests]
    assert resumes == [([], 0), ([0, 1, 2], 6), ([0, 1, 2], 6), ([0, 1, 2, 3, 4], 10)]
    assert {r.sampling.seed for r in router.requests} == {5} and len({r.request_id for r in router.requests}) == 1
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == 8


def test_a_seed_that_nobody_gave_stays_the_same(fake: Fake) -> None:
    router, address = fake
    router.breaks = [1]
    with Client(address) as client:
        first = client.complete("hi", SamplingParams(max_tokens=3))
        client.complete("hi", SamplingParams(max_tokens=3))
    seeds = [r.sampling.seed for r in router.requests]
    assert first.outputs[0].text == "0 1 2 " and seeds[0] == seeds[1] != seeds[2]


async def test_choices_are_taken_up_one_by_one(fake: Fake) -> None:
    router, address = fake
    router.breaks = [4, 1]  # the first choice has ended, the second is in its middle, the third has not begun
    async with AsyncClient(address) as client:
        output = await client.complete("hi", SamplingParams(max_tokens=3, n=3, logprobs=0))
    assert [choice.text for choice in output.outputs] == ["0 1 2 "] * 3 and output.finished
    assert [choice.token_ids for choice in output.outputs] == [[0, 1, 2]] * 3
    assert [len(choice.logprobs or ()) for choice in output.outputs] == [3, 3, 3]
    assert [(r.n, r.sampling.sample) for r in router.requests] == [(3, 0), (1, 1), (1, 1), (1, 2)]
    assert output.usage is not None and (output.usage.prompt_tokens, output.usage.completion_tokens) == (2, 9)


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=3, n=2, best_of=4), BeamSearchParams(beam_width=2, max_tokens=3)], ids=repr
)
def test_what_is_told_at_once_is_not_taken_up(fake: Fake, params: SamplingParams | BeamSearchParams) -> None:
    """The second of the likeliest is no sample of its own."""
    router, address = fake
    router.breaks = [2]
    with Client(address) as client, pytest.raises(Unavailable):
        client.complete("hi", params)
    assert len(router.requests) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_complete_answer_whose_connection_breaks_before_its_usage_is_no_error(fake: Fake, n: int) -> None:
    router, address = fake
    router.usage_apart = True
    router.breaks = [3 * n, 3 * n]
    params = SamplingParams(max_tokens=3, n=n)
    with Client(address) as client:
        deltas = list(client.generate("hi", params))
    assert [delta.usage for delta in deltas[:-1]] == [None] * 3 * n
    assert (deltas[-1].text, deltas[-1].finish_reason, deltas[-1].usage) == ("", None, Usage(2, 3 * n, 0))
    async with AsyncClient(address) as other:
        output = await other.complete("hi", params)
    assert [choice.token_ids for choice in output.outputs] == [[0, 1, 2]] * n and output.finished
    assert output.usage == Usage(2, 3 * n, 0) and len(router.requests) == 2


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=3, n=2, best_of=4), SamplingParams(max_tokens=3, n=2)], ids=repr
)
async def test_answer_whose_connection_breaks_after_its_usage_is_no_error(fake: Fake, params: SamplingParams) -> None:
    router, address = fake
    router.breaks = [6, 6]
    with Client(address) as client:
        deltas = list(client.generate("hi", params))
    assert len(deltas) == 6 and [delta.usage is not None for delta in deltas] == [False] * 5 + [True]
    async with AsyncClient(address) as other:
        output = await other.complete("hi", params)
    assert output.finished and output.usage == deltas[-1].usage and len(router.requests) == 2


def test_resumed_answer_without_a_last_usage_counts_all_choices(fake: Fake) -> None:
    router, address = fake
    router.usage_apart = True
    # The first choice gets its usage; that of the second is lost.
    router.breaks = [1, 10, 3]
    with Client(address) as client:
        output = client.complete("hi", SamplingParams(max_tokens=3, n=2))
    assert [choice.token_ids for choice in output.outputs] == [[0, 1, 2]] * 2 and output.finished
    assert output.usage == Usage(2, 6, 0) and len(router.requests) == 3


def test_what_never_began_fails_at_once_and_patience_ends(fake: Fake) -> None:
    router, address = fake
    router.breaks = [0]
    with Client(address) as client, pytest.raises(Unavailable):
        client.complete("hi")
    assert len(router.requests) == 1
    router.breaks = [1, *[0] * 50]
    with Client(address, reconnect_s=2.0) as client, pytest.raises(Unavailable, match="Socket closed"):
        client.complete("hi")
    assert 3 <= len(router.requests) - 1 < 12


@pytest.mark.parametrize("code", ["NO_HEALTHY_REPLICA", "NO_TOKENIZER", "DRAINING"])
def test_a_router_that_has_just_started_is_asked_again(fake: Fake, code: str) -> None:
    """The router knows no replica yet, and soon will."""
    router, address = fake
    router.breaks, router.breaks_with = [3, 0, 0], code
    with Client(address) as client:
        output = client.complete("hi", SamplingParams(max_tokens=8, seed=5))
    assert output.outputs[0].text == "".join(f"{i} " for i in range(8))
    assert len(router.requests) == 4


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=3, n=2, best_of=4), SamplingParams(max_tokens=3)], ids=repr
)
async def test_a_call_that_a_leaving_router_refused_is_sent_again(fake: Fake, params: SamplingParams) -> None:
    router, address = fake
    router.refusals = ["DRAINING", "CANCELLED"]
    async with AsyncClient(address) as client:
        output = await client.complete("hi", params)
    assert output.outputs[0].text == "0 1 2 "
    assert len(router.requests) == 3 and len({request.request_id for request in router.requests}) == 1
    assert not any(request.HasField("resume") for request in router.requests)
    router.refusals = ["DRAINING"] * 50
    with Client(address, reconnect_s=0.5) as client, pytest.raises(Unavailable, match="DRAINING"):
        client.complete("hi", params)


async def test_a_call_that_is_cancelled_after_it_began_is_not_sent_again(fake: Fake) -> None:
    """The call has no response yet, and may have run for long."""
    router, address = fake
    router.refusals = ["CANCELLED_LATER"] * 2
    with Client(address) as client, pytest.raises(Aborted, match="CANCELLED"):
        client.complete("hi")
    async with AsyncClient(address) as other:
        with pytest.raises(Aborted, match="CANCELLED"):
            await other.complete("hi")
    assert len(router.requests) == 2


@pytest.mark.parametrize("prompt", ["hang", "hang at once"])
def test_a_closed_client_ends_its_calls_and_does_not_try_again(fake: Fake, prompt: str) -> None:
    router, address = fake
    client = Client(address)

    def close_in_answer() -> None:
        while not router.requests:
            time.sleep(0.01)
        time.sleep(0.3)
        client.close()

    closer = threading.Thread(target=close_in_answer, daemon=True)
    closer.start()
    with pytest.raises(Aborted, match=r"CLIENT_CLOSED: .*closed before the answer"):
        client.complete(prompt)
    closer.join()
    assert len(router.requests) == 1
    with pytest.raises(Aborted, match="CLIENT_CLOSED"):
        client.complete("hi")


@pytest.mark.parametrize("prompt", ["hang", "hang at once"])
async def test_a_closed_async_client_ends_its_calls_and_cancels_no_task(fake: Fake, prompt: str) -> None:
    router, address = fake
    client = AsyncClient(address)

    async def close_in_answer() -> None:
        while not router.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await client.close()

    closer = asyncio.create_task(close_in_answer())
    with pytest.raises(Aborted, match=r"CLIENT_CLOSED: .*closed before the answer"):
        await client.complete(prompt)
    await closer
    assert len(router.requests) == 1
    with pytest.raises(Aborted, match="CLIENT_CLOSED"):
        await client.complete("hi")


async def test_a_cancelled_call_of_an_async_client_stays_cancelled(fake: Fake) -> None:
    async with AsyncClient(fake[1]) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.complete("hang")


class LongPauses:
    """Pauses before a call is sent again last for a minute; `pausing` is set as one begins."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pausing = threading.Event()
        patch.setattr(GenerateCall, "_pause_s", self._pause_s)

    def _pause_s(self) -> float:
        self.pausing.set()
        return 60.0


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> LongPauses:
    return LongPauses(monkeypatch)


def test_closing_a_client_ends_the_pause_before_a_call_is_sent_again(fake: Fake, long_pauses: LongPauses) -> None:
    router, address = fake
    router.breaks = [1]
    client = Client(address)

    def close_in_pause() -> None:
        long_pauses.pausing.wait(20)
        client.close()

    closer = threading.Thread(target=close_in_pause)
    closer.start()
    began_s = time.monotonic()
    with pytest.raises(Aborted, match="CLIENT_CLOSED"):
        client.complete("hi")
    assert time.monotonic() - began_s < 20 and len(router.requests) == 1
    closer.join()


async def test_closing_an_async_client_ends_the_pause_before_a_call_is_sent_again(
    fake: Fake, long_pauses: LongPauses
) -> None:
    router, address = fake
    router.breaks = [1]
    client = AsyncClient(address)
    call = asyncio.create_task(client.complete("hi"))
    assert await asyncio.to_thread(long_pauses.pausing.wait, 20)
    await client.close()
    async with asyncio.timeout(20):
        with pytest.raises(Aborted, match="CLIENT_CLOSED"):
            await call
    assert len(router.requests) == 1


def test_an_error_of_the_request_is_not_tried_again(fake: Fake) -> None:
    router, address = fake
    with Client(address) as client, pytest.raises(Unavailable, match="ENGINE_LOST"):
        client.complete("fail later")
    assert len(router.requests) == 1


def test_no_text_where_none_is_wanted(fake: Fake) -> None:
    router, address = fake
    router.breaks = [2]
    with Client(address) as client:
        output = client.complete("hi", SamplingParams(max_tokens=3, detokenize=False))
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == [0, 1, 2]
    assert router.requests[1].resume.characters == 4

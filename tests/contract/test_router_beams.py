"""Beam search against a plain search of the same little language model, and what it refuses."""

from __future__ import annotations

import asyncio
import itertools
import math
import zlib
from typing import Any

import pytest

from quire.v1 import scheduler_pb2 as pb
from quire_common.columns import i32, pack_f32, pack_i32
from tests.fakes.fake_scheduler import EOS, FakeScheduler
from tests.fakes.router_rig import router_rig

LETTERS = [*b"abc", EOS]
WIDTH = 2


def logprobs(tokens: tuple[int, ...]) -> dict[int, float]:
    """Of what may follow: depends on all that was before."""
    weights = {t: 1 + zlib.crc32(bytes(str((tokens, t)), "ascii")) % 50 for t in LETTERS}
    total = sum(weights.values())
    return {t: math.log(w / total) for t, w in weights.items()}


class LittleModel(FakeScheduler):
    """Answers one token with the best alternatives of `logprobs`."""

    def _step(self, mine: dict[int, Any]) -> pb.SessionResponse:
        handles, tokens, tops, values, counts = [], [], [], [], []
        for handle, run in list(mine.items()):
            asked = run.submit.sequence.sampling.logprobs
            ranked = sorted(logprobs(tuple(run.prompt)).items(), key=lambda item: -item[1])[:asked]
            handles.append(handle)
            tokens.append(ranked[0][0])
            counts.append(len(ranked))
            tops += [token for token, _ in ranked]
            values += [value for _, value in ranked]
            del mine[handle]
            self.running.pop(handle, None)
        message = pb.SessionResponse(
            handle=pack_i32(handles),
            count=pack_i32([1] * len(handles)),
            token=pack_i32(tokens),
            finish=b"\2" * len(handles),
        )
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        message.logprobs.token_index = pack_i32(range(len(handles)))
        message.logprobs.logprob = pack_f32([values[i] for i in firsts])
        message.logprobs.rank = pack_i32([1] * len(handles))
        message.logprobs.top_count = pack_i32(counts)
        message.logprobs.top_id = pack_i32(tops)
        message.logprobs.top_logprob = pack_f32(values)
        return message


def searched(
    prompt: bytes, width: int, steps: int, penalty: float, *, ignore_eos: bool = False
) -> list[tuple[int, ...]]:
    """As vLLM does it, with nothing clever."""

    def score(beam: tuple[tuple[int, ...], float]) -> float:
        ids, total = beam
        found: float = total / float(len(prompt) + len(ids) - (ids[-1] == EOS and not ignore_eos)) ** float(penalty)
        return found

    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for _ in range(steps):
        grown: list[tuple[tuple[int, ...], float]] = []
        for ids, total in live:
            ranked = sorted(logprobs((*prompt, *ids)).items(), key=lambda item: -item[1])[: 2 * width]
            for token, logprob in ranked:
                new = ((*ids, token), total + logprob)
                (ended if token == EOS and not ignore_eos else grown).append(new)
        live = sorted(grown, key=score, reverse=True)[:width]
    return [ids for ids, _ in sorted([*ended, *live], key=score, reverse=True)[:width]]


@pytest.mark.parametrize(
    ("prompt", "steps", "penalty"), list(itertools.product([b"a", b"bca"], [1, 2, 5], [1.0, 0.0, 2.5]))
)
async def test_the_search_finds_what_a_plain_one_finds(prompt: bytes, steps: int, penalty: float) -> None:
    async with router_rig([LittleModel()]) as rig:
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": steps, "length_penalty": penalty}
        answer = await rig.complete(prompt.decode(), return_token_ids=True, **fields)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        wanted = searched(prompt, WIDTH, steps, penalty)
        assert [tuple(choice["token_ids"]) for choice in told["choices"]] == wanted
        for choice, ids in zip(told["choices"], wanted, strict=True):
            assert choice["finish_reason"] == ("stop" if ids[-1] == EOS else "length")
            assert choice["text"] == bytes(i for i in ids if i != EOS).decode()
        assert told["usage"]["completion_tokens"] == sum(map(len, wanted))
        assert told["usage"]["prompt_tokens"] == len(prompt)
        assert rig.router.admission.inside == 0


async def test_logprobs_of_beams() -> None:
    async with router_rig([LittleModel()]) as rig:
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
        scored = await rig.complete("a", echo=True, **fields)
        assert scored.json()["error"]["message"].startswith("prompt_logprobs with use_beam_search")
        assert (await rig.complete("a", **{**fields, "echo": True, "logprobs": None})).json()["choices"][0]["text"][
            0
        ] == "a"
        told = (await rig.complete(["a", "b"], skip_special_tokens=False, **fields)).json()
        for number, prompt in enumerate((b"a", b"b")):
            for choice, ids in zip(
                told["choices"][2 * number :], searched(prompt, WIDTH, 3, 1.0, ignore_eos=True), strict=False
            ):
                given = choice["logprobs"]["token_logprobs"]
                wanted = [logprobs((*prompt, *ids[:i]))[token] for i, token in enumerate(ids)]
                assert given == pytest.approx(wanted, abs=1e-5)


async def test_a_chat_is_searched_too() -> None:
    async with router_rig([LittleModel()]) as rig:
        told = (await rig.chat("a", use_beam_search=True, n=3, max_tokens=4)).json()
        prompt = b"user: a\nassistant: "
        texts = [bytes(i for i in ids if i != EOS).decode() for ids in searched(prompt, 3, 4, 1.0)]
        assert [choice["message"]["content"] for choice in told["choices"]] == texts


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stop": "x"},
        {"presence_penalty": 1},
        {"min_tokens": 1},
        {"best_of": 3},
        {"bad_words": ["a"]},
        {"n": 128 + 1},
    ],
    ids=str,
)
async def test_what_a_search_cannot_honour_is_refused(fields: dict[str, Any]) -> None:
    async with router_rig([LittleModel()], max_n=500) as rig:
        answer = await rig.complete("a", use_beam_search=True, max_tokens=2, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "PARAMETER_UNSUPPORTED")
        assert not rig.scheduler.submits


async def test_a_search_has_its_places_and_its_time() -> None:
    async with router_rig([LittleModel()], max_concurrent_requests=3) as rig:
        rig.scheduler.gate.clear()
        running = asyncio.ensure_future(rig.complete("a", use_beam_search=True, n=3, max_tokens=3, timeout_s=1.0))
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        assert rig.router.admission.inside == 3
        assert (await rig.complete("a", max_tokens=1)).status_code == 429
        late = await running
        assert (late.status_code, late.json()["error"]["code"]) == (504, "REQUEST_TIMEOUT")
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 60)
        assert rig.router.admission.inside == 0


async def test_a_search_goes_on_when_its_engine_is_lost() -> None:
    async with router_rig([LittleModel(), LittleModel()]) as rig:
        for fake in rig.schedulers:
            fake.gate.clear()
        running = asyncio.ensure_future(
            rig.complete("a", use_beam_search=True, n=2, max_tokens=4, return_token_ids=True)
        )
        async with asyncio.timeout(60):
            while not any(fake.running for fake in rig.schedulers):
                await asyncio.sleep(0.01)
        lost = next(fake for fake in rig.schedulers if fake.running)
        for fake in rig.schedulers:
            if fake is not lost:
                fake.gate.set()
        lost.break_sessions()
        lost.gate.set()
        told = (await running).json()
        assert [tuple(choice["token_ids"]) for choice in told["choices"]] == searched(b"a", 2, 4, 1.0)
        assert i32(rig.scheduler.submits[0].sequence.inputs[0].token_ids).tolist() == [97]

"""Beam search agrees with a plain search of a small language model, and refuses what it does not support."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import threading
import zlib
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.v1 import common_pb2 as pb_common
from quire.v1 import inference_pb2 as ib
from quire.v1 import scheduler_pb2 as pb
from quire_common.columns import i32, pack_f32, pack_i32
from quire_common.telemetry import tracing
from quire_router.front.http.formats.completion_format import CompletionFormat
from quire_router.limits.rate_limits import RateLimits
from quire_router.requests import generation
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import EOS, FakeScheduler

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
async def test_beam_search_matches_a_plain_search(prompt: bytes, steps: int, penalty: float) -> None:
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


async def test_rendered_beam_search_gives_the_same_answer() -> None:
    async with router_rig([LittleModel()]) as rig:
        body = {"prompt": "bca", "use_beam_search": True, "n": WIDTH, "max_tokens": 5, "length_penalty": 2.5}
        (rendered,) = (await rig.http.post("/v1/completions/render", json=body)).json()
        answer = await rig.http.post("/inference/v1/generate", json=rendered)
        assert answer.status_code == 200, answer.text
        told = [tuple(choice["token_ids"]) for choice in answer.json()["choices"]]
        assert told == searched(b"bca", WIDTH, 5, 2.5) != searched(b"bca", WIDTH, 5, 1.0)


async def test_beams_have_logprobs() -> None:
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


async def test_token_bytes_are_requested_only_for_returned_logprobs() -> None:
    """Each step asked for those of all alternatives of all beams."""
    async with router_rig([LittleModel()]) as rig:
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "ignore_eos": True}
        assert (await rig.complete("a", **fields)).status_code == 200
        assert rig.tokenizer.token_bytes_calls == 0
        assert (await rig.complete("a", logprobs=1, **fields)).status_code == 200
        assert rig.tokenizer.token_bytes_calls


@pytest.mark.parametrize(("most", "in_loop"), [(1, False), (1 << 20, True)])
async def test_large_beam_answers_are_written_in_a_thread(
    most: int, in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    document = CompletionFormat.document

    def noted(self: CompletionFormat, deltas: Any) -> bytes:
        threads.append(threading.get_ident())
        return document(self, deltas)

    monkeypatch.setattr(CompletionFormat, "document", noted)
    monkeypatch.setattr(generation, "MOST_VALUES", most)
    async with router_rig([LittleModel()]) as rig:
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "logprobs": 1}
        assert (await rig.complete("a", **fields)).status_code == 200
    assert [thread == threading.get_ident() for thread in threads] == [in_loop]


async def test_chat_supports_beam_search() -> None:
    async with router_rig([LittleModel()]) as rig:
        told = (await rig.chat("a", use_beam_search=True, n=3, max_tokens=4)).json()
        prompt = b"user: a\nassistant: "
        texts = [bytes(i for i in ids if i != EOS).decode() for ids in searched(prompt, 3, 4, 1.0)]
        assert [choice["message"]["content"] for choice in told["choices"]] == texts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("stop", "x"),
        ("presence_penalty", 1),
        ("allowed_token_ids", [97]),
        ("min_tokens", 1),
        ("best_of", 3),
        ("bad_words", ["a"]),
        ("n", 128 + 1),
    ],
)
async def test_parameters_unsupported_with_beam_search_are_refused_by_name(name: str, value: Any) -> None:
    async with router_rig([LittleModel()], max_n=500) as rig:
        answer = await rig.complete("a", use_beam_search=True, max_tokens=2, **{name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "PARAMETER_UNSUPPORTED", name)
        assert not rig.scheduler.submits


async def test_beam_search_counts_towards_concurrency_and_obeys_its_timeout() -> None:
    async with router_rig([LittleModel()], max_concurrent_requests=3) as rig:
        rig.scheduler.gate.clear()
        running = asyncio.ensure_future(rig.complete("a", use_beam_search=True, n=3, max_tokens=3, timeout_s=3.0))
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        assert rig.router.admission.inside == 3
        assert (await rig.complete("a", max_tokens=1)).status_code == 429
        late = await running
        assert (late.status_code, late.json()["error"]["code"]) == (504, "REQUEST_TIMEOUT")
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 60)
        assert rig.router.admission.inside == 0


@pytest.mark.parametrize("way", ["pause", "drain"])
async def test_running_beam_search_completes_during_drain_and_pause(way: str) -> None:
    async with router_rig([LittleModel()]) as rig:
        rig.scheduler.gate.clear()
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 4, "return_token_ids": True}
        running = asyncio.ensure_future(rig.complete("a", **fields))
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        closing = asyncio.ensure_future(rig.router.admission.close(60)) if way == "drain" else None
        rig.router.admission.pause()
        await asyncio.sleep(0)
        rig.scheduler.gate.set()
        answer = await running
        assert answer.status_code == 200, answer.text
        assert [tuple(choice["token_ids"]) for choice in answer.json()["choices"]] == searched(b"a", WIDTH, 4, 1.0)
        if closing is not None:
            await asyncio.wait_for(closing, 30)
        assert rig.router.admission.inside == 0
        assert (await rig.complete("a", max_tokens=1)).status_code == 503


async def counts(rig: RouterRig) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in (await rig.http.get("/metrics")).text.split("\n")]
    plain = [(re.sub(r'{model_name="fake"}|,?model_name="fake",?', "", name), value) for name, _, value in lines]
    return {name.removeprefix("quire_router_"): float(value) for name, value in plain if name[:1] not in ("", "#")}


async def test_beam_search_is_counted_once_in_the_metrics() -> None:
    async with router_rig([LittleModel()]) as rig:
        before = await counts(rig)
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "ignore_eos": True}
        assert (await rig.complete(["ab", "abc"], **fields)).status_code == 200
        after = await counts(rig)
        grown = {name: after[name] - before.get(name, 0.0) for name in after}
        assert grown["prompt_tokens_total"] == grown["request_prompt_tokens_sum"] == 5
        assert grown["generation_tokens_total"] == grown["request_generation_tokens_sum"] == 2 * WIDTH * 3
        for name in ("request_prompt_tokens", "time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert grown[f"{name}_count"] == 1, name
        ends = {name: by for name, by in grown.items() if name.startswith("sequences_finished_total") and by}
        assert ends == {'sequences_finished_total{finished_reason="length"}': 2 * WIDTH}
        assert len(rig.scheduler.submits) == 2 * (1 + WIDTH + WIDTH)


async def test_beam_search_is_charged_for_prompt_and_returned_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(RateLimits, "charge", lambda self, tenant, tokens: charged.append(tokens))
    async with router_rig([LittleModel()]) as rig:
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "ignore_eos": True}
        usage = (await rig.complete(["ab", "abc"], **fields)).json()["usage"]
        assert charged == [5, 2 * WIDTH * 3] == [usage["prompt_tokens"], usage["completion_tokens"]]
        charged.clear()
        # One that is cut off has come to as much as its beams are long.
        rig.scheduler.gate.clear()
        late = asyncio.ensure_future(rig.complete("ab", timeout_s=3.0, **fields))
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        assert (await late).status_code == 504 and charged == [2, 0]


async def test_each_part_of_a_beam_search_carries_the_time_that_the_request_has_left() -> None:
    async with router_rig([LittleModel()]) as rig:
        rig.scheduler.gate.clear()
        fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "ignore_eos": True, "timeout_s": 60.0}
        running = asyncio.ensure_future(rig.complete("ab", **fields))
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        await asyncio.sleep(0.5)
        rig.scheduler.gate.set()
        assert (await running).status_code == 200
        first, *later = (submit.context.time_left_ms for submit in rig.scheduler.submits)
        assert 0 < first <= 60_000 and len(later) == 2 * WIDTH
        assert all(0 < left_ms <= first - 500 for left_ms in later)
        assert 0 < rig.tokenizer.encode_contexts[0].time_left_ms <= 60_000


async def test_beam_search_over_grpc_matches_a_plain_search() -> None:
    async with router_rig([LittleModel()]) as rig:
        sampling = pb_common.SamplingParams(logprobs=1)
        request = ib.GenerateRequest(
            text="bca", n=WIDTH, max_tokens=5, return_token_ids=True, sampling=sampling, beam_search=ib.BeamSearch()
        )
        request.beam_search.length_penalty = 2.5
        responses = [response async for response in rig.inference.Generate(request)]
        wanted = searched(b"bca", WIDTH, 5, 2.5)
        assert [tuple(i32(response.token_ids).tolist()) for response in responses] == wanted
        assert [response.index for response in responses] == [0, 1]
        assert i32(responses[0].prompt_token_ids).tolist() == [*b"bca"] and not responses[1].prompt_token_ids
        for response, ids in zip(responses, wanted, strict=True):
            assert response.text == bytes(i for i in ids if i != EOS).decode()
            assert response.finish_reason == (
                pb_common.FINISH_REASON_STOP if ids[-1] == EOS else pb_common.FINISH_REASON_LENGTH
            )
            told = [logprobs((*b"bca", *ids[:i]))[token] for i, token in enumerate(ids)]
            assert [entry.logprob for entry in response.logprobs] == pytest.approx(told, abs=1e-5)
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, sum(map(len, wanted)))
        assert not responses[0].HasField("usage") and rig.router.admission.inside == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": ["x"]}, "stop with use_beam_search"),
        ({"best_of": 3}, "best_of with use_beam_search"),
        ({"resume": ib.Resume(output_ids=pack_i32([97]))}, "resume with beam_search"),
        ({"beam_search": ib.BeamSearch(length_penalty=11)}, "length_penalty is 11"),
        ({"beam_search": ib.BeamSearch(length_penalty=float("nan"))}, "length_penalty is nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_parameters_unsupported_with_beam_search_are_refused_over_grpc(fields: dict[str, Any], says: str) -> None:
    async with router_rig([LittleModel()]) as rig:
        request = ib.GenerateRequest(**{"text": "a", "max_tokens": 3, "beam_search": ib.BeamSearch(), **fields})
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            [_ async for _ in rig.inference.Generate(request)]
        assert not rig.scheduler.submits


async def test_beam_search_steps_are_child_spans_of_one_span() -> None:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("router", "test", "", processor=SimpleSpanProcessor(exporter))
    try:
        async with router_rig([LittleModel()]) as rig:
            fields = {"use_beam_search": True, "n": WIDTH, "max_tokens": 3, "ignore_eos": True}
            assert (await rig.complete("a", **fields)).status_code == 200
        spans = exporter.get_finished_spans()
    finally:
        tracing.shutdown_tracing()
    (root,) = (span for span in spans if span.name == "router.beams")
    steps = [span for span in spans if span.name == "router.step"]
    assert len(steps) == 3 and not any(span.name == "router.request" for span in spans)
    assert root.context is not None
    assert {step.parent.span_id for step in steps if step.parent is not None} == {root.context.span_id}
    assert root.attributes is not None and root.attributes["gen_ai.usage.output_tokens"] == WIDTH * 3


async def test_beam_search_continues_after_its_engine_is_lost() -> None:
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

"""Requests outlive their engines: clients get the same answer whatever happens to a scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.columns import i32
from quire_common.errors import Overloaded
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_faults import (
    PROMPT,
    WAIT_S,
    chunks_of,
    endpoints,
    held,
    host_of,
    joined,
    nothing_left,
    pair,
    release,
    running,
    submits,
    text,
    until,
)
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler


async def drop(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.break_sessions()


async def die(rig: RouterRig, fake: FakeScheduler) -> None:
    await host_of(rig, fake).stop()


async def go_silent(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.hang()


async def fall_behind(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.break_sessions(Overloaded("SESSION_TOO_SLOW", "Too slow.", "Read faster."))


async def lose_worker(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.fail_all("WORKER_LOST")


async def lose_pages(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.fail_all("PAGES_LOST", grpc.StatusCode.INTERNAL)


async def fail_step(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.fail_all("STEP_FAILED", grpc.StatusCode.INTERNAL)


async def confuse_pages(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.fail_all("PAGE_TAKEN", grpc.StatusCode.FAILED_PRECONDITION)


async def cut_drain_short(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.set_phase("draining")
    fake.fail_all("DRAINING")


async def leave_discovery(rig: RouterRig, fake: FakeScheduler) -> None:
    rig.router.fleet.update([e for e in endpoints(rig) if e.address != host_of(rig, fake).address])


FAULTS = [
    drop,
    die,
    go_silent,
    fall_behind,
    lose_worker,
    lose_pages,
    fail_step,
    confuse_pages,
    cut_drain_short,
    leave_discovery,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_stream_continues_on_another_engine(fault: Any) -> None:
    options = {"heartbeat_ms": 100, "cached_tokens": 3, "step_s": 0.002}
    async with router_rig(pair(**options), replica_timeout_s=0.4) as rig:
        usage = {"stream_options": {"include_usage": True}}
        async with held(rig, 20, logprobs=1, **usage) as rest:
            first = running(rig)
            (other,) = [fake for fake in rig.schedulers if fake is not first]
            other.cached_tokens = 17
            await fault(rig, first)
            await until(lambda: bool(other.running))
            release(rig)
            chunks = await rest()
        await until(lambda: len(other.submits) == 1)
        before, after = first.submits[0], other.submits[0]
    *chunks, last = chunks
    assert joined(chunks) == text(200)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 200 and last["usage"]["prompt_tokens"] == len(PROMPT.encode())
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 3  # as the first engine had it
    logprobs = [c["choices"][0]["logprobs"] for c in chunks]
    assert [value for entry in logprobs for value in entry["token_logprobs"]] == [-1.0 - i for i in range(200)]
    offsets = [value for entry in logprobs for value in entry["text_offset"]]
    assert offsets == [len(text_of_bytes(i)) for i in range(200)]
    emitted = i32(after.sequence.output_ids).tolist()
    data = PROMPT.encode()
    assert len(emitted) >= 20 and emitted == [data[i % len(data)] for i in range(len(emitted))]
    assert (before.context.attempt, after.context.attempt) == (0, 1)
    assert before.handle != after.handle
    assert after.context.request_id == before.context.request_id
    assert after.sequence.sampling == before.sequence.sampling and after.sequence.stop == before.sequence.stop


def text_of_bytes(count: int) -> str:
    """Whole characters of the first bytes of the answer."""
    data = PROMPT.encode()
    return (data * (count // len(data) + 1))[:count].decode("utf-8", "ignore")


async def test_whole_answer_and_grpc_stream_continue_on_another_engine() -> None:
    async with router_rig(pair(step_s=0.002), placement="least_loaded") as rig:
        call = rig.inference.Generate(ib.GenerateRequest(text=PROMPT, max_tokens=150, return_timings=True))
        whole = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=150, logprobs=0, stream_options=None))
        await until(lambda: all(fake.running and next(iter(fake.running.values())).sent > 9 for fake in rig.schedulers))
        rig.schedulers[0].break_sessions()
        answers = [answer async for answer in call]
        assert "".join(answer.text for answer in answers) == text(150)
        assert answers[-1].usage.completion_tokens == 150
        assert [a.finish_reason for a in answers if a.finish_reason] == [pb.FINISH_REASON_LENGTH]
        document = (await whole).json()
        assert document["choices"][0]["text"] == text(150)
        assert document["choices"][0]["logprobs"]["token_logprobs"] == [-1.0 - i for i in range(150)]
        assert len(submits(rig)) == 3
        metrics = (await rig.http.get("/metrics")).text
        assert 'quire_router_migrations_total{reason="session_lost"}' in metrics
        assert "quire_router_loss_detection_seconds_count" in metrics


async def test_siblings_migrate_separately_and_timings_show_it() -> None:
    async with router_rig(pair(step_s=0.002)) as rig:
        rig.http.headers["x-quire-timings"] = "1"
        async with held(rig, 12, n=4, stream_options={"include_usage": True}) as rest:
            first = running(rig)
            assert len(first.running) == 4
            kept = {handle: first.running[handle].submit.sequence.sampling.sample for handle in first.running}
            first.break_sessions()
            await until(lambda: len(submits(rig)) == 8)
            release(rig)
            chunks = await rest()
        assert [joined(chunks, index) for index in range(4)] == [text(200)] * 4
        moved = [s for s in submits(rig) if s.context.attempt == 1]
        assert sorted(s.sequence.sampling.sample for s in moved) == sorted(kept.values()) == [0, 1, 2, 3]
        assert not {s.handle for s in moved} & kept.keys()
        timings = {(t["service"], t["phase"]): t for t in chunks[-1]["quire_timings"]}
        assert timings["router", "migrate"]["count"] == 4
        runs = chunks[-1]["quire_runs"]
        assert [run["index"] for run in runs] == [0, 0, 1, 1, 2, 2, 3, 3]
        for before, after in zip(runs[::2], runs[1::2], strict=True):
            assert before["from_token"] == 0 < after["from_token"] < 200
            assert before["instance"] != after["instance"]
        assert chunks[-1]["usage"]["completion_tokens"] == 800
        await until(lambda: nothing_left(rig))


@pytest.mark.parametrize("cut", range(1, 12))
async def test_stop_string_across_a_migration_is_found(cut: int) -> None:
    """The engine breaks after `cut` tokens; the stop string lies around them."""
    async with router_rig(pair(step_s=0.002)) as rig:
        for fake in rig.schedulers:
            fake.breaks = [cut]
        for extra in {}, {"stream": True}:
            answer = await rig.complete("abcdefghij", max_tokens=60, stop=["fgh"], logprobs=0, **extra)
            if extra:
                chunks = chunks_of(answer.text)
                assert joined(chunks) == "abcde" and chunks[-1]["choices"][0]["stop_reason"] == "fgh"
            else:
                sequence = answer.json()["choices"][0]
                assert (sequence["text"], sequence["stop_reason"]) == ("abcde", "fgh")
                assert answer.json()["usage"]["completion_tokens"] == len(sequence["logprobs"]["tokens"]) == 8
        await until(lambda: nothing_left(rig))


async def test_late_messages_of_an_abandoned_engine_are_ignored() -> None:
    """The old engine comes back and speaks of what it ran: on its own session, which is all that it can do."""
    async with router_rig(pair(step_s=0.002, heartbeat_ms=100), replica_timeout_s=0.4) as rig:
        async with held(rig, 10) as rest:
            first = running(rig)
            first.old_handles = list(first.running)
            first.hang()
            (other,) = [fake for fake in rig.schedulers if fake is not first]
            await until(lambda: bool(other.running))
            first.gate.set()
            first.awake.set()
            await until(lambda: first.sessions == 2 and len(rig.router.fleet.replicas) == 2)
            await until(lambda: all(r.accepts for r in rig.router.fleet.replicas.values()))
            other.gate.set()
            chunks = await rest()
        assert joined(chunks) == text(200)
        assert not any("error" in chunk for chunk in chunks)
        assert (await rig.complete("ab", max_tokens=4)).json()["choices"][0]["text"] == "abab"


@pytest.mark.parametrize("fault", [drop, die, leave_discovery], ids=lambda fault: fault.__name__)
async def test_request_with_all_its_tokens_is_not_resubmitted(fault: Any) -> None:
    """The last token has come, but not its text, when the engine goes: nothing is submitted again."""
    async with router_rig(pair(), tokenizer_timeout_s=WAIT_S) as rig:
        rig.tokenizer.stepping.clear()
        waiting = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30, logprobs=0))
        await until(lambda: any(fake.submits and not fake.running for fake in rig.schedulers))
        (fake,) = [fake for fake in rig.schedulers if fake.submits]
        replica = rig.router.fleet.replicas[host_of(rig, fake).address]
        await until(lambda: any(sequence.engine.finish for sequence in replica.session.sequences.values()))
        await fault(rig, fake)
        await until(lambda: not replica.session.open and not replica.session.sequences)
        rig.tokenizer.stepping.set()
        answer = (await waiting).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (text(30), "length")
        assert len(answer["logprobs"]["tokens"]) == 30
        assert len(submits(rig)) == 1


async def test_request_with_a_received_stop_string_is_not_resubmitted() -> None:
    async with router_rig([FakeScheduler()], tokenizer_timeout_s=WAIT_S) as rig:
        rig.tokenizer.stepping.clear()
        waiting = asyncio.ensure_future(rig.complete("abcdef", max_tokens=3000, stop=["de"]))
        await until(lambda: any(run.sent > 20 for run in rig.scheduler.running.values()))
        rig.router.fleet.update([])
        await until(lambda: not rig.scheduler.running)
        rig.tokenizer.stepping.set()
        answer = (await waiting).json()["choices"][0]
        assert (answer["text"], answer["stop_reason"]) == ("abc", "de")


@pytest.mark.deep
@given(st.data())
# Without shrinking: each example is a whole router, and the first that fails says enough.
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_engine_failures_do_not_change_the_clients_bytes(data: st.DataObject) -> None:
    breaks = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6), label="tokens between two breaks")
    steps = data.draw(st.integers(1, 5), label="tokens per step")
    streams = data.draw(st.integers(1, 4), label="requests at once")
    stop = data.draw(st.sampled_from([None, "ee", "o\u00e9", "zzz", "\U0001f600 th"]), label="stop")
    tokenizers = data.draw(st.lists(st.integers(1, 40), max_size=2), label="steps between two tokenizers' deaths")
    asyncio.run(same_bytes(breaks, steps, streams, stop, tokenizers))


async def same_bytes(
    breaks: list[int], tokens_per_step: int, streams: int, stop: str | None, deaths: list[int]
) -> None:
    fields: dict[str, Any] = {"max_tokens": 150, "n": 2, "logprobs": 2, "return_token_ids": True}
    if stop is not None:
        fields["stop"] = [stop]

    async def ask(rig: RouterRig) -> list[Any]:
        """Every request once whole and once streamed; what was told of each choice, however it was cut."""
        requests = [rig.complete(PROMPT, **fields, stream=bool(i % 2), seed=7) for i in range(2 * streams)]
        return [told(response) for response in await asyncio.gather(*requests)]

    options = {"tokens_per_step": tokens_per_step, "step_s": 0.001}
    async with router_rig(pair(**options), [FakeTokenizer(), FakeTokenizer()], migration_limit=10) as rig:
        undisturbed = await ask(rig)
        rig.schedulers[0].breaks, rig.schedulers[1].breaks = breaks[::2], breaks[1::2]
        # One tokenizer a round: a request that loses two in a row is failed (test_router_poison.py).
        for round_, steps in enumerate(deaths or (None,)):
            for number, fake in enumerate(rig.tokenizers):
                fake.break_after = steps if number == round_ else None
            assert await ask(rig) == undisturbed
        await until(lambda: nothing_left(rig))


def told(response: Any) -> Any:
    assert response.status_code == 200, response.text
    sequences: dict[int, dict[str, Any]] = {}
    documents = chunks_of(response.text) if response.text.startswith("data: ") else [response.json()]
    for document in documents:
        assert "error" not in document
        for sequence in document["choices"]:
            all_of = sequences.setdefault(sequence["index"], {"text": "", "ids": [], "logprobs": {}})
            all_of["text"] += sequence["text"]
            all_of["ids"] += sequence["token_ids"]
            for name, values in sequence["logprobs"].items():
                all_of["logprobs"].setdefault(name, []).extend(values)
            if sequence["finish_reason"]:
                all_of["end"] = (sequence["finish_reason"], sequence["stop_reason"])
    return [sequences[index] for index in sorted(sequences)]

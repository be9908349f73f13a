"""Small parts of the router: handles, admission, lengths, keys, model names, back-off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.v1 import scheduler_pb2 as sb
from quire_common.columns import pack_f32, pack_i32
from quire_common.config import describe, load_config
from quire_common.errors import (
    ConfigError,
    InvalidArgument,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from quire_router.api_keys import ApiKeys, load_api_keys
from quire_router.backoff import Backoff
from quire_router.config import RouterConfig
from quire_router.front.http.body import read_body
from quire_router.front.http.body_budget import BodyBudget
from quire_router.front.http.exchange import error_headers
from quire_router.principal import KeyLimits
from quire_router.replicas.session_codec import session_step
from quire_router.replicas.session_reducer import apply_events, apply_rows
from quire_router.requests.admission import Admission
from quire_router.requests.catalog import Catalog
from quire_router.requests.lengths import answer_length, check_prompt
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.handles import HandleCounter
from tests.unit.router.makers import MODEL, make_generation, make_job, make_sequence

# No tickets come here.
SOURCE: Any = None


def test_handles_are_unique_and_carry_the_offsets_bit() -> None:
    counter = HandleCounter(2**31 - 10)
    taken = [counter.next_handle(offsets=bool(i % 2)) for i in range(8)]
    assert len(set(taken)) == 8 and all(0 < handle < 2**31 for handle in taken)
    assert [handle & 1 for handle in taken] == [0, 1] * 4


@pytest.mark.parametrize(("delay_s", "told"), [(0.0, b"1"), (0.001, b"1"), (1.0, b"1"), (1.2, b"2"), (30.4, b"31")])
def test_retry_after_is_rounded_up(delay_s: float, told: bytes) -> None:
    assert error_headers(Overloaded("FULL", "m", "f", retry_after_s=delay_s))[0] == (b"retry-after", told)


@pytest.mark.parametrize(("length", "fits"), [("2", True), ("0" * 5000 + "2", True), ("9" * 5000, False), ("0", True)])
async def test_content_length_of_any_number_of_digits_is_compared_with_the_limit(length: str, fits: bool) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    scope = {"headers": [(b"content-length", length.encode())]}
    lease = BodyBudget(1 << 20).lease("")
    if fits:
        assert await read_body(scope, receive, 10, lease) == b"{}"
    else:
        with pytest.raises(TooLarge):
            await read_body(scope, receive, 10, lease)


async def test_admission_refuses_over_its_limit_and_while_closing() -> None:
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(Overloaded) as caught:
        admission.enter(2)
    assert caught.value.retry_after_s > 0
    with pytest.raises(InvalidArgument):
        admission.enter(4)
    closing = asyncio.ensure_future(admission.close(30))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        admission.enter(1)
    assert not closing.done()
    admission.leave(2)
    await closing
    assert admission.inside == 0
    stuck = Admission(3)
    stuck.enter(1)
    await stuck.close(0.01)  # gives up


async def test_admission_says_when_places_should_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("quire_router.limits.return_rate.time.monotonic", lambda: clock[0])
    admission = Admission(100)
    for _ in range(100):
        admission.enter(1)
    for _ in range(20):
        clock[0] += 0.5
        admission.leave(1)
        admission.enter(1)
    told = set()
    for _ in range(50):
        with pytest.raises(Overloaded) as caught:
            admission.enter(1)
        told.add(caught.value.retry_after_s)
    # A tenth of the places and its own, at two a second.
    assert 5.4 <= min(told) <= max(told) <= 8.3
    assert len(told) > 5, "refused clients must not return together"


def test_prompt_and_answer_must_fit_the_context() -> None:
    job = make_job()
    assert answer_length(job, 40, 100) == 60  # the rest of the context
    check_prompt(np.zeros(99, np.int32), 300, 100)
    with pytest.raises(InvalidArgument, match="maximum context length is 100 tokens, the prompt has 100"):
        check_prompt(np.zeros(100, np.int32), 300, 100)
    with pytest.raises(InvalidArgument, match="Token id 300"):
        check_prompt(np.array([300], np.int32), 300, 100)


def test_plain_keys_are_authenticated_as_separate_tenants(tmp_path: Path) -> None:
    assert ApiKeys([]).authenticate("").tenant == ""
    file = tmp_path / "keys"
    file.write_text("# ours\n one \n\ntwo\n  # theirs\n")
    keys = load_api_keys(["zero"], str(file))
    tenants = {keys.authenticate(f"Bearer {key}").tenant for key in ("zero", "one", "two")}
    assert len(tenants) == 3 and not tenants & {"zero", "one", "two"}
    for wrong in ("", "Bearer", "Bearer # ours", "Bearer # theirs", "one", "Bearer \udcff"):
        with pytest.raises(Unauthenticated):
            keys.authenticate(wrong)
    file.write_text("\n# none\n")
    for path in (str(file), str(tmp_path / "absent")):
        with pytest.raises(ConfigError):
            load_api_keys([], path)


def test_models_resolve_by_served_name() -> None:
    assert Catalog((), lambda: [MODEL]).resolve("", KeyLimits()).name == "m"
    named = Catalog(("a", "b"), lambda: [MODEL])
    assert [served.name for served in named.served(KeyLimits())] == ["a", "b"]
    with pytest.raises(NotFound, match="`m` does not exist"):
        named.resolve("m", KeyLimits())
    with pytest.raises(Unavailable):
        Catalog(("a",), list).resolve("a", KeyLimits())


def test_backoff_doubles_up_to_its_bound_until_reset() -> None:
    backoff = Backoff(1.0, 4.0)
    delays = [backoff.next_delay_s() for _ in range(5)]
    for delay, step in zip(delays, (1, 2, 4, 4, 4), strict=True):
        assert step / 2 <= delay <= step
    backoff.reset()
    assert backoff.next_delay_s() <= 1


def test_api_keys_are_masked_in_the_shown_configuration() -> None:
    config = load_config(RouterConfig, "router", ["--api-key=a,b", "--schedulers=x:1,y:2"], {})
    assert config.api_key == ("a", "b") and config.schedulers == ("x:1", "y:2")
    assert describe(config)["api_key"] == "***"
    with pytest.raises(ConfigError):
        load_config(RouterConfig, "router", ["--max-body-bytes=1"], {})


def test_step_reaches_running_sequences_and_skips_ended_ones() -> None:
    job = make_job(n=2, logprobs=1)
    first, second = (make_sequence(job, DeltaQueue(), i) for i in range(2))
    message = sb.SessionResponse(
        handle=pack_i32([first.handle, 999, second.handle]),
        count=pack_i32([2, 1, 1]),
        token=pack_i32([10, 11, 12, 13]),
        finish=bytes([0, 0, 2]),
    )
    message.logprobs.token_index = pack_i32([0, 1, 2, 3])
    message.logprobs.logprob = pack_f32([-1, -2, -3, -4])
    message.logprobs.rank = pack_i32([1, 2, 1, 1])
    message.logprobs.top_count = pack_i32([1, 1, 1, 2])
    message.logprobs.top_id = pack_i32([50, 51, 52, 53, 54])
    message.logprobs.top_logprob = pack_f32([-5, -6, -7, -8, -9])
    message.admitted.add(handle=first.handle, attempt=0, cached_tokens=7)
    message.admitted.add(handle=second.handle, attempt=3, cached_tokens=9)  # of another attempt
    message.finished.add(handle=second.handle)
    sequences = {first.handle: first, second.handle: second}
    step = session_step(message)
    apply_events(step, sequences, {}, SOURCE)
    assert step.rows is not None
    gaps: list[float] = []
    apply_rows(step.rows, sequences, 5, gaps.append)
    assert gaps == [], "the first row of a sequence follows none"
    assert bytes(first.engine.output_ids) == pack_i32([10, 11]) and bytes(second.engine.output_ids) == pack_i32([13])
    assert (first.engine.finish, second.engine.finish) == (0, 2)
    assert (first.engine.cached_tokens, second.engine.cached_tokens) == (7, 0)
    assert [(e.token_id, e.logprob, e.rank, list(e.top_ids)) for e in first.engine.entries] == [
        (10, -1, 1, [50]),
        (11, -2, 2, [51]),
    ]
    assert [(e.token_id, list(e.top_ids), list(e.top_logprobs)) for e in second.engine.entries] == [
        (13, [53, 54], [-8, -9])
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_index": [0, 3]},
        {"token_index": [-1, 1]},
        {"token_index": [2, 1]},
        {"token_index": [0]},
        {"rank": [1]},
        {"top_count": [1, -1]},
        {"top_count": [1, 2]},
        {"top_id": [50]},
    ],
)
def test_logprobs_that_contradict_their_tokens_are_invalid(wrong: dict[str, list[int]]) -> None:
    message = sb.SessionResponse(handle=pack_i32([2, 4]), count=pack_i32([1, 2]), token=pack_i32([10, 11, 12]))
    columns = {"token_index": [0, 2], "rank": [1, 2], "top_count": [1, 1], "top_id": [50, 51]}
    message.logprobs.logprob, message.logprobs.top_logprob = pack_f32([-1, -2]), pack_f32([-5, -6])
    for name, values in columns.items():
        setattr(message.logprobs, name, pack_i32(values))
    assert (rows := session_step(message).rows) is not None and [handle for handle, _ in rows.entries] == [2, 4]
    for name, values in wrong.items():
        setattr(message.logprobs, name, pack_i32(values))
    with pytest.raises(InvalidArgument):
        session_step(message)


@pytest.mark.parametrize(("handles", "counts"), [([2], [1, 2]), ([2, 4], [1, 1]), ([2, 4], [4, -1])])
def test_rows_that_contradict_their_tokens_are_invalid(handles: list[int], counts: list[int]) -> None:
    message = sb.SessionResponse(handle=pack_i32(handles), count=pack_i32(counts), token=pack_i32([10, 11, 12]))
    message.logprobs.token_index = message.logprobs.rank = pack_i32([2])
    message.logprobs.logprob, message.logprobs.top_count = pack_f32([-1]), pack_i32([0])
    with pytest.raises(InvalidArgument):
        session_step(message)


def test_cached_tokens_are_those_of_the_end_not_of_the_admission() -> None:
    job = make_job(n=2)
    first, moved = (make_sequence(job, DeltaQueue(), i) for i in range(2))
    moved.engine.admit(0, 5)
    moved.engine.add_row(pack_i32([1]), 0, 1)
    moved.begin_attempt(moved.handle)
    sequences = {first.handle: first, moved.handle: moved}
    admission, end = sb.SessionResponse(), sb.SessionResponse()
    for sequence in sequences.values():
        admission.admitted.add(handle=sequence.handle, attempt=sequence.attempt, cached_tokens=64)
        end.finished.add(handle=sequence.handle).usage.cached_tokens = 16
    apply_events(session_step(admission), sequences, {}, SOURCE)
    assert (first.engine.cached_tokens, moved.engine.cached_tokens) == (64, 5)
    apply_events(session_step(end), sequences, {}, SOURCE)
    assert (first.engine.cached_tokens, moved.engine.cached_tokens) == (16, 5), "of who moved, the first engine said it"


def test_the_time_between_tokens_is_counted_once_a_row_as_its_mean() -> None:
    sequence, gaps = make_sequence(make_job(), DeltaQueue()), list[float]()
    sequences = {sequence.handle: sequence}

    def row(ids: list[int], now_ns: int) -> None:
        handle, count = pack_i32([sequence.handle]), pack_i32([len(ids)])
        rows = session_step(sb.SessionResponse(handle=handle, count=count, token=pack_i32(ids))).rows
        assert rows is not None
        apply_rows(rows, sequences, now_ns, gaps.append)

    row([10], 1_000)
    row([11, 12], 5_001_000)
    row([13], 6_001_000)
    assert gaps == pytest.approx([0.0025, 0.001])
    assert sequence.engine.seconds_per_token == pytest.approx(0.002)


@pytest.mark.parametrize(("prompt_only", "tokens"), [(False, 1), (True, 0)])
async def test_usage_of_a_job_that_generates_nothing_has_only_prompt_tokens(prompt_only: bool, tokens: int) -> None:
    generation = make_generation(replace(make_job(), prompt_only=prompt_only))
    generation.sequences[0].text.set_reasoning_tokens(1)
    generation.sequences[0].text.add_answer(1, 1, 0.0)
    usage = generation.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens) == (2, tokens, tokens)

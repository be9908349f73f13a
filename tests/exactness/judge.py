"""Serves a scenario free-running and in lockstep, and compares both with what each request gets alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.finish import FinishReason
from tests.exactness.clients import LEFT, Heard
from tests.exactness.virtual.virtual_replica import VirtualReplica, a_sequence, num_pages

if TYPE_CHECKING:
    from quire_common.sequence import Sequence
    from tests.exactness.events import Events
    from tests.exactness.scenario import Scenario
    from tests.exactness.subject import Answer, Subject


class Wrong(AssertionError):
    """An answer that is not the undisturbed one, or a life that went wrong."""


class Wanted(NamedTuple):
    """A request, and what it gets when nothing disturbs it."""

    sequence: Sequence
    answer: Answer


def judge_alone(subject: Subject, scenario: Scenario) -> Events:
    """Raise Wrong, or tell what happened in the free-running life, of which no twin is asked."""
    return _live(subject, scenario, undisturbed(subject, scenario), lockstep=False)[1]


def judge(subject: Subject, scenario: Scenario) -> Events:
    """Raise Wrong, or tell what happened in the free-running life."""
    wanted = undisturbed(subject, scenario)
    free, events = _live(subject, scenario, wanted, lockstep=False)
    plain, _ = _live(subject, scenario, wanted, lockstep=True)
    for place, heard in free.items():
        twin = plain.get(place, Heard())
        common = min(len(heard.tokens), len(twin.tokens))
        if heard.tokens[:common] != twin.tokens[:common] or heard.logprobs[:common] != twin.logprobs[:common]:
            raise Wrong(f"scenario {scenario.seed}: request {place} differs from its twin in lockstep")
    return events


def _live(
    subject: Subject, scenario: Scenario, wanted: dict[int, Wanted], *, lockstep: bool
) -> tuple[dict[int, Heard], Events]:
    mode = "in lockstep" if lockstep else "free-running"
    sequences = {place: want.sequence for place, want in wanted.items()}
    life = VirtualReplica(subject, scenario, lockstep=lockstep, sequences=sequences)
    try:
        heard = life.run()
        for place, one in heard.items():
            compare(scenario, place, one, wanted[place])
    except Exception as error:
        raise Wrong(f"scenario {scenario.seed} {mode}: {type(error).__name__}: {error}") from error
    return heard, life.events


def undisturbed(subject: Subject, scenario: Scenario) -> dict[int, Wanted]:
    """Requests by place; those with `resumed` continue from what they were answered before."""
    max_len = min(subject.scale.max_model_len, (num_pages(subject, scenario) - 1) * subject.scale.page_size)
    wanted: dict[int, Wanted] = {}
    said: dict[int | None, np.ndarray | None] = {None: None}
    for place, ask in enumerate(scenario.asks):
        if ask.follows not in said:
            continue
        sequence = a_sequence(ask, subject, said[ask.follows])
        if len(sequence.prompt_ids) >= max_len:
            continue
        answer = subject.alone(sequence, max_len)
        said[place] = np.concatenate([sequence.prompt_ids, np.array(answer.tokens, np.int32)])
        if emitted := answer.tokens[: min(ask.resumed, len(answer.tokens) - 1)]:
            sequence = replace(sequence, output_ids=np.array(emitted, np.int32))
            logprobs = answer.logprobs and answer.logprobs[len(emitted) :]
            answer = answer._replace(tokens=answer.tokens[len(emitted) :], logprobs=logprobs)
        wanted[place] = Wanted(sequence, answer)
    return wanted


def compare(scenario: Scenario, place: int, heard: Heard, want: Wanted) -> None:
    tokens, finish, logprobs = want.answer
    ask = scenario.asks[place]
    cut = {
        FinishReason.ABORT.name: ask.abort_us is not None,
        "DEADLINE_EXCEEDED": ask.deadline_us is not None,
        "DEADLINE_TOO_NEAR": ask.deadline_us is not None,
        LEFT: scenario.leave_us is not None,
    }.get(heard.end, False)
    same = heard.tokens == tokens[: len(heard.tokens)] if cut else heard.tokens == tokens
    if not same:
        at = next((i for i, (a, b) in enumerate(zip(heard.tokens, tokens, strict=False)) if a != b), -1)
        raise Wrong(f"request {place} was answered {heard.tokens}, not {tokens} (first at {at}, end {heard.end})")
    asked = len(heard.tokens) if ask.sampling.logprobs >= 0 else 0
    if len(heard.logprobs) != asked or (logprobs and heard.logprobs != logprobs[:asked]):
        raise Wrong(f"request {place} has logprobs {heard.logprobs}, not {logprobs}")
    if not cut and heard.end != finish.name:
        raise Wrong(f"request {place} ended by {heard.end}, not {finish.name}")
    if heard.stop_token != (tokens[-1] if heard.end == FinishReason.STOP.name else -1):
        raise Wrong(f"request {place} was stopped by {heard.stop_token}, it is told")
    if len(heard.admissions) != len(set(heard.admissions)):
        raise Wrong(f"request {place} was admitted more than once: attempts {heard.admissions}")
    counted = (heard.prompt_tokens, heard.completion_tokens)
    known = (len(want.sequence.prompt_ids), len(want.sequence.output_ids) + len(heard.tokens))
    if heard.end not in ("DEADLINE_EXCEEDED", "DEADLINE_TOO_NEAR", LEFT) and counted != known:
        raise Wrong(f"request {place} was charged {counted} tokens, not {known}")

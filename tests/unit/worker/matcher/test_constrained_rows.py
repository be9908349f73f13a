"""An engine whose sequences have grammars: rows wait for their masks, and nobody waits for them."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire_common.credit import Finish, Start
from quire_common.sequence import Sampling
from quire_common.structured.constraint import Constraint
from quire_common.telemetry import metrics
from quire_worker.engine.device import InlineDevice
from quire_worker.engine.engine import Engine
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import PacedFacts
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner
from tests.fakes.worker.engine_bench import EngineBench, a_start, small_spec
from tests.fakes.worker.local_matcher import CrashingBackend, LocalMatcher, letter_backend, masks_after

VOCAB, EOS, PAGE = 60, (1, 2), 4
BACKEND = letter_backend(VOCAB, EOS)
FACTS = PacedFacts(VOCAB, EOS, 64)
TEXT = "start: /[A-Z]{6,12}(0[3-9]*)?/"
PROMPT = [5, 6, 7]
SPEC = small_spec(vocab_size=VOCAB, eos_token_ids=EOS, max_num_seqs=9, num_pages=101)


class Bench(EngineBench):
    """An EngineBench on the paced model, with a matcher."""

    def __init__(self, matcher: LocalMatcher, depth: int = 1) -> None:
        self.matcher = matcher
        runner = PacedRunner(PageArray(SPEC.num_pages, PAGE), VOCAB)
        super().__init__(SPEC, runner=runner, depth=depth)
        self.device = InlineDevice(runner)
        self.engine = Engine(SPEC, self.device, depth=depth, matcher=matcher.client)


def start(slot: int, text: str = TEXT, seed: int = 0, *, logprobs: int = -1, **more: Any) -> Start:
    pages = list(range(1 + 10 * slot, 11 + 10 * slot))
    sampling = Sampling(temperature=1.0, seed=seed, logprobs=logprobs)
    made = a_start(slot, PROMPT, pages, sampling=sampling, **({"max_tokens": 30} | more))
    constraint = Constraint.of(text) if text else None
    return replace(made, sequence=replace(made.sequence, constraint=constraint))


def alone(made: Start) -> tuple[list[int], Finish]:
    sequence = made.sequence
    grammar = masks_after(BACKEND, sequence.constraint.text) if sequence.constraint else None
    answer = paced_tokens(PROMPT, sequence.stop, sequence.sampling, facts=FACTS, grammar=grammar)
    return answer.tokens, answer.finish


@pytest.mark.parametrize(("depth", "processes"), [(1, 1), (2, 1), (2, 3)])
def test_constrained_answers_are_those_of_the_pure_model(depth: int, processes: int) -> None:
    bench = Bench(LocalMatcher(BACKEND, VOCAB, processes=processes), depth)
    starts = [start(slot, TEXT if slot % 3 else "", seed=slot) for slot in range(6)]
    bench.grant(*starts)
    told = bench.run()
    for slot, made in enumerate(starts):
        assert (told.tokens[slot], told.finish[slot]) == alone(made)
        letters = "".join(chr(48 + token) for token in told.tokens[slot] if token not in EOS)
        assert not made.sequence.constraint or (letters[:6].isalpha() and told.finish[slot] is Finish.STOP)


@pytest.mark.parametrize("depth", [1, 2])
def test_row_without_its_mask_is_held_while_others_go_on(depth: int) -> None:
    matcher = LocalMatcher(BACKEND, VOCAB)
    bench = Bench(matcher, depth)
    held, free = start(0, seed=1), start(1, "", seed=2, max_tokens=40)
    bench.grant(held, free)
    for _ in range(4):
        bench.step()
    had = len(bench.told.tokens[0])
    matcher.prompt = False
    for _ in range(12):
        bench.step()
    assert len(bench.told.tokens[0]) <= had + depth and len(bench.told.tokens[1]) >= 12
    matcher.prompt = True
    matcher.on_send(matcher.link)
    told = bench.run()
    assert (told.tokens[0], told.finish[0]) == alone(held)
    assert (told.tokens[1], told.finish[1]) == alone(free)


@pytest.mark.parametrize("depth", [1, 2])
def test_row_without_its_mask_computes_no_step_again_and_again(depth: int) -> None:
    """Each step in flight may miss it once. Then its row waits until the mask is there."""
    matcher = LocalMatcher(BACKEND, VOCAB)
    bench = Bench(matcher, depth)
    bench.grant(start(0, seed=1))
    for _ in range(4):
        bench.step()
    matcher.prompt = False
    steps = bench.engine.steps
    told = bench.run()
    assert bench.engine.steps - steps <= 2 * depth and not bench.engine.launch() and 0 not in told.finish
    matcher.prompt = True
    matcher.on_send(matcher.link)
    told = bench.run()
    assert (told.tokens[0], told.finish[0]) == alone(start(0, seed=1))


@pytest.mark.parametrize("depth", [1, 2])
def test_held_rows_are_counted_only_while_their_sequence_has_its_slot(depth: int) -> None:
    """A step that was launched before the end of a sequence was known finds no mask for it, and none was to come."""

    def count() -> float:
        return metrics.registry.get_sample_value("quire_worker_held_rows_total") or 0.0

    matcher = LocalMatcher(BACKEND, VOCAB)
    bench = Bench(matcher, depth)
    before = count()
    bench.grant(start(0, 'start: "ABCDEF"', seed=1), start(1, "", seed=2, max_tokens=40))
    bench.run()
    assert count() == before
    bench = Bench(matcher, depth)
    bench.grant(start(0, seed=1), start(1, "", seed=2, max_tokens=40))
    for _ in range(4):
        bench.step()
    matcher.prompt = False
    for _ in range(6):
        bench.step()
    assert 1 <= count() - before <= 6


def test_slot_takes_no_row_before_its_first_mask() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False)
    bench = Bench(matcher)
    bench.grant(start(0))
    bench.run()
    steps = bench.engine.steps
    assert 0 not in bench.told.tokens and steps <= 1  # its prompt, and no more
    assert not bench.engine.launch()
    matcher.prompt = True
    matcher.on_send(matcher.link)
    assert bench.run().tokens[0] == alone(start(0))[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_lost_matcher_is_a_pause(depth: int) -> None:
    matcher = LocalMatcher(BACKEND, VOCAB)
    bench = Bench(matcher, depth)
    starts = [start(slot, seed=slot) for slot in range(4)]
    bench.grant(*starts)
    rng = np.random.default_rng(3)
    for _ in range(40):
        if rng.random() < 0.4:
            matcher.link.lose()
        bench.step()
    told = bench.run()
    assert {slot: (told.tokens[slot], told.finish[slot]) for slot in range(4)} == {
        slot: alone(made) for slot, made in enumerate(starts)
    }


def test_bad_grammar_ends_its_slot_with_the_cause_and_no_other() -> None:
    bench = Bench(LocalMatcher(BACKEND, VOCAB))
    good = start(1, seed=4)
    bench.grant(start(0, "start: nonsense"), good)
    told = bench.run()
    assert told.codes() == [(0, "GRAMMAR_FAILED")] and told.tokens[1] == alone(good)[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["deadly", "fatal"])
def test_grammar_that_ends_the_matcher_fails_alone_beside_eight(name: str, depth: int) -> None:
    """`deadly` ends it when it is compiled, `fatal` at its third token."""
    matcher = LocalMatcher(CrashingBackend.like(BACKEND), VOCAB, 9)
    bench = Bench(matcher, depth)
    innocents = [start(slot, seed=slot) for slot in range(1, 9)]
    bench.grant(start(0, f"start: {name}\n{name}: /[A-Z]{{6,12}}/"), *innocents)
    told = bench.run()
    assert told.codes() == [(0, "GRAMMAR_CRASHED")] and matcher.link.losses == 2
    assert bool(told.tokens.get(0)) == (name == "fatal")
    for slot, made in enumerate(innocents, 1):
        assert (told.tokens[slot], told.finish[slot]) == alone(made)


def test_min_tokens_yields_where_the_grammar_leaves_only_the_end() -> None:
    made = start(0, 'start: "ABC"', min_tokens=20)
    bench = Bench(LocalMatcher(BACKEND, VOCAB))
    bench.grant(made)
    told = bench.run()
    assert told.tokens[0][:3] == [17, 18, 19] and told.tokens[0][3] in EOS and told.finish[0] is Finish.STOP


def test_min_tokens_holds_where_the_grammar_may_go_on() -> None:
    made = start(0, "start: /A+/", min_tokens=9)
    bench = Bench(LocalMatcher(BACKEND, VOCAB))
    bench.grant(made)
    told = bench.run()
    assert told.tokens[0][:9] == [17] * 9 and (told.tokens[0], told.finish[0]) == alone(made)


def test_mask_slot_is_free_again_when_its_sequence_has_ended_or_was_stopped() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, mask_slots=1)
    bench = Bench(matcher)
    first, second, third = (start(slot, seed=slot) for slot in range(3))
    bench.grant(first, second, third)
    for _ in range(3):
        bench.step()
    bench.grant(stop=(0,))
    told = bench.run()
    assert [told.tokens[slot] for slot in (1, 2)] == [alone(second)[0], alone(third)[0]]


def test_new_run_leaves_no_mask_slot_used() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, mask_slots=2)
    bench = Bench(matcher)
    bench.grant(*(start(slot) for slot in range(5)))
    bench.step()
    bench.engine.begin_run()
    bench.engine.check_integrity()
    assert sorted(matcher.clients[0]._free_mask_slots) == [0, 1] and not matcher.clients[0]._waiting


def test_worker_without_a_matcher_refuses_a_grammar() -> None:
    bench = EngineBench(small_spec(vocab_size=VOCAB))
    bench.grant(start(0))
    assert bench.run().codes() == [(0, "STRUCTURED_OUTPUT_UNSUPPORTED")]


def test_matcher_that_the_system_does_not_start_ends_the_slot_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no file descriptor is left. The next sequence with a grammar tries again."""

    def refuse(_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    matcher = LocalMatcher(BACKEND, VOCAB, processes=2)
    bench, plain = Bench(matcher), start(1, "")
    with monkeypatch.context() as patched:
        patched.setattr(matcher.clients[1], "_make_link", refuse)
        bench.grant(start(0), plain)
    told = bench.run()
    assert told.codes() == [(0, "MATCHER_UNAVAILABLE")]
    assert (told.tokens[1], told.finish[1]) == alone(plain)
    made = start(0)
    bench.grant(made)
    told = bench.run()
    assert (told.tokens[0], told.finish[0]) == alone(made) and len(told.codes()) == 1


def test_grammar_for_another_version_is_refused() -> None:
    bench = Bench(LocalMatcher(BACKEND, VOCAB))
    other, good = start(0), start(1, seed=4)
    other = replace(other, sequence=replace(other.sequence, constraint=Constraint.of(TEXT, "1.0.0")))
    bench.grant(other, good)
    told = bench.run()
    assert told.codes() == [(0, "STRUCTURED_OUTPUT_UNSUPPORTED")] and told.tokens[1] == alone(good)[0]

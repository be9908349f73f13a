"""An engine whose rows have forced tokens as drafts: the answers are those of the pure model, in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quire_common.telemetry import metrics
from quire_worker.engine.device import InlineDevice
from quire_worker.engine.engine import Engine
from quire_worker.matcher.step_masks import ForcedTokens
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner
from tests.fakes.worker.engine_bench import EngineBench, small_spec
from tests.fakes.worker.local_matcher import CrashingBackend, LocalMatcher, letter_backend
from tests.unit.worker.matcher.test_constrained_rows import PROMPT, alone
from tests.unit.worker.matcher.test_constrained_rows import start as constrained_start

if TYPE_CHECKING:
    from quire_common.credit import Start, StepTiming
    from quire_worker.matcher.guidance_backend import GuidanceBackend
    from quire_worker.step import StepSize

VOCAB, EOS, PAGE, ROW_TOKENS = 60, (1, 2), 4, 4
BACKEND = letter_backend(VOCAB, EOS)
# Like the names and values of a JSON object: long forced texts, and choices between them.
TEXT = 'start: "NAME" /[A-D]/ "VALUE" /[0-9]{1,3}/ "END"'


class StepSizes:
    """An observer that keeps the sizes of steps."""

    def __init__(self) -> None:
        self.sizes: list[StepSize] = []

    def step_done(self, timing: StepTiming, size: StepSize, running: int, spare: int) -> None:
        self.sizes.append(size)

    def slot_ended(self, trace: object) -> None: ...

    def moved(self, kind: object, pages: int, us: int, ok: bool) -> None: ...


class Bench(EngineBench):
    """An EngineBench on the paced model, with a matcher. Rows with grammars sample up to `row_tokens` tokens."""

    def __init__(self, row_tokens: int = ROW_TOKENS, depth: int = 1, backend: GuidanceBackend = BACKEND) -> None:
        spec = small_spec(
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            max_num_seqs=9,
            num_pages=101,
            max_constrained_row_tokens=row_tokens,
        )
        self.matcher = LocalMatcher(backend, VOCAB, row_tokens=row_tokens)
        self.observed = StepSizes()
        runner = PacedRunner(PageArray(spec.num_pages, PAGE), VOCAB)
        super().__init__(spec, runner=runner, depth=depth)
        self.device = InlineDevice(runner, ForcedTokens())
        self.engine = Engine(spec, self.device, observer=self.observed, depth=depth, matcher=self.matcher.client)

    @property
    def row_counts(self) -> set[int]:
        """The numbers of tokens that rows have sampled in a step."""
        return {count for report in self.told.reports for count in report.count.tolist()}


def start(slot: int, text: str = TEXT, **more: Any) -> Start:
    return constrained_start(slot, text, slot, **more)


def assert_answered(bench: Bench, starts: list[Start]) -> None:
    """Each as the pure model answers."""
    told = bench.run()
    for made in starts:
        assert (told.tokens[made.slot], told.finish[made.slot]) == alone(made)


def steps_of(row_tokens: int, depth: int) -> int:
    """The steps of four answers; one has no grammar, and is short."""
    bench = Bench(row_tokens, depth)
    starts = [start(0), start(1), start(2), start(3, "", max_tokens=4)]
    bench.grant(*starts)
    assert_answered(bench, starts)
    assert max(bench.row_counts) == row_tokens
    return bench.engine.steps


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_save_steps_and_change_no_answer(depth: int) -> None:
    """Of the 15 to 17 tokens of an answer, 12 are forced."""
    assert steps_of(ROW_TOKENS, depth) <= steps_of(1, depth) * 2 // 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bound", [{"max_tokens": 6}, {"limit": 12}, {"stop": (30,)}, {"min_tokens": 9}], ids=str)
def test_bounds_of_a_sequence_hold_within_rows_of_several_tokens(depth: int, bound: dict[str, Any]) -> None:
    """Token 30 is the N of the forced text."""
    bench = Bench(depth=depth)
    starts = [start(0, **bound), start(1)]
    bench.grant(*starts)
    bench.run()
    if "limit" in bound:
        assert 0 not in bench.told.finish and len(bench.told.tokens[0]) == 12 - len(PROMPT) + 1
        bench.grant(limit={0: 60})
    assert_answered(bench, starts)


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_without_forced_tokens_are_those_of_the_pure_model(depth: int) -> None:
    bench = Bench(depth=depth)
    starts = [start(slot, "start: /[A-Z]{6,12}/") for slot in range(3)]
    bench.grant(*starts)
    assert_answered(bench, starts)
    assert bench.row_counts == {1}


@pytest.mark.parametrize("depth", [1, 2])
def test_matcher_that_is_late_or_lost_changes_no_answer(depth: int) -> None:
    bench = Bench(depth=depth)
    starts = [start(slot) for slot in range(4)]
    bench.grant(*starts)
    rng = np.random.default_rng(5)
    for _ in range(60):
        bench.matcher.prompt = bool(rng.random() < 0.5)
        if bench.matcher.links and rng.random() < 0.2:
            bench.matcher.link.lose()
        elif bench.matcher.links:
            bench.matcher.link.hear()
        bench.step()
    bench.matcher.prompt = True
    bench.matcher.on_send(bench.matcher.link)
    assert_answered(bench, starts)


def test_grammar_that_crashes_the_matcher_fails_alone_despite_lookahead_masks() -> None:
    bench = Bench(backend=CrashingBackend.like(BACKEND))
    innocents = [start(slot) for slot in range(1, 4)]
    bench.grant(start(0, 'start: fatal\nfatal: "ABCDEF"'), *innocents)
    bench.run()
    assert bench.told.codes() == [(0, "GRAMMAR_CRASHED")]
    assert_answered(bench, innocents)


def test_stopped_sequence_leaves_its_slot_to_the_next_with_rows_in_flight() -> None:
    bench = Bench(depth=2)
    bench.grant(start(0), start(1))
    for _ in range(3):
        bench.step()
    while bench.engine.launch():
        pass
    bench.grant(stop=(0,))
    bench.run()
    tokens = bench.told.tokens.pop(0)
    assert tokens == alone(start(0))[0][: len(tokens)]
    again = replace(start(0), pages=start(4).pages)
    bench.grant(again)
    assert_answered(bench, [again, start(1)])


def test_each_token_of_a_row_has_its_logprobs() -> None:
    plain, forced = Bench(1), Bench()
    found = []
    for bench in (plain, forced):
        bench.grant(start(0, logprobs=1))
        bench.run()
        columns = [report.logprobs for report in bench.told.reports if report.logprobs is not None]
        found.append(np.concatenate([each.logprob for each in columns]).tolist())
    assert found[0] == found[1] and len(found[0]) == len(plain.told.tokens[0])


def test_size_of_a_step_counts_the_rows_that_the_device_ran() -> None:
    """A row is launched with room for drafts; the device removes it where no token is forced."""
    bench = Bench()
    bench.grant(start(0, "start: /[A-Z]{6}/"))
    bench.run()
    assert [size.tokens for size in bench.observed.sizes] == [len(PROMPT), *[1] * 6]
    bench = Bench()
    bench.grant(start(0, 'start: "ABCDEFG"'))
    bench.run()
    assert [(size.tokens, size.sampled) for size in bench.observed.sizes] == [(3, 1), (4, 4), (3, 3)]


def test_forced_tokens_of_the_last_step_are_counted() -> None:
    """The steps of A, BCDE, and FG with the end: B to D, F and G were drafts."""

    def counted() -> float:
        return metrics.registry.get_sample_value("quire_worker_forced_tokens_total") or 0.0

    before = counted()
    bench = Bench()
    bench.grant(start(0, 'start: "ABCDEFG"'))
    bench.run()
    assert counted() - before == 5

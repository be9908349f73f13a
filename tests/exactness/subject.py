"""What is put to the test: a kind of worker, its pages, and the pure answer of a sequence that nothing disturbs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quire_common.credit import Finish, KvGroup, ModelInfo, PageGeometry
from quire_worker.engine.spec import EngineSpec
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import PacedFacts
from quire_worker.paced.hashing import contributions
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner
from tests.exactness.scenario import Scale
from tests.fakes.worker.local_matcher import letter_backend, masks_after
from tests.fakes.worker.some_processors import PROCESSORS

if TYPE_CHECKING:
    from quire_common.sequence import Sequence
    from quire_worker.engine.ports import PageBytes, Runner
    from quire_worker.matcher.guidance_backend import GuidanceBackend
    from quire_worker.step import StepBatch, StepOutput


class Answer(NamedTuple):
    """New tokens, why they end, and, where the request asked and the subject knows them, their logprobs."""

    tokens: list[int]
    finish: Finish
    logprobs: list[float] | None = None


class Written(NamedTuple):
    """Pages, offsets in them, what lies there, and the slots whose drafts did; of other rows -1."""

    page: np.ndarray
    offset: np.ndarray
    values: np.ndarray
    draft_of: np.ndarray

    def without_drafts_of(self, later: StepBatch) -> Written:
        """Return the writes that still count after a later step has run. The later step computes again what drafts in
        its slots have spoiled, and no step writes after one that was launched behind it."""
        keep = ~np.isin(self.draft_of, later.slot)
        return Written(*(column[keep] for column in self))


class Memory:
    """What steps write, for devices that write late. `pages` is a view of the pool by page and offset."""

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages

    def written(self, batch: StepBatch) -> Written:
        """What the step that has just run wrote."""
        owner = np.repeat(np.arange(len(batch.count)), batch.count)
        first = np.cumsum(batch.count) - batch.count
        place = np.arange(len(owner)) + (batch.position - first)[owner]
        size = self._pages.shape[1]
        page, offset = batch.page_table[owner, place // size], place % size
        draft_of = np.full(len(owner), -1)
        if len(batch.drafts):
            draft = np.arange(len(owner)) >= (np.cumsum(batch.count) - batch.drafts)[owner]
            draft_of[draft] = batch.slot[owner[draft]]
        return Written(page, offset, self._pages[page, offset], draft_of)

    def write_again(self, written: Written) -> None:
        """Write it once more."""
        self._pages[written.page, written.offset] = written.values


class Parts(NamedTuple):
    """One life of a worker's device."""

    runner: Runner
    draft_runner: Runner
    """The same model, for drafts. It raises for no row: a sequence that has lost its pages has drafts until the engine
    hears of the loss."""
    pages: PageBytes
    memory: Memory


class Subject(Protocol):
    """A kind of worker."""

    scale: Scale
    info: ModelInfo

    @property
    def backend(self) -> GuidanceBackend:
        """Grammars over the subject's vocabulary, whose tokens stand for letters."""

    def parts(self, num_pages: int, seed: int) -> Parts:
        """A device whose pages hold rubbish."""

    def alone(self, sequence: Sequence, max_len: int) -> Answer:
        """The undisturbed answer."""


def engine_spec(
    subject: Subject, max_num_seqs: int, num_pages: int, row_tokens: int = 1, constrained_row_tokens: int = 1
) -> EngineSpec:
    """The sizes of an engine on the subject."""
    info = subject.info
    return EngineSpec(
        max_num_seqs,
        info.max_model_len,
        info.vocab_size,
        info.pages.page_size,
        num_pages,
        info.eos_token_ids,
        logits_processors=PROCESSORS,
        max_row_tokens=row_tokens,
        max_constrained_row_tokens=constrained_row_tokens,
    )


class StrictRunner:
    """The paced model, and a look at all that it attends to: the KV of each position must be that of the one before it
    and of some token. The model itself looks at two positions per token, and may miss what was overwritten."""

    def __init__(self, pages: PageArray, scale: Scale) -> None:
        self._runner = PacedRunner(pages, scale.vocab_size)
        self._pages = pages
        tokens = np.arange(scale.vocab_size)
        places = np.arange(scale.max_model_len)
        each = contributions(np.tile(tokens, len(places)), np.repeat(places, len(tokens)))
        self._steps = each.reshape(len(places), len(tokens))

    def run(self, batch: StepBatch) -> StepOutput:
        before = batch.position.astype(np.int64)
        owner = np.repeat(np.arange(len(before)), before)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(before) - before, before)
        size = self._pages.page_size
        state = self._pages.states[batch.page_table[owner, place // size] * size + place % size]
        step = state.copy()
        step[1:] -= state[:-1]
        step[place == 0] = state[place == 0]
        wrong = ~(self._steps[place] == step[:, None]).any(axis=1)
        if wrong.any():
            raise AssertionError(f"positions {place[wrong].tolist()} of rows {owner[wrong].tolist()} were overwritten")
        return self._runner.run(batch)


class PacedSubject:
    """The paced worker's model: its tokens depend on every page of the prefix. Steps take no time by themselves."""

    scale = Scale(vocab_size=60, page_size=4, max_model_len=96, longest_prompt=40, most_tokens=40, most_asks=10)

    def __init__(self) -> None:
        self._facts = PacedFacts(self.scale.vocab_size, (1, 2), self.scale.max_model_len)
        group = KvGroup("full", 8 * self.scale.page_size, "token", "uint64", 1, 1, 1)
        pages = PageGeometry(self.scale.page_size, (group,), b"paced".ljust(32, b"."))
        self.info = ModelInfo(
            "paced",
            "PacedForCausalLM",
            self._facts.max_model_len,
            self._facts.vocab_size,
            self._facts.eos_token_ids,
            self._facts.digest,
            pages,
        )

    @cached_property
    def backend(self) -> GuidanceBackend:
        return letter_backend(self.info.vocab_size, self.info.eos_token_ids)

    def parts(self, num_pages: int, seed: int) -> Parts:
        pages = PageArray(num_pages, self.scale.page_size)
        pages.states[:] = np.random.default_rng(seed).integers(0, 2**63, len(pages.states), dtype=np.uint64)
        memory = Memory(pages.states.reshape(num_pages, -1))
        return Parts(StrictRunner(pages, self.scale), PacedRunner(pages, self.scale.vocab_size), pages, memory)

    def alone(self, sequence: Sequence, max_len: int) -> Answer:
        answer = paced_tokens(
            sequence.prompt_ids.tolist(),
            sequence.stop,
            sequence.sampling,
            output_ids=sequence.output_ids.tolist(),
            facts=replace(self._facts, max_model_len=max_len),
            thinking=sequence.thinking,
            processors=PROCESSORS,
            grammar=None if sequence.constraint is None else masks_after(self.backend, sequence.constraint.text),
        )
        return Answer(answer.tokens, answer.finish)

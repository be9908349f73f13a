"""The beams of one prompt, and how they grow by a token: arithmetic over logprobs. Knows no engine and no format.

A client decides how many beams there are and how long they get. So a beam is an array of 4 bytes a token, and all
candidates of a step are compared as columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING

import numpy as np

from quire_router.sequences.logprob_entries import pack_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from quire_router.sequences.delta import LogprobEntry
    from quire_router.sequences.job import GenerateJob


def _no_ids() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A candidate answer so far. `entries` has one packed entry per token where the client asks for logprobs, else
    none; `stopped`: its last token ended it."""

    ids: NDArray[np.int32] = field(default_factory=_no_ids)
    logprob: float = 0.0
    entries: tuple[bytes, ...] = ()
    stopped: bool = False

    def score(self, prompt_tokens: int, length_penalty: float) -> float:
        """Return vLLM's score: the sum of logprobs divided by the length to the power of `length_penalty`. The length
        includes the prompt, but not an end token."""
        length = prompt_tokens + len(self.ids) - self.stopped
        return float(self.logprob / max(length, 1) ** length_penalty)


@dataclass(slots=True)
class Search:
    """The beams of one prompt. `left`: tokens that a beam may still get. `ended` has at most the n best."""

    prompt_ids: NDArray[np.int32]
    left: int
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    def best(self, job: GenerateJob) -> list[Beam]:
        """Return the n beams, ended or live, that score best, best first."""
        return nlargest(job.n, [*self.ended, *self.live], key=self._scorer(job))

    def grow(self, entries: Sequence[LogprobEntry], job: GenerateJob, end_ids: NDArray[np.int32]) -> None:
        """Grow the live beams by one token. `entries` has each one's alternatives. The `job.n` likeliest longer ones
        are live then, and those that end in one of `end_ids` move to `ended`. No beam stays live after the last token,
        or when none could win any more."""
        self.left -= 1
        candidates = _Candidates(self.live, entries, job.sampling.logprobs)
        stops = np.isin(candidates.ids, end_ids)
        ended = [*self.ended, *candidates.likeliest(stops, job.n, stopped=True)]
        live = candidates.likeliest(~stops, job.n, stopped=False)
        if not self.left:
            ended, live = [*ended, *live], []
        self.ended, self.live = nlargest(job.n, ended, key=self._scorer(job)), live
        if live and self._settled(job):
            self.live = []

    def _scorer(self, job: GenerateJob) -> Callable[[Beam], float]:
        prompt_tokens, penalty = len(self.prompt_ids), job.length_penalty
        return lambda beam: beam.score(prompt_tokens, penalty)

    def _settled(self, job: GenerateJob) -> bool:
        """Whether no live beam can come among the n best any more, at the best score that it could reach: logprobs only
        sink, and with a positive penalty the longest answer scores best."""
        if len(self.ended) < job.n:
            return False
        prompt_tokens, penalty = len(self.prompt_ids), job.length_penalty
        worst = self._scorer(job)(self.ended[-1])
        for beam in self.live:
            length = prompt_tokens + len(beam.ids) + (self.left if penalty > 0 else 0)
            if beam.logprob / max(length, 1) ** penalty > worst:
                return False
        return True


class _Candidates:
    """All tokens that may follow the live beams, as columns, in the order of the beams and of each one's ranks."""

    def __init__(self, live: Sequence[Beam], entries: Sequence[LogprobEntry], top_logprobs: int) -> None:
        """`top_logprobs`: the alternatives that a longer beam's entry keeps; -1: it has no entry."""
        counts = [len(entry.top_ids) for entry in entries]
        self._live, self._entries, self._top_logprobs = live, entries, top_logprobs
        self._firsts = np.cumsum([0, *counts])
        self._numbers = np.repeat(np.arange(len(entries)), counts)
        self.ids = np.concatenate([np.asarray(entry.top_ids, np.int32) for entry in entries])
        self._logprobs = np.concatenate([np.asarray(entry.top_logprobs, np.float64) for entry in entries])
        self._totals = self._logprobs + np.repeat([beam.logprob for beam in live], counts)

    def likeliest(self, among: NDArray[np.bool_], count: int, *, stopped: bool) -> list[Beam]:
        """Return the `count` likeliest beams that end in one of the candidates `among`, likeliest first. All are as
        long as each other, so that these also score best. Of equals, the first counts."""
        places = np.flatnonzero(among)
        order = np.argsort(-self._totals[places], kind="stable")[:count]
        return [self._longer(place, stopped=stopped) for place in places[order].tolist()]

    def _longer(self, place: int, *, stopped: bool) -> Beam:
        number = int(self._numbers[place])
        beam = self._live[number]
        ids = np.append(beam.ids, self.ids[place])
        entries = beam.entries if self._top_logprobs < 0 else (*beam.entries, self._packed(place, number))
        return Beam(ids, float(self._totals[place]), entries, stopped)

    def _packed(self, place: int, number: int) -> bytes:
        """Pack the entry of a longer beam's last token, with as many alternatives as the client asks for."""
        entry, rank = self._entries[number], place - int(self._firsts[number]) + 1
        ids = np.asarray(entry.top_ids[: self._top_logprobs], np.int32).tobytes()
        logprobs = np.asarray(entry.top_logprobs[: self._top_logprobs], np.float32).tobytes()
        return pack_entry(int(self.ids[place]), float(self._logprobs[place]), rank, ids, logprobs)

"""The beams of one prompt, and the arithmetic over logprobs by which they grow by a token. This module knows no engine
and no format.

The client decides how many beams there are and how long they get, so both must be cheap. A beam is an array with 4
bytes per token, and the candidates of a step are compared as NumPy columns.
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
    """A candidate answer so far. `entries` has one packed logprob entry per token if the client asks for logprobs, and
    is empty otherwise. `stopped`: the beam ended with an end token, which is its last token."""

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
    """The beams of one prompt. `left` is the number of tokens that a live beam may still get. `ended` has the n best
    beams that have ended, or fewer."""

    prompt_ids: NDArray[np.int32]
    left: int
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    def best(self, job: GenerateJob) -> list[Beam]:
        """Return the n beams with the best scores, best first; both ended and live beams count."""
        return nlargest(job.n, [*self.ended, *self.live], key=self._scorer(job))

    def grow(self, entries: Sequence[LogprobEntry], job: GenerateJob, end_ids: NDArray[np.int32]) -> None:
        """Grow the live beams by one token. `entries` has, for each live beam, the alternatives of its next token. The
        `job.n` likeliest continuations without an end become the live beams. Of the continuations that end in one of
        `end_ids`, the `job.n` likeliest move to `ended`, which keeps the n best. After the last token, all live beams
        move there. No beam stays live when none can become one of the n best."""
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
        """Whether no live beam can become one of the n best; False while fewer than n beams have ended. A live beam
        counts with the best score that it could still reach. Its sum of logprobs can only fall, and with a positive
        penalty the longest answer has the best score."""
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
    """The tokens that may follow the live beams, as columns: for each beam, the likeliest tokens that its entry lists.
    They are in the order of the beams, and for each beam in the order of the tokens' ranks."""

    def __init__(self, live: Sequence[Beam], entries: Sequence[LogprobEntry], top_logprobs: int) -> None:
        """`top_logprobs`: the number of alternatives in the entry of each new token; -1: beams have no entries."""
        counts = [len(entry.top_ids) for entry in entries]
        self._live, self._entries, self._top_logprobs = live, entries, top_logprobs
        self._firsts = np.cumsum([0, *counts])
        self._numbers = np.repeat(np.arange(len(entries)), counts)
        self.ids = np.concatenate([np.asarray(entry.top_ids, np.int32) for entry in entries])
        self._logprobs = np.concatenate([np.asarray(entry.top_logprobs, np.float64) for entry in entries])
        self._totals = self._logprobs + np.repeat([beam.logprob for beam in live], counts)

    def likeliest(self, among: NDArray[np.bool_], count: int, *, stopped: bool) -> list[Beam]:
        """Return the `count` likeliest beams that end in one of the candidates `among`, likeliest first; fewer if there
        are fewer candidates. All these beams have the same length, so the likeliest beams also have the best scores.
        Between equally likely beams, the earlier candidate comes first. `stopped`: these candidates are end tokens."""
        places = np.flatnonzero(among)
        order = np.argsort(-self._totals[places], kind="stable")[:count]
        return [self._longer(place, stopped=stopped) for place in places[order].tolist()]

    def _longer(self, place: int, *, stopped: bool) -> Beam:
        """Make the beam that a candidate yields: the beam before it, one token longer, with the new sum of logprobs.
        The new beam has the token's logprob entry if the client asks for logprobs."""
        number = int(self._numbers[place])
        beam = self._live[number]
        ids = np.append(beam.ids, self.ids[place])
        entries = beam.entries if self._top_logprobs < 0 else (*beam.entries, self._packed(place, number))
        return Beam(ids, float(self._totals[place]), entries, stopped)

    def _packed(self, place: int, number: int) -> bytes:
        """Pack the logprob entry of a beam's new token: its id, its logprob, its rank (from 1), and as many of the
        likeliest tokens as the client asks for, the new token perhaps among them. `place` is the candidate's index, and
        `number` the beam's."""
        entry, rank = self._entries[number], place - int(self._firsts[number]) + 1
        ids = np.asarray(entry.top_ids[: self._top_logprobs], np.int32).tobytes()
        logprobs = np.asarray(entry.top_logprobs[: self._top_logprobs], np.float32).tobytes()
        return pack_entry(int(self.ids[place]), float(self._logprobs[place]), rank, ids, logprobs)

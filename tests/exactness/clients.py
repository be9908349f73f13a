"""The clients of a replica: what they ask for, what they hear, and what they ask for again when their replica goes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.finish import FinishReason

if TYPE_CHECKING:
    from quire_common.sequence import Sequence
    from quire_scheduler.core.outputs import SessionOutputs
    from tests.exactness.scenario import Scenario

LOST = "WORKER_LOST"
LEFT = "LEFT"


@dataclass
class Heard:
    """What a client heard of one request: tokens, and its end: a FinishReason's name, an error's code, or LEFT."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""
    stop_token: int = -1
    admissions: list[int] = field(default_factory=list)
    """Attempts that took a slot."""
    prompt_tokens: int = -1
    completion_tokens: int = -1


class Clients:
    """All of a scenario's; requests are named by their place in it, which is their handle too."""

    def __init__(self, scenario: Scenario, sequences: dict[int, Sequence]) -> None:
        self.heard: dict[int, Heard] = {}
        self._scenario = scenario
        self._sequences = sequences
        self._lost: list[int] = []
        self._gone: set[int] = set()

    def ask(self, place: int) -> Sequence | None:
        """A request begins; None where its session has left before."""
        if self._scenario.asks[place].session in self._gone:
            return None
        self.heard[place] = Heard()
        return self._sequences[place]

    def ask_again(self) -> list[tuple[int, Sequence]]:
        """Requests whose replica was lost, as they go on: with all tokens that were heard."""
        lost, self._lost = self._lost, []
        return [(place, self._resumed(place)) for place in lost]

    def leave(self, session: int) -> None:
        """Nobody listens to the session any more."""
        self._gone.add(session)
        for place, heard in self.heard.items():
            if self._scenario.asks[place].session == session and not heard.end:
                heard.end = LEFT

    def refused(self, place: int, code: str) -> None:
        """The request never entered."""
        self.heard[place].end = code

    def over(self, place: int) -> bool:
        """Whether the request has ended, or will never begin."""
        heard = self.heard.get(place)
        return bool(heard.end) if heard is not None else self._scenario.asks[place].session in self._gone

    def unheard(self) -> list[int]:
        """Requests without an end."""
        return [place for place, heard in self.heard.items() if not heard.end]

    def collect(self, outputs: list[SessionOutputs]) -> None:
        """Hear what sessions are told."""
        for out in outputs:
            if out.session not in self._gone:
                self._hear(out)

    def _hear(self, out: SessionOutputs) -> None:
        for admitted in out.admitted:
            self._of(out, admitted.handle).admissions.append(admitted.attempt)
        at = 0
        for handle, count, finish in zip(out.handle.tolist(), out.count.tolist(), out.finish.tolist(), strict=True):
            heard = self._of(out, handle)
            assert not heard.end, f"request {handle}: a row after the end"
            assert heard.admissions or not count, f"request {handle}: tokens before it was admitted"
            heard.tokens += out.token[at : at + count].tolist()
            at += count
            if finish:
                heard.end = FinishReason(finish).name
        assert at == len(out.token), "tokens of no row"
        if out.logprobs is not None:
            owner = out.handle.repeat(out.count)
            for index, value in zip(out.logprobs.token_index.tolist(), out.logprobs.logprob.tolist(), strict=True):
                self._of(out, int(owner[index])).logprobs.append(value)
        for note in out.finished:
            heard = self._of(out, note.handle)
            assert heard.end, f"request {note.handle}: a note of an end that no row tells"
            heard.prompt_tokens, heard.completion_tokens = note.prompt_tokens, note.completion_tokens
            heard.stop_token = note.stop_token_id
        for failed in out.failed:
            heard = self._of(out, failed.handle)
            assert not heard.end, f"request {failed.handle}: failed after its end"
            if failed.error.code == LOST:
                self._lost.append(failed.handle)
            else:
                heard.end = failed.error.code

    def _of(self, out: SessionOutputs, handle: int) -> Heard:
        assert self._scenario.asks[handle].session == out.session, f"request {handle} is told to session {out.session}"
        return self.heard[handle]

    def _resumed(self, place: int) -> Sequence:
        sequence = self._sequences[place]
        tokens = np.array(self.heard[place].tokens, np.int32)
        return replace(sequence, output_ids=np.concatenate([sequence.output_ids, tokens]))

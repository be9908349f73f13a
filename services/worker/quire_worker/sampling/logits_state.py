"""LogitsState: a sequence's LogitControls, thinking budget and repetition rule, and what they must know of its tokens.

Exact definition, in vLLM's order, for a row of raw logits x in float32:

    allowed_token_ids   all others become -inf
    bad_words           a word's last token becomes -inf where the output ends with the tokens before it
    min_tokens          stop ids become -inf (`blocked`, see sampler)
    logit_bias          x += bias
    logits_processors   in the request's order
    repetition_penalty  of every token of prompt or output: x / penalty where x > 0, x * penalty otherwise
    frequency_penalty   x -= penalty * times that the token is in the output
    presence_penalty    x -= penalty where the token is in the output
    thinking budget     used up: all but the end mark's next token become -inf, and that one's logit is the raw one
                        again, whatever the rest made of it (see thinking_track). Where the request's grammar forbids
                        that token, the budget forces nothing

If a penalty near 0 makes a logit infinite, the row has no token left to sample. This is an error of the request.

The state is a function of prompt ids, output ids and parameters, so an answer survives preemption and migration. It is
made when a sequence starts. Then it belongs to the device, which knows the sampled tokens, and reports each by `fed`
before it samples the next one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from quire_common.logit_controls import NEUTRAL
from quire_worker.sampling.control_lists import lists_of
from quire_worker.sampling.repetition_track import RepetitionTrack
from quire_worker.sampling.row_processors import RowProcessors
from quire_worker.sampling.thinking_track import ThinkingTrack
from quire_worker.sampling.token_counts import TokenCounts

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.sequence import Sequence
    from quire_worker.arrays import Float32, Int32
    from quire_worker.sampling.logits_processor import LogitsProcessors
    from quire_worker.sampling.token_mask import TokenMask

_NEVER = np.float32(-np.inf)
_NO_PROCESSORS: LogitsProcessors = MappingProxyType({})


class LogitsState:
    """The state of one sequence. Only the thread that runs steps uses it, but other threads may make it, and the model
    thread sets `ended`. Making it is cheap, because prompt and output are processed at the first use. Only the first
    state of a LogitControls with thousands of ids takes milliseconds."""

    def __init__(self, sequence: Sequence, processors: LogitsProcessors = _NO_PROCESSORS) -> None:
        controls = sequence.sampling.controls or NEUTRAL
        self.sequence = sequence
        """As it started: a device that keeps the tokens itself begins with this."""
        self.failure: QuireError | None = None
        """Of a logits processor, or of a device without room: the sequence cannot go on."""
        self.ended = False
        """The sequence has left its slot: steps in flight may still name it, no later ones will."""
        self._prompt_ids = sequence.prompt_ids
        self._output: list[int] = sequence.output_ids.tolist()
        self._lists = lists_of(controls)
        self._repetition = np.float32(controls.repetition_penalty)
        self._frequency = np.float32(controls.frequency_penalty)
        self._presence = np.float32(controls.presence_penalty)
        self._counting = bool(self._repetition != 1 or self._frequency or self._presence)
        named = [(name, processors[name]) for name in sequence.sampling.processors]
        self._processors = RowProcessors(named, sequence.prompt_ids) if named else None
        self._counts: TokenCounts | None = None
        self._thinking: ThinkingTrack | None = None
        self._repetition_rule = sequence.stop.repetition
        self._track: RepetitionTrack | None = None
        self._min_tokens = sequence.stop.min_tokens

    @classmethod
    def of(cls, sequence: Sequence, processors: LogitsProcessors = _NO_PROCESSORS) -> LogitsState | None:
        """Return the state of a sequence that asks for controls, processors, a thinking budget or a repetition rule;
        None for any other. `processors` must have all processors that the sequence names."""
        asks = (sequence.sampling.controls, sequence.stop.repetition, sequence.thinking, sequence.sampling.processors)
        return cls(sequence, processors) if any(asks) else None

    def fail(self, error: QuireError) -> None:
        """Note the error that ends the sequence. The first one stays: later steps may be launched before it is seen."""
        self.failure = self.failure or error

    def fed(self, token: int) -> None:
        """Append the last sampled token to the output, since a step computes it now. Update the repetition track, the
        token counts and the thinking track, as far as they exist."""
        if self._track is not None:
            self._track.add(token)
        self._output.append(token)
        if self._counts is not None:
            self._counts.add(token)
        if self._thinking is not None:
            self._thinking.fed(token)

    def apply(self, logits: Float32, blocked: Int32 | None = None, mask: TokenMask | None = None) -> None:
        """Change a row of logits [V] in place, as the request asks (see the module). `blocked` ids are forbidden too. A
        spent thinking budget leaves only the end mark's next token, with its raw logit, and nothing else is applied;
        but if the grammar's `mask` forbids this token, the budget changes nothing.

        If a processor fails, or a penalty makes a logit +inf, all tokens are forbidden. A run of the processors sets
        `failure`: the error, or None if all succeed. The caller applies `mask` itself.
        """
        forced = self._forced()
        if forced is not None and (mask is None or mask.allows(forced)):
            raw = logits[forced]
            logits.fill(_NEVER)
            logits[forced] = raw
            return
        lists = self._lists
        if len(lists.allowed):
            kept = logits[lists.allowed]
            logits.fill(_NEVER)
            logits[lists.allowed] = kept
        logits[lists.bad_tokens] = _NEVER
        if lists.bad_words and self._output:
            for before, last in lists.bad_words.get(self._output[-1], ()):
                if self._output[-len(before) :] == before:
                    logits[last] = _NEVER
        if blocked is not None:
            logits[blocked] = _NEVER
        if len(lists.bias):
            logits[lists.bias_ids] += lists.bias
        if self._processors is not None:
            self.failure = self._processors.run(self._output, logits)
            if self.failure is not None:
                logits.fill(_NEVER)
                return
        if self._counting and not self._known_counts().penalise(
            logits, self._repetition, self._frequency, self._presence
        ):
            logits.fill(_NEVER)

    @property
    def changes_logits(self) -> bool:
        """Whether the request asks for changes of logits. If it does not, `apply` only forbids `blocked` ids."""
        sampling = self.sequence.sampling
        return sampling.controls is not None or self.sequence.thinking is not None or self.runs_python

    @property
    def runs_python(self) -> bool:
        """Whether `apply` calls logits processors. These are Python code of other packages, and run only on the
        host."""
        return self._processors is not None

    @property
    def watches_repetition(self) -> bool:
        """Whether `repeats` can ever be true."""
        return self._repetition_rule is not None

    def repeats(self, token: int) -> bool:
        """Whether the sequence ends by repetition with this token, which was sampled and is not fed yet. Always False
        without a rule, and until the output, this token included, has `min_tokens` tokens."""
        rule = self._repetition_rule
        if rule is None or len(self._output) + 1 < self._min_tokens:
            return False
        track = self._track
        if track is None:
            track = self._track = RepetitionTrack(rule, self._output)
        return track.repeats(token)

    def _forced(self) -> int | None:
        """Return the end mark's next token if the thinking budget is spent, since only this token may be sampled then;
        None: any token."""
        budget = self.sequence.thinking
        if budget is None:
            return None
        track = self._thinking
        if track is None:
            track = self._thinking = ThinkingTrack(budget, self._prompt_ids, self._output)
        return track.forced()

    def _known_counts(self) -> TokenCounts:
        """Return how often each token of prompt or output is in the output: 0 times if only the prompt has it. The
        counts are made at their first use."""
        counts = self._counts
        if counts is None:
            counts = self._counts = TokenCounts(self._prompt_ids)
            for token in self._output:
                counts.add(token)
        return counts

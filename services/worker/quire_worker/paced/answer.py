"""The answer of the paced worker as a pure function: the tokens of a sequence that nothing disturbs. It uses plain
integers, and no pages or batches.

Tests and benchmarks compare the tokens of real processes with this answer. A wrong page, a broken fence or a wrong
token that was fed back leads to other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish
from quire_common.sequence import Sampling, Sequence
from quire_worker.paced.facts import DEFAULT_FACTS
from quire_worker.paced.hashing import (
    FIRST_MIX,
    GREEDY_BELOW,
    MASK,
    PLACE_FACTOR,
    PROBE_FACTOR,
    SAMPLE_FACTOR,
    TOKEN_FACTOR,
    choose,
    mix,
    resample,
    token_of,
)
from quire_worker.sampling.logits_state import LogitsState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from quire_common.sequence import Stop
    from quire_common.thinking import ThinkingBudget
    from quire_worker.arrays import Int32
    from quire_worker.paced.facts import PacedFacts
    from quire_worker.sampling.logits_processor import LogitsProcessors
    from quire_worker.sampling.token_mask import TokenMask

GREEDY = Sampling()
NO_IDS: Int32 = np.empty(0, np.int32)
_NO_PROCESSORS: LogitsProcessors = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PacedAnswer:
    """The output tokens, without those that were emitted before, and the finish reason."""

    tokens: list[int]
    finish: Finish


def paced_tokens(
    prompt_ids: Iterable[int],
    stop: Stop,
    sampling: Sampling = GREEDY,
    *,
    output_ids: Iterable[int] = (),
    facts: PacedFacts = DEFAULT_FACTS,
    max_model_len: int = 0,
    thinking: ThinkingBudget | None = None,
    processors: LogitsProcessors = _NO_PROCESSORS,
    grammar: Callable[[list[int]], TokenMask] | None = None,
) -> PacedAnswer:
    """Compute the output of the made-up model for a sequence that nothing disturbs, up to a stop id, a length limit or
    a repetition. The facts' eos tokens are stop ids too, unless `ignore_eos`. With `max_tokens` 0 there is no token,
    and the reason is LIMIT; else there is at least one, even if the prompt reaches the limit already. Stop ids are
    blocked until the output has `min_tokens` tokens, unless the grammar allows nothing else. Where grammar and
    controls leave no token, the output has -1 and goes on, while a worker ends the request. `output_ids` were emitted
    before a migration: they count as output and are not repeated. `max_model_len` 0: the length of the facts. `grammar`
    returns the mask that follows the given output tokens."""
    prompt, before = list(map(int, prompt_ids)), list(map(int, output_ids))
    vocab_size, states = facts.vocab_size, list[int]()
    for place, token in enumerate(prompt + before):
        _extend(states, token, place)
    stop_ids = frozenset(stop.stop_token_ids) | frozenset(() if stop.ignore_eos else facts.eos_token_ids)
    final = min(len(prompt) + stop.max_tokens, max_model_len or facts.max_model_len)
    key, tokens = _key(sampling), list[int]()
    sequence = Sequence(np.array(prompt, np.int32), stop, sampling, np.array(before, np.int32), thinking=thinking)
    controls = LogitsState.of(sequence, processors)
    early = np.array([*stop_ids], np.int32)
    if stop.max_tokens == 0:
        return PacedAnswer(tokens, Finish.LIMIT)
    while True:
        length = len(states)
        last = states[-1]
        probe = states[((last >> 32) * length) >> 32]
        x = mix((probe * PROBE_FACTOR + last + length * PLACE_FACTOR + key) & MASK)
        token = token_of(x, vocab_size)
        mask = None if grammar is None else grammar(before + tokens)
        blocked = forbidden(controls, vocab_size, early if length < len(prompt) + stop.min_tokens else NO_IDS, mask)
        if mask is not None:
            token = choose(x, blocked)
        elif blocked[token]:
            _, token = resample(x, blocked)
        tokens.append(token)
        if token in stop_ids:
            return PacedAnswer(tokens, Finish.STOP)
        if length + 1 >= final:
            return PacedAnswer(tokens, Finish.LENGTH)
        if controls is not None and controls.repeats(token):
            return PacedAnswer(tokens, Finish.REPETITION)
        _extend(states, token, length)
        if controls is not None:
            controls.fed(token)


def forbidden(
    controls: LogitsState | None, vocab_size: int, blocked: Int32 = NO_IDS, mask: TokenMask | None = None
) -> NDArray[np.bool_]:
    """Return, for each token id, whether it may not be sampled. The reason is that it is in `blocked`, the grammar's
    mask forbids it, or the request's controls would lower its logit. The made-up model has no logits to lower, so it
    never samples such a token. If the mask allows nothing but blocked ids, they are not blocked, nor is a token that a
    spent thinking budget forces."""
    blocked = blocked[(blocked >= 0) & (blocked < vocab_size)]  # a stop id may be one that the model does not have
    if mask is not None:
        kept = NO_IDS if mask.allows_only(blocked) else blocked
        return _forbidden_by_request(controls, vocab_size, kept, mask) | mask.forbidden(vocab_size)
    return _forbidden_by_request(controls, vocab_size, blocked, None)


def _forbidden_by_request(
    controls: LogitsState | None, vocab_size: int, blocked: Int32, mask: TokenMask | None
) -> NDArray[np.bool_]:
    """Return, for each token id, whether it is in `blocked` or the request's controls lower its logit. `mask` is only
    passed on to the controls."""
    if controls is None:
        found = np.zeros(vocab_size, np.bool_)
        found[blocked] = True
        return found
    logits = np.zeros(vocab_size, np.float32)
    controls.apply(logits, blocked, mask)
    return logits < 0


def _extend(states: list[int], token: int, place: int) -> None:
    """Append the state (KV) of a further position: the state before plus a hash of token and position."""
    x = (token * TOKEN_FACTOR + place * PLACE_FACTOR) & MASK
    x = ((x ^ (x >> 29)) * FIRST_MIX) & MASK
    states.append(((states[-1] if states else 0) + (x ^ (x >> 32))) & MASK)


def _key(sampling: Sampling) -> int:
    """Hash the seed and the sample index to a key that varies the tokens; 0 if the sequence is greedy."""
    if sampling.temperature < GREEDY_BELOW:
        return 0
    key = ((sampling.sample * SAMPLE_FACTOR + sampling.seed) * FIRST_MIX) & MASK
    return key ^ (key >> 29)

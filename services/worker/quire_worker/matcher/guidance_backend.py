"""Grammars: compiles canonical texts within bounds, anew for each sequence.

Copies of a compiled grammar share its lexer: the states that one sequence adds count against the limits of all others,
and so does an exceeded limit. Compiled for itself, a sequence's grammar is a function of the tokens that it was fed.
llguidance's limits bound a step and a compilation: a grammar that exceeds them fails alone. They count states and items
and not time; see CpuBudget.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from quire_worker.sampling.token_mask import MaskBuilder, bit_words, mask_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llguidance import LLTokenizer

    from quire_worker.arrays import UInt64
    from quire_worker.sampling.token_mask import TokenMask

# By llguidance's own figures the fuel is 20 ms of a compilation, and 17 ms of a step. Grammars of the longest row that
# compiles, such as 490 optional properties, need less than 10,000 items in a step. The states are what a sequence's
# lexer may keep in memory: schemas with formats, patterns and bounds were measured at less than 2,000.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=15_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
_MAX_CAUSE_CHARS = 500


class GrammarError(Exception):  # says what it is; the sequence at that seat ends with it
    """A grammar that cannot be compiled, exceeds its bounds, or does not match what was sampled."""


class GuidanceGrammar:
    """The state of one sequence's grammar."""

    def __init__(
        self, matcher: LLMatcher, tokens: int, named: UInt64, builder: MaskBuilder, eos: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._named = named
        self._builder = builder
        self._eos = eos
        size = mask_bytes(tokens)
        memory = np.zeros(max(-(-size // 8), len(named)), np.uint64)
        self._allowed = memory[: len(named)]
        # llguidance wants exactly the size of its tokenizer's masks.
        self._memory = memory.ctypes.data, size

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        """Feed sampled tokens. Once the answer is complete, further eos tokens (of a request that ignores them) change
        nothing. Raises GrammarError for a token that the grammar does not allow."""
        for token in tokens:
            if token in self._eos and self._matcher.is_stopped():
                continue
            if not self._matcher.consume_token(token):
                cause = _cause(self._matcher)
                raise GrammarError(cause or f"the grammar does not allow the token {token}, which was sampled")

    def compute_mask(self) -> TokenMask:
        """Which tokens may come next. Raises GrammarError where the grammar exceeds its bounds or is at a dead end."""
        self._matcher.unsafe_compute_mask_ptr(*self._memory)
        if self._matcher.is_error():
            raise GrammarError(_cause(self._matcher))
        found = self._builder.build(np.bitwise_and(self._allowed, self._named, out=self._allowed))
        if found is None:
            raise GrammarError("the grammar leaves no token of the model's vocabulary")
        return found


class GuidanceBackend:
    """Belongs to the thread that compiles."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: LLParserLimits = LIMITS,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._builder = MaskBuilder(vocab_size, self._eos)
        self._limits = limits
        self._named = bit_words(vocab_size, self._eos | _named_tokens(tokenizer, vocab_size))

    def compile_grammar(self, text: str) -> tuple[GuidanceGrammar, int]:
        """Compile the grammar of a sequence that begins; returns its state, and the nanoseconds that this took. Raises
        GrammarError."""
        began = time.perf_counter_ns()
        compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        elapsed_ns = time.perf_counter_ns() - began
        if compiled.is_error():
            raise GrammarError(_cause(compiled))
        return GuidanceGrammar(compiled, self._tokenizer.vocab_size, self._named, self._builder, self._eos), elapsed_ns


def _named_tokens(tokenizer: LLTokenizer, vocab_size: int) -> frozenset[int]:
    """The tokens that the tokenizer has. Other ids only pad the model's matrix; llguidance names each of them by its
    number, and a grammar may allow them, as the complement of a token."""
    ids = range(min(vocab_size, tokenizer.vocab_size))
    return frozenset(token for token in ids if tokenizer.decode_bytes([token]) != b"<[%d]>" % token)


def _cause(matcher: LLMatcher) -> str:
    """Return the matcher's message about its error, at most a few lines."""
    return matcher.get_error().strip()[:_MAX_CAUSE_CHARS]

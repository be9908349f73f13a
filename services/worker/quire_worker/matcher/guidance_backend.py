"""GuidanceBackend: compiles grammars with llguidance, a new one for each sequence.

Copies of a compiled grammar would share its lexer, so that the states of one sequence would count against the limits of
all others. A grammar of its own depends on nothing but the tokens of its sequence. llguidance limits the work of a
compilation and of a step, and a grammar that exceeds a limit ends its own sequence alone. The limits count states and
items; CpuBudget limits time.
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

# By llguidance's own figures, the fuel is 20 ms of a compilation, and 17 ms of a step. A schema of 490 optional
# properties, about the most that compile, needs less than 10,000 items in a step. The states are those that the lexer
# of a sequence keeps in memory: schemas with formats, patterns and bounds had less than 2,000.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=15_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
_MAX_CAUSE_CHARS = 500


class GrammarError(Exception):  # the name says that it is an error; it ends one sequence
    """A grammar cannot be compiled, exceeds a limit, or does not allow a token that was sampled."""


class GuidanceGrammar:
    """The compiled grammar of one sequence, and how far the sequence has come in it."""

    def __init__(
        self, matcher: LLMatcher, tokens: int, named: UInt64, builder: MaskBuilder, eos: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._named = named
        self._builder = builder
        self._eos = eos
        memory = np.zeros(max(mask_bytes(tokens) // 8, len(named)), np.uint64)
        self._allowed = memory[: len(named)]
        # llguidance requires exactly the size of its tokenizer's masks, which are whole words of 32.
        self._memory = memory.ctypes.data, 4 * -(-tokens // 32)

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        """Advance by sampled tokens. Raises GrammarError for a token that the grammar does not allow, or that exceeds a
        limit. After the end of the answer, further EOS tokens are allowed and change nothing, for requests with
        `ignore_eos`."""
        for token in tokens:
            if token in self._eos and self._matcher.is_stopped():
                continue
            if not self._matcher.consume_token(token):
                cause = _cause(self._matcher)
                raise GrammarError(cause or f"the grammar does not allow the token {token}, which was sampled")

    def compute_mask(self) -> TokenMask:
        """Return the tokens that may come next, without ids for which the tokenizer has no token. Raises GrammarError
        if the grammar exceeds a limit, or allows no token."""
        self._matcher.unsafe_compute_mask_ptr(*self._memory)
        if self._matcher.is_error():
            raise GrammarError(_cause(self._matcher))
        found = self._builder.build(np.bitwise_and(self._allowed, self._named, out=self._allowed))
        if found is None:
            raise GrammarError("the grammar leaves no token of the model's vocabulary")
        return found


class GuidanceBackend:
    """Compiles the grammars of one model. Belongs to the thread that compiles."""

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
        """Compile the canonical text of a grammar for one sequence. Returns the compiled grammar, and the nanoseconds
        of wall time that the compilation took. Raises GrammarError for a text that does not compile within the
        limits."""
        began = time.perf_counter_ns()
        compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        elapsed_ns = time.perf_counter_ns() - began
        if compiled.is_error():
            raise GrammarError(_cause(compiled))
        return GuidanceGrammar(compiled, self._tokenizer.vocab_size, self._named, self._builder, self._eos), elapsed_ns


def _named_tokens(tokenizer: LLTokenizer, vocab_size: int) -> frozenset[int]:
    """Return the tokens that the tokenizer has. Other ids only pad the model's output matrix. llguidance gives them
    names such as `<[4100]>`, so that a grammar like "any token but one" would allow them."""
    ids = range(min(vocab_size, tokenizer.vocab_size))
    return frozenset(token for token in ids if tokenizer.decode_bytes([token]) != b"<[%d]>" % token)


def _cause(matcher: LLMatcher) -> str:
    """Return llguidance's message about an error, cut to _MAX_CAUSE_CHARS."""
    return matcher.get_error().strip()[:_MAX_CAUSE_CHARS]

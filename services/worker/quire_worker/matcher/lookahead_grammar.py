"""LookaheadGrammar: the grammar of one sequence, which may consume tokens before the sequence samples them.

Where a grammar allows one token only, this token is *forced*: the sequence is sure to sample it. So the masks after
forced tokens can be computed before the sequence samples these tokens. Such masks are *lookahead masks*. A device uses
forced tokens as drafts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quire_worker.matcher.guidance_backend import GrammarError
from quire_worker.sampling.token_mask import MaskKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from quire_worker.matcher.cpu_budget import CpuBudget
    from quire_worker.matcher.guidance_backend import GuidanceGrammar
    from quire_worker.sampling.token_mask import TokenMask


class LookaheadGrammar:
    """Belongs to the thread that works on the sequence. `position` is the position of the sequence's next token.
    `lookahead` is the most lookahead masks at a time; the mask of the next token is not one of them. `clock` returns
    the thread's processor time in nanoseconds, which is charged to the budget."""

    def __init__(
        self, grammar: GuidanceGrammar, position: int, lookahead: int, budget: CpuBudget, clock: Callable[[], int]
    ) -> None:
        self._grammar = grammar
        self.position = position
        self._lookahead = lookahead
        self._budget = budget
        self._clock = clock
        # The mask of the next token, and then the lookahead masks. All but the last mask allow one token, which the
        # grammar has consumed already.
        self._masks: deque[TokenMask] = deque()
        self._error: GrammarError | None = None
        self.masks_computed = 0
        """The number of masks so far, lookahead masks included."""

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        """Advance by sampled tokens. Raises GrammarError for a token that the grammar does not allow, or that exceeds a
        limit. It also raises the error that the lookahead met after such a token. Called by itself, for a replay, it
        charges nothing to the budget."""
        for token in tokens:
            self._accept_token(token)
            self.position += 1

    def compute_mask(self, tokens: Iterable[int]) -> TokenMask:
        """Advance by sampled tokens, and return the mask of the next token, which may be a lookahead mask; charge the
        processor time to the budget. Raises GrammarError if the grammar does not allow a token, exceeds a limit, or
        takes too much processor time."""
        began_ns, consumed = self._clock(), self._consumed_to
        self.accept_tokens(tokens)
        consumed = self._consumed_to - consumed
        if not self._masks:
            self._masks.append(self._next_mask())
        self._budget.charge(self._clock() - began_ns, consumed)
        return self._masks[0]

    @property
    def can_look_ahead(self) -> bool:
        """Whether one more lookahead mask may be computed: the last mask forces a token, the lookahead masks are fewer
        than `lookahead`, and the grammar has not failed."""
        if not self._masks or len(self._masks) > self._lookahead or self._error is not None:
            return False
        return self._masks[-1].kind == MaskKind.ONE

    def look_ahead(self) -> tuple[int, TokenMask] | None:
        """Compute one more lookahead mask, and return its position and the mask; None if `can_look_ahead` is False, or
        the grammar fails or takes too much processor time, which is charged here too. The failure is raised only when
        the sequence samples the token at which the grammar failed, since the sequence may end before."""
        if not self.can_look_ahead:
            return None
        began_ns = self._clock()
        try:
            self._grammar.accept_tokens([self._masks[-1].token])
            mask = self._next_mask()
            self._budget.charge(self._clock() - began_ns, 1)
        except GrammarError as error:
            self._error = error
            return None
        self._masks.append(mask)
        return self._consumed_to, mask

    @property
    def _consumed_to(self) -> int:
        """The position of the first token that the grammar has not consumed."""
        return self.position + max(len(self._masks) - 1, 0)

    def _next_mask(self) -> TokenMask:
        """Compute the mask of the first token that the grammar has not consumed."""
        self.masks_computed += 1
        return self._grammar.compute_mask()

    def _accept_token(self, token: int) -> None:
        """Drop the first mask. If the grammar has not consumed the token yet, let the grammar consume it. Raises
        GrammarError if the grammar does not allow the token, and the error of the lookahead if that failed at this
        token."""
        mask = self._masks.popleft() if self._masks else None
        is_consumed = bool(self._masks) or self._error is not None
        if mask is None or not is_consumed:
            self._grammar.accept_tokens([token])
        elif token != mask.token:
            raise GrammarError(f"the grammar does not allow the token {token}, which was sampled")
        elif not self._masks and self._error is not None:
            raise self._error

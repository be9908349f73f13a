"""LookaheadGrammar: lookahead masks equal those that come without lookahead, and cost the budget no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from quire_worker.matcher.cpu_budget import TOKEN_NS, CpuBudget, GrammarTooSlow
from quire_worker.matcher.guidance_backend import GrammarError
from quire_worker.matcher.lookahead_grammar import LookaheadGrammar
from quire_worker.sampling.token_mask import MaskKind, TokenMask
from tests.fakes.worker.local_matcher import masks_after
from tests.unit.worker.matcher.letter_rows import BACKEND, A, B, C

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_worker.matcher.guidance_backend import GuidanceGrammar

# Tokens 17 to 20 are A to D.
TEXT = 'start: "ABC" /[A-D]{2,5}/'
D = C + 1


class RecordingBudget(CpuBudget):
    """Records the numbers of tokens that are charged."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: list[int] = []

    def charge(self, spent_ns: int, tokens: int) -> None:
        self.charged.append(tokens)
        super().charge(spent_ns, tokens)


class FailingGrammar:
    """Forces the tokens 0, 1, 2 and so on, and exceeds a limit when it is to consume the last of `tokens`."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self.consumed: list[int] = []

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._left -= 1
            if not self._left:
                raise GrammarError("too many states")
            self.consumed.append(token)

    def compute_mask(self) -> TokenMask:
        return TokenMask(MaskKind.ONE, len(self.consumed), b"")


def a_grammar(
    text: str = TEXT, lookahead: int = 7, position: int = 10, budget: CpuBudget | None = None
) -> LookaheadGrammar:
    grammar, _ = BACKEND.compile_grammar(text)
    return LookaheadGrammar(grammar, position, lookahead, budget or CpuBudget(), lambda: 0)


def failing(tokens: int, lookahead: int = 7) -> LookaheadGrammar:
    return LookaheadGrammar(cast("GuidanceGrammar", FailingGrammar(tokens)), 10, lookahead, CpuBudget(), lambda: 0)


def ahead(grammar: LookaheadGrammar) -> list[tuple[int, TokenMask]]:
    """All lookahead masks that it may compute now, with their positions."""
    found = []
    while (each := grammar.look_ahead()) is not None:
        found.append(each)
    return found


def test_lookahead_masks_equal_those_that_come_after_their_tokens() -> None:
    grammar, mask = a_grammar(), masks_after(BACKEND, TEXT)
    assert grammar.compute_mask([]) == mask([])
    assert ahead(grammar) == [(11, mask([A])), (12, mask([A, B])), (13, mask([A, B, C]))]
    assert not grammar.can_look_ahead and grammar.look_ahead() is None, "the last mask forces no token"
    for output in ([A], [A, B], [A, B, C], [A, B, C, D], [A, B, C, D, A]):
        assert grammar.compute_mask(output[-1:]) == mask(output)
        assert grammar.position == 10 + len(output)


def test_several_tokens_may_pass_all_lookahead_masks() -> None:
    grammar, mask = a_grammar(), masks_after(BACKEND, TEXT)
    grammar.compute_mask([])
    ahead(grammar)
    assert grammar.compute_mask([A, B, C, D]) == mask([A, B, C, D]) and grammar.position == 14
    assert grammar.masks_computed == 5, "the next one, three ahead, and the last one"


def test_lookahead_goes_on_as_tokens_come() -> None:
    grammar = a_grammar('start: "ABCDABCD"', lookahead=2)
    grammar.compute_mask([])
    assert [position for position, _ in ahead(grammar)] == [11, 12]
    grammar.compute_mask([A])
    assert [position for position, _ in ahead(grammar)] == [13]
    grammar.compute_mask([B, C])
    assert [position for position, _ in ahead(grammar)] == [14, 15]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_no_more_lookahead_masks_are_computed_than_the_engine_wants(lookahead: int) -> None:
    grammar = a_grammar(lookahead=lookahead)
    assert not grammar.can_look_ahead, "no mask forces a token yet"
    grammar.compute_mask([])
    assert len(ahead(grammar)) == lookahead


def test_lookahead_stops_at_the_end_of_the_answer() -> None:
    """The model ends the answer by one of its eos tokens."""
    grammar = a_grammar('start: "AB"')
    grammar.compute_mask([])
    assert [mask.kind for _, mask in ahead(grammar)] == [MaskKind.ONE, MaskKind.END]


@pytest.mark.parametrize("output", [[B], [A, A], [A, B, D]])
def test_token_that_is_not_the_forced_one_is_refused(output: list[int]) -> None:
    grammar = a_grammar()
    grammar.compute_mask([])
    ahead(grammar)
    with pytest.raises(GrammarError, match=f"does not allow the token {output[-1]}"):
        grammar.compute_mask(output)


def test_failure_of_lookahead_is_raised_only_at_its_token() -> None:
    grammar = failing(tokens=3)
    grammar.compute_mask([])
    assert [position for position, _ in ahead(grammar)] == [11, 12]
    assert not grammar.can_look_ahead
    assert [grammar.compute_mask([token]).token for token in (0, 1)] == [1, 2]
    with pytest.raises(GrammarError, match="too many states"):
        grammar.compute_mask([2])


def test_failure_of_lookahead_does_not_hide_that_a_token_is_wrong() -> None:
    grammar = failing(tokens=1)
    grammar.compute_mask([])
    assert ahead(grammar) == []
    with pytest.raises(GrammarError, match="does not allow the token 5"):
        grammar.compute_mask([5])


def test_grammar_without_lookahead_fails_at_the_same_token() -> None:
    plain, looking = failing(tokens=3, lookahead=0), failing(tokens=3)
    for grammar in (plain, looking):
        grammar.compute_mask([])
        ahead(grammar)
        grammar.compute_mask([0])
        ahead(grammar)
        grammar.compute_mask([1])
        with pytest.raises(GrammarError, match="too many states"):
            grammar.compute_mask([2])


def test_each_token_is_charged_once() -> None:
    """A token is charged with the mask that follows it, whether that is a lookahead mask or not."""
    budget = RecordingBudget()
    grammar = a_grammar(budget=budget)
    grammar.compute_mask([])
    ahead(grammar)
    assert budget.charged == [0, 1, 1, 1]
    grammar.compute_mask([A])
    grammar.compute_mask([B, C, D])
    assert budget.charged == [0, 1, 1, 1, 0, 1] and sum(budget.charged) == 4


def test_slow_lookahead_fails_its_sequence_only_at_its_token() -> None:
    times_ns = iter([0, 0, 0, 2 * TOKEN_NS, *[2 * TOKEN_NS] * 9])
    grammar = LookaheadGrammar(BACKEND.compile_grammar(TEXT)[0], 10, 7, CpuBudget(), lambda: next(times_ns))
    grammar.compute_mask([])
    assert ahead(grammar) == []
    with pytest.raises(GrammarTooSlow):
        grammar.compute_mask([A])

"""Real grammars, and the processor time of this machine."""

from __future__ import annotations

import time

from quire_worker.matcher.wire import MatcherFrameKind
from tests.fakes.worker.local_matcher import letter_backend
from tests.unit.worker.matcher.test_matcher import VOCAB, SequenceAtMatcher

# More tokens than derivations that the parser may follow, but for one letter.
AMBIGUOUS = "start: s\ns: /[A-D]/ | s s | s s s"


def test_ambiguous_grammar_fails_before_it_takes_seconds() -> None:
    """llguidance's limits alone let it take a second for a token."""
    sequence = SequenceAtMatcher(letter_backend(VOCAB, (1, 2)), AMBIGUOUS)
    began = time.thread_time()
    while sequence.failure is None:
        sequence.draw()
        assert time.thread_time() - began < 60
    assert sequence.failure.kind in (MatcherFrameKind.TOO_SLOW, MatcherFrameKind.FAILED)

"""Rows whose grammars are over letters, at a matcher in this process."""

from __future__ import annotations

import numpy as np

from quire_common.sequence import Sequence, Stop
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.matcher.wire import MatcherFrameKind
from tests.fakes.worker.local_matcher import LocalMatcher, letter_backend, masks_after

VOCAB, EOS = 60, (1, 2)
BACKEND = letter_backend(VOCAB, EOS)
# Tokens 17 to 20 are A to D.
TEXT = "start: /[A-D]{3,8}/"
A, B, C = 17, 18, 19
PROMPT = 5


def a_matcher(mask_slots: int = 8, *, prompt: bool = True) -> LocalMatcher:
    return LocalMatcher(BACKEND, VOCAB, mask_slots, prompt=prompt)


def open_row(matcher: LocalMatcher, output: tuple[int, ...] = (), text: str = TEXT) -> RowConstraint:
    prompt, before = np.zeros(PROMPT, np.int32), np.array(output, np.int32)
    return matcher.client.open_sequence(Sequence(prompt, Stop(20), output_ids=before), text)


def allowed(row: RowConstraint, output: int) -> list[int] | None:
    """The tokens that may come as number `output` of the sequence's; None: not known."""
    found = row.mask_at(PROMPT + output)
    return None if found is None else np.flatnonzero(~found.forbidden(VOCAB)).tolist()


def keep(row: RowConstraint, *tokens: int) -> None:
    row.mask_source.add_tokens([(row, tokens)])


def wanted(*output: int, text: str = TEXT) -> list[int]:
    return np.flatnonzero(~masks_after(BACKEND, text)([*output]).forbidden(VOCAB)).tolist()


def opened(matcher: LocalMatcher) -> list[int]:
    """The sequences that the process was asked to open, in order."""
    return [frame.generation for frame in matcher.link.heard if frame.kind is MatcherFrameKind.OPEN]


def take_all(matcher: LocalMatcher) -> None:
    """Take in changes until there are none."""
    while matcher.client.poll():
        pass


def held(matcher: LocalMatcher, row: RowConstraint, output: int) -> bool:
    """Whether a step finds no mask for that token; the row is held then."""
    if allowed(row, output) is not None:
        return False
    matcher.client.hold(row)
    return True

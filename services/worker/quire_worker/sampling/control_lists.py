"""ControlLists: the lists of a request's LogitControls, in the form that rows of logits need.

Siblings (the n samples of one request) share one LogitControls, and so its lists. Thousands of ids take milliseconds of
the model thread to prepare; without sharing, all steps would wait for this once for each sibling. ControlLists does not
know the tokens of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import ref

import numpy as np

if TYPE_CHECKING:
    from quire_common.logit_controls import LogitControls


class ControlLists:
    """Immutable, and used by any number of rows."""

    __slots__ = ("allowed", "bad_tokens", "bad_words", "bias", "bias_ids")

    def __init__(self, controls: LogitControls) -> None:
        self.allowed = np.array(controls.allowed_token_ids, np.int64)
        # Words of one token; longer ones by the token before their last, so that few are compared with the output.
        self.bad_tokens = np.array([word[0] for word in controls.bad_words if len(word) == 1], np.int64)
        self.bad_words: dict[int, list[tuple[list[int], int]]] = {}
        for word in controls.bad_words:
            if len(word) > 1:
                self.bad_words.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self.bias_ids = np.array([token for token, _bias in controls.logit_bias], np.int64)
        self.bias = np.array([bias for _token, bias in controls.logit_bias], np.float32)


# By the identity of the controls, since a hash of their values takes as long as the lists; an entry goes with them.
_MADE: Final[dict[int, tuple[ref[LogitControls], ControlLists]]] = {}


def lists_of(controls: LogitControls) -> ControlLists:
    """Return the lists of these controls. They are made once for each object, and kept as long as the object lives.
    Objects with equal values have lists of their own."""
    key = id(controls)
    made = _MADE.get(key)
    if made is not None and made[0]() is controls:
        return made[1]
    lists = ControlLists(controls)
    _MADE[key] = (ref(controls, lambda gone: _forget(key, gone)), lists)
    return lists


def _forget(key: int, gone: ref[LogitControls]) -> None:
    """Drop an entry, unless another object has the same address by now and owns the entry."""
    made = _MADE.get(key)
    if made is not None and made[0] is gone:
        del _MADE[key]

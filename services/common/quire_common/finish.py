"""Finish reasons of sequences, with their names for clients, and the kinds of parts of an answer's text."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Finish(enum.IntEnum):
    """Why a slot ended, as the worker sees it."""

    NONE = 0
    # End of sequence, or a stop token id.
    STOP = 1
    # max_tokens or the context.
    LENGTH = 2
    # The slot's final limit: a prefill-only sequence.
    LIMIT = 3
    ERROR = 4
    # The answer's end is one pattern over and over.
    REPETITION = 5


class FinishReason(enum.IntEnum):
    """Values of quire.v1.FinishReason: why a request ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


# The worker's Finish as a FinishReason. A row that ended by its limit is a sequence that may go no further.
FINISH_REASONS: NDArray[np.uint8] = np.zeros(256, np.uint8)
FINISH_REASONS[Finish.STOP] = FinishReason.STOP
FINISH_REASONS[Finish.LENGTH] = FinishReason.LENGTH
FINISH_REASONS[Finish.LIMIT] = FinishReason.LENGTH
FINISH_REASONS[Finish.ERROR] = FinishReason.ERROR
FINISH_REASONS[Finish.REPETITION] = FinishReason.REPETITION


class PartKind(enum.IntEnum):
    """The kind of a part of an answer's text, with the numbers of quire.v1.PartKind."""

    CONTENT = 1
    REASONING = 2
    TOOL_NAME = 3
    TOOL_ARGUMENTS = 4

"""Repetition detection: an answer ends that says the same over and over. vLLM's rule and names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.v1 import common_pb2 as pb
from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a look at the end of every answer may cost.
MAX_PATTERN_SIZE = 512


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """An answer ends when its last tokens are `min_count` times one pattern of min to max tokens."""

    max_pattern_size: int
    min_pattern_size: int = 0
    min_count: int = 0

    def found_in(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens end so."""
        for size in range(max(self.min_pattern_size, 1), self.max_pattern_size + 1):
            span = size * self.min_count
            if span > len(tokens):
                return False
            if all(tokens[-place] == tokens[-place - size] for place in range(1, span - size + 1)):
                return True
        return False


def check_repetition(detection: RepetitionDetection) -> None:
    """Raise InvalidArgument for values that make no rule."""
    most, least = detection.max_pattern_size, detection.min_pattern_size
    if not 0 <= least <= most or not 1 <= most <= MAX_PATTERN_SIZE or detection.min_count < 2:
        raise InvalidArgument(
            "BAD_REPETITION_DETECTION",
            f"Patterns of {least} to {most} tokens, {detection.min_count} times, cannot be looked for.",
            f"Choose sizes up to {MAX_PATTERN_SIZE}, min_pattern_size <= max_pattern_size, and min_count of 2 or more.",
            param="repetition_detection",
        )


def repetition_to_pb(detection: RepetitionDetection) -> pb.RepetitionDetection:
    """Domain to wire."""
    return pb.RepetitionDetection(
        max_pattern_size=detection.max_pattern_size,
        min_pattern_size=detection.min_pattern_size,
        min_count=detection.min_count,
    )


def repetition_from_pb(message: pb.RepetitionDetection) -> RepetitionDetection | None:
    """Wire to domain; as in vLLM, a greatest size of 0 asks for nothing. Raises InvalidArgument."""
    if not message.max_pattern_size and not message.min_pattern_size:
        return None
    detection = RepetitionDetection(message.max_pattern_size, message.min_pattern_size, message.min_count)
    check_repetition(detection)
    return detection

"""Repetition detection: ends an answer that repeats one pattern of tokens. The rule and its names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from quire.v1 import common_pb2 as pb
from quire_common.errors import InvalidArgument

# What a look at the end of every answer may cost, in time and memory.
MAX_PATTERN_SIZE = 512
MAX_PATTERN_COUNT = 65_536


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """An answer ends when its last tokens are `min_count` times one pattern of min to max tokens."""

    max_pattern_size: int
    min_pattern_size: int = 0
    min_count: int = 0


def check_repetition(detection: RepetitionDetection) -> None:
    """Raise InvalidArgument unless 0 <= min_pattern_size <= max_pattern_size, the latter is 1 to MAX_PATTERN_SIZE
    tokens, and min_count is 2 to MAX_PATTERN_COUNT."""
    most, least, count = detection.max_pattern_size, detection.min_pattern_size, detection.min_count
    if not 0 <= least <= most or not 1 <= most <= MAX_PATTERN_SIZE or not 2 <= count <= MAX_PATTERN_COUNT:
        raise InvalidArgument(
            "BAD_REPETITION_DETECTION",
            f"Patterns of {least} to {most} tokens, {count} times, cannot be looked for.",
            f"Choose sizes up to {MAX_PATTERN_SIZE}, min_pattern_size <= max_pattern_size, and min_count from 2 to "
            f"{MAX_PATTERN_COUNT}.",
            param="repetition_detection",
        )


def repetition_to_pb(detection: RepetitionDetection) -> pb.RepetitionDetection:
    """Encode the rule."""
    return pb.RepetitionDetection(
        max_pattern_size=detection.max_pattern_size,
        min_pattern_size=detection.min_pattern_size,
        min_count=detection.min_count,
    )


def repetition_from_pb(message: pb.RepetitionDetection) -> RepetitionDetection | None:
    """Decode and check the rule; None if both sizes are 0, which asks for none, as in vLLM. Raises InvalidArgument for
    values out of bounds."""
    if not message.max_pattern_size and not message.min_pattern_size:
        return None
    detection = RepetitionDetection(message.max_pattern_size, message.min_pattern_size, message.min_count)
    check_repetition(detection)
    return detection

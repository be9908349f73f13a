"""Converts the fields of a body that change logits to LogitControls, as vLLM does: biases are clamped, and an empty
allow-list is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_common.logit_controls import MAX_BIAS, NEUTRAL, LogitControls
from quire_common.repetition import RepetitionDetection, check_repetition
from quire_common.request_parameters import PENALTIES, NumberCodec
from quire_router.front.parameters.fields import check_fields
from quire_router.front.parameters.tables import REPETITION

if TYPE_CHECKING:
    from collections.abc import Mapping

_PENALTIES = NumberCodec(PENALTIES)


def controls_of(values: Mapping[str, Any]) -> LogitControls | None:
    """Return the penalties, biases and allowed tokens that checked fields ask for; None if they change nothing. Clamps
    biases. Raises InvalidArgument for an empty allow-list. `bad_words` are added later, when they are token ids."""
    allowed = values["allowed_token_ids"]
    if allowed is not None and not allowed:
        raise InvalidArgument(
            "EMPTY_LIST",
            "allowed_token_ids is an empty list.",
            "Allow some, or leave it out.",
            param="allowed_token_ids",
        )
    found = LogitControls(
        **_PENALTIES.from_fields(values),
        logit_bias=tuple((token, max(-MAX_BIAS, min(bias, MAX_BIAS))) for token, bias in values["logit_bias"] or ()),
        allowed_token_ids=allowed or (),
    )
    return None if found == NEUTRAL else found


def repetition_of(asked: Mapping[str, Any] | None) -> RepetitionDetection | None:
    """Convert the object `repetition_detection`; None if it is missing or both its sizes are 0, as in vLLM. Raises
    InvalidArgument for unknown or wrong fields, and for sizes and counts out of bounds."""
    if asked is None:
        return None
    values = check_fields(asked, REPETITION)
    if not values["max_pattern_size"] and not values["min_pattern_size"]:
        return None
    detection = RepetitionDetection(values["max_pattern_size"], values["min_pattern_size"], values["min_count"])
    check_repetition(detection)
    return detection

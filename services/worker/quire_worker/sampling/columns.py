"""The sampling parameters of one step's sampled rows, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_worker.arrays import Int32, Int64

if TYPE_CHECKING:
    from quire_worker.sampling.logits_state import LogitsState
    from quire_worker.sampling.param_rows import ParamRows
    from quire_worker.sampling.token_mask import TokenMask


@dataclass(slots=True)
class SamplingColumns:
    """Meanings and units are those of StepBatch."""

    params: ParamRows
    """[N]."""
    position: Int64
    """[N] absolute index of the token that is sampled."""
    blocked: Mapping[int, Int32] = field(default_factory=dict)
    """Row -> token ids that may not be sampled."""
    controls: Mapping[int, LogitsState] = field(default_factory=dict)
    """Row -> what else its request asked of the logits."""
    masks: Mapping[int, TokenMask] = field(default_factory=dict)
    """Row -> the tokens that its grammar allows."""

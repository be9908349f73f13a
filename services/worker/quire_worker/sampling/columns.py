"""The sampling parameters of one step's sampled rows, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_worker.arrays import Float32, Int32, Int64, UInt32, UInt64
from quire_worker.sampling.logits_state import LogitsState


@dataclass(slots=True)
class SamplingColumns:
    """All [N] but `blocked`; meanings and units are those of StepBatch."""

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: UInt64
    sample_index: UInt32
    position: Int64
    """Absolute index of the token that is drawn."""
    blocked: Mapping[int, Int32] = field(default_factory=dict)
    """Row -> token ids that may not be drawn."""
    controls: Mapping[int, LogitsState] = field(default_factory=dict)
    """Row -> what else its request asked of the logits."""

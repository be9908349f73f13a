"""Sampling columns with defaults, for tests of the sampler."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire_worker.sampling.columns import SamplingColumns


def columns(rows: int, **fields: Any) -> SamplingColumns:
    def column(name: str, default: float, dtype: type) -> Any:
        return np.broadcast_to(np.asarray(fields.get(name, default), dtype), rows).copy()

    return SamplingColumns(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=column("seed", 0, np.uint64),
        sample_index=column("sample_index", 0, np.uint32),
        position=column("position", 5, np.int64),
        blocked=fields.get("blocked", {}),
        controls=fields.get("controls", {}),
    )

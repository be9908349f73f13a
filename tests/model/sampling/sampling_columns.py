"""Sampling columns with defaults, for tests of the sampler."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.param_rows import PARAM_ROW, param_rows


def columns(rows: int, **fields: Any) -> SamplingColumns:
    asked = {name: values for name, values in fields.items() if name in (PARAM_ROW.names or ())}
    return SamplingColumns(
        params=param_rows(rows, **{"temperature": 1.0, **asked}),
        position=np.broadcast_to(np.asarray(fields.get("position", 5), np.int64), rows).copy(),
        blocked=fields.get("blocked", {}),
        controls=fields.get("controls", {}),
        masks=fields.get("masks", {}),
    )

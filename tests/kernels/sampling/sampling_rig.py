"""What tests of drawing begin with: logits, random columns, and the device's tokens of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire_common.request_parameters import LIMITS
from quire_worker.ops.triton.sampling import DeviceSamplingColumns, sample_rows
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.param_rows import mark_filtered, param_rows

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCAB = 1500


def make(rows: int, seed: int) -> tuple[Tensor, SamplingColumns]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0.0, 3.0, (rows, VOCAB)).astype(np.float32))
    logits[:, 7] = logits[:, 9]  # equals
    return logits, SamplingColumns(
        params=param_rows(
            rows,
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7], rows),
            top_k=rng.choice([0, 1, 5, 50, 1400, VOCAB], rows),
            top_p=rng.choice([1.0, 1.0, 0.1, 0.9, 0.99], rows),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.5], rows),
            typical_p=np.random.default_rng(seed + 1).choice([1.0, 1.0, 0.95, 0.5, 0.1], rows),
            seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
            sample_index=rng.integers(0, 4, rows),
        ),
        position=rng.integers(1, 5000, rows).astype(np.int64),
    )


def without_limits(columns: SamplingColumns) -> None:
    """Let all rows be drawn from all tokens."""
    for each in LIMITS:
        columns.params[each.name] = each.default


def on_device(columns: SamplingColumns, **more: list[int] | list[list[int]]) -> DeviceSamplingColumns:
    rows = len(columns.params)
    mark_filtered(columns.params)

    def ints(values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64).astype(np.int32)).to(DEVICE)

    return DeviceSamplingColumns(
        params=torch.from_numpy(columns.params.view(np.int32).copy()).to(DEVICE),
        position=ints(columns.position),
        blocked=ints(more.get("blocked", [0] * rows)),
        stop_id=ints(more.get("stop_id", [[-1, -1]] * rows)),
        wanted=ints(more.get("wanted", [1] * rows)),
        last=ints(more.get("last", [0] * rows)),
        slot=ints(more.get("slot", list(range(rows)))),
    )


def run(
    logits: Tensor, columns: DeviceSamplingColumns, *, filtered: bool = True
) -> tuple[list[int], list[int], list[int]]:
    rows = logits.shape[0]
    last_token = torch.full((rows + 4,), 77, dtype=torch.int32, device=DEVICE)
    token, finish = (torch.full((rows,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    sample_rows(logits.to(DEVICE), columns, last_token, token, finish, filtered=filtered, pdl=False)
    return token.tolist(), finish.tolist(), last_token.tolist()

"""Logprobs of sampled tokens: the reference of `ops.logprobs`. Of raw logits, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire_worker.step import Float32, Int32, LogprobColumns


def logprob_columns(logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
    """Columns for the rows of logits [N, V] with wanted [N] >= 0 and a token that is not -1; None without any."""
    asked = np.flatnonzero((wanted >= 0) & (token >= 0))
    if asked.size == 0:
        return None
    rows: Float32 = logits[torch.from_numpy(asked)].numpy()
    normaliser = torch.from_numpy(rows).double().logsumexp(dim=-1).numpy()
    chosen = rows[np.arange(asked.size), token[asked]]
    rank = 1 + np.count_nonzero(rows > chosen[:, None], axis=1)
    tops = [_top(row, min(int(count), row.size)) for row, count in zip(rows, wanted[asked], strict=True)]
    top_count = np.array([top.size for top in tops], np.int32)
    flat_row = np.repeat(np.arange(asked.size), top_count)
    top_id = np.concatenate(tops)
    return LogprobColumns(
        token_index=asked.astype(np.int32),
        logprob=(chosen - normaliser).astype(np.float32),
        rank=rank.astype(np.int32),
        top_count=top_count,
        top_id=top_id,
        top_logprob=(rows[flat_row, top_id] - normaliser[flat_row]).astype(np.float32),
    )


def _top(row: Float32, count: int) -> Int32:
    """Ids of the largest logits, largest first, the lower id first among equals."""
    if count == 0:
        return np.empty(0, np.int32)
    least = np.partition(row, row.size - count)[row.size - count]
    ids = np.flatnonzero(row >= least)
    order = np.argsort(-row[ids], kind="stable")[:count]
    return ids[order].astype(np.int32)

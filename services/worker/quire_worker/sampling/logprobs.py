"""Logprobs of sampled tokens: the reference of `ops.logprobs`. They are computed from the raw logits, before all
changes for sampling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Float32, Int32
from quire_worker.step import nan_logits


def logprob_columns(logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
    """Return logprob and rank (1: no logit is larger) of each sampled token, and the `wanted` (at most V) most likely
    tokens of its row, among which the sampled one may be. They are for rows of logits [N, V] with wanted [N] >= 0 and a
    token [N] that is not negative. Returns None if there is no such row. Raises Internal NAN_LOGITS if the largest
    logit of such a row is NaN or infinite."""
    asked = np.flatnonzero((wanted >= 0) & (token >= 0))
    if asked.size == 0:
        return None
    rows = logits[torch.from_numpy(asked)]
    values: Float32 = rows.numpy()
    peak = values.max(axis=1, keepdims=True)
    if not np.isfinite(peak).all():
        raise nan_logits()
    normaliser = peak[:, 0] + np.log(torch.from_numpy(values - peak).double().exp_().numpy().sum(axis=1))
    chosen = values[np.arange(asked.size), token[asked]]
    rank = 1 + np.count_nonzero(values > chosen[:, None], axis=1)
    count = np.minimum(wanted[asked], values.shape[1])
    top_id = _top_ids(rows, count)
    owner = np.repeat(np.arange(asked.size), count)
    return LogprobColumns(
        token_index=asked.astype(np.int32),
        logprob=(chosen - normaliser).astype(np.float32),
        rank=rank.astype(np.int32),
        top_count=count.astype(np.int32),
        top_id=top_id,
        top_logprob=(values[owner, top_id] - normaliser[owner]).astype(np.float32),
    )


def _top_ids(rows: Tensor, count: Int32) -> Int32:
    """Return the ids of each row's `count` largest logits, row after row in one array: largest first, the lower id
    first among equals."""
    most = int(count.max())
    if most == 0:
        return np.empty(0, np.int32)
    least: Float32 = rows.topk(most, dim=-1).values.numpy()
    found = []
    for row, lowest, wanted in zip(rows.numpy(), least, count.tolist(), strict=True):
        if wanted:
            ids = np.flatnonzero(row >= lowest[wanted - 1])
            found.append(ids[np.argsort(-row[ids], kind="stable")[:wanted]])
    return np.concatenate(found).astype(np.int32)

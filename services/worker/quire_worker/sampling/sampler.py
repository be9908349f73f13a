"""From logits to tokens, row by row: the reference of `ops.sample`.

Exact definition for a row of logits x, blocked tokens being -inf:

    temperature < 1e-5   the token of the largest x, the lowest id among equals
    otherwise            z = x / temperature (float32), e = exp(z - max z) (float64)
      min_p              keeps e >= min_p
      top_k              keeps e >= the k-th largest e (all equals of the k-th)
      top_p              of the sum of what is kept so far, keeps the tokens whose strictly larger ones sum to < top_p
      token              the largest z + noise (float64) among the kept, the lowest id among equals; see `gumbel`

The order is vLLM's: min_p, then top_k, then top_p over what remains. A row's token depends on that row alone, bit for
bit. The vocabulary is never sorted: top_p sorts only tokens too likely to lie wholly in the tail of mass 1 - top_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.gumbel import LANES, Float64, noise_of_rows, noise_of_tokens
from quire_worker.step import Bool, Float32, Int32, Int64

GREEDY_BELOW = 1e-5
DAMAGED = -1
_BLOCK_ELEMENTS = 1 << 16


def sample(logits: Tensor, columns: SamplingColumns) -> Int32:
    """Token ids [N] of logits [N, V] float32; DAMAGED where a row's largest logit is not finite."""
    if columns.blocked:
        logits = logits.clone()
        for row, ids in columns.blocked.items():
            logits[row, torch.from_numpy(ids).to(torch.int64)] = -torch.inf
    top = logits.amax(dim=-1)
    greedy = columns.temperature < GREEDY_BELOW
    if greedy.all():
        token: Int32 = logits.argmax(dim=-1).to(torch.int32).numpy()
    else:
        token = np.empty(greedy.size, np.int32)
        if greedy.any():
            token[greedy] = logits[torch.from_numpy(greedy)].argmax(dim=-1).numpy()
        _draw(logits, top, np.flatnonzero(~greedy), columns, token)
    token[~torch.isfinite(top).numpy()] = DAMAGED
    return token


@dataclass(slots=True)
class _Candidates:
    """Kept tokens of the rows that keep few."""

    row: list[Int64]
    token: list[Int64]


def _draw(logits: Tensor, top: Tensor, rows: Int64, columns: SamplingColumns, token: Int32) -> None:
    """Write tokens of the rows that are not greedy."""
    vocab_size = logits.shape[1]
    temperature = torch.from_numpy(columns.temperature[rows])[:, None]
    z = logits[torch.from_numpy(rows)].div_(temperature)
    few = _Candidates([], [])
    whole = _filter(z, top[torch.from_numpy(rows)] / temperature[:, 0], rows, columns, few)
    scaled = z.numpy()
    if few.row:
        _draw_from_few(scaled, rows, columns, few, token)
    step = max(1, _BLOCK_ELEMENTS // vocab_size)
    for begin in range(0, whole.size, step):
        part = whole[begin : begin + step]
        mine = rows[part]
        noise = noise_of_rows(columns.seed[mine], columns.sample_index[mine], columns.position[mine], vocab_size)
        noise += scaled[part]
        token[mine] = noise.argmax(axis=1)


def _filter(z: Tensor, top: Tensor, rows: Int64, columns: SamplingColumns, few: _Candidates) -> Int64:
    """Apply min_p, top_k and top_p. Rows that keep few tokens go to `few`; of the others, whose indices are returned,
    what is not kept becomes -inf in z."""
    vocab_size = z.shape[1]
    top_k, top_p, min_p = columns.top_k[rows], columns.top_p[rows], columns.min_p[rows]
    filtered: Bool = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)
    finite: Bool = torch.isfinite(top).numpy()
    chosen = np.flatnonzero(filtered & finite)
    if chosen.size == 0:
        return np.flatnonzero(finite)
    weights: Float64 = (z[torch.from_numpy(chosen)] - top[torch.from_numpy(chosen)][:, None]).double().exp_().numpy()
    scaled: Float32 = z.numpy()
    for weight, index in zip(weights, chosen, strict=True):
        least = _least_weight(weight, int(top_k[index]), float(top_p[index]), float(min_p[index]))
        kept = np.flatnonzero(weight >= least)
        if kept.size * LANES < vocab_size:
            few.row.append(np.full(kept.size, index))
            few.token.append(kept)
            finite[index] = False
        else:
            scaled[index, weight < least] = -np.inf
    return np.flatnonzero(finite)


def _least_weight(weight: Float64, top_k: int, top_p: float, min_p: float) -> float:
    """The least weight that a row keeps; the largest weight is 1."""
    least = min_p
    if 0 < top_k < weight.size:
        least = max(least, float(np.partition(weight, weight.size - top_k)[weight.size - top_k]))
    if top_p >= 1.0:
        return least
    kept = weight[weight >= least]
    total = kept.sum()
    # Tokens below this sum to less than half of the tail that top_p drops.
    likely = np.sort(kept[kept > 0.5 * (1.0 - top_p) * total / weight.size])[::-1]
    larger = np.concatenate(([0.0], np.cumsum(likely)[:-1]))
    count = max(1, int(np.count_nonzero(larger < top_p * total)))
    return float(likely[count - 1])


def _draw_from_few(scaled: Float32, rows: Int64, columns: SamplingColumns, few: _Candidates, token: Int32) -> None:
    index, ids = np.concatenate(few.row), np.concatenate(few.token)
    mine = rows[index]
    score = noise_of_tokens(columns.seed[mine], columns.sample_index[mine], columns.position[mine], ids)
    score += scaled[index, ids]
    begin = 0
    for row, kept in zip(few.row, few.token, strict=True):
        end = begin + kept.size
        token[rows[row[0]]] = kept[score[begin:end].argmax()]
        begin = end

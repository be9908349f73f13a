"""From logits to tokens, row by row: the reference of `ops.sample`.

Exact definition for a row of logits x, changed as the request asked (see logits_state), blocked tokens and those that
its grammar forbids (see token_mask) being -inf:

    temperature < 1e-5   the token of the largest x, the lowest id among equals
    otherwise            z = x / temperature and e = exp(z - max z), in float32
      min_p              keeps e >= min_p
      top_k              keeps z >= the k-th largest z (all equals of the k-th)
      top_p              of the sum (float64) of what is kept so far, keeps the tokens whose strictly larger ones sum to
                         less than top_p
      typical_p          of the distribution of what is kept so far (float64), keeps the tokens whose -log p differs
                         from its entropy by at most t, t being the least with which their sum reaches typical_p
      token              the largest z + noise (float64) among the kept, the lowest id among equals; see `gumbel`

The order is vLLM's: min_p, then top_k, then top_p over what remains (the first two commute); typical_p is last, as in
transformers and TGI. A row's token depends on
that row alone, bit for bit. The vocabulary is never sorted: top_p sorts only tokens that are too likely to lie wholly
in the tail of mass 1 - top_p. Noise is evaluated for the kept tokens alone where they are few.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire_worker.arrays import Bool, Float32, Int32, Int64
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.gumbel import LANES, noise_of_rows, noise_of_tokens
from quire_worker.sampling.param_rows import GREEDY_BELOW, asks_limits
from quire_worker.step import DAMAGED, NOTHING_LEFT

_NONE = np.float32(0.0)
_BLOCK_ELEMENTS = 1 << 16
_NEAR = 256


def sample(logits: Tensor, columns: SamplingColumns) -> Int32:
    """Sample a token id for each row of logits [N, V] float32, by the definition above. The logits stay unchanged.

    A row gets DAMAGED if its largest raw logit is not finite, and it has a grammar or the largest is not finite after
    bans and controls either. It gets NOTHING_LEFT if only the largest after bans, controls and grammar is not finite. A
    logits processor that fails is noted in its row's controls.
    """
    raw = logits
    if columns.blocked or columns.controls or columns.masks:
        logits = logits.clone()
        _restrict(logits.numpy(), columns)
    values: Float32 = logits.numpy()
    token: Int32 = values.argmax(axis=1).astype(np.int32)
    # A row with a NaN gives the NaN.
    top: Float32 = values[np.arange(len(token)), token]
    sound = np.isfinite(top)
    if columns.masks:  # damage shows also where the grammar forbids the token
        masked = list(columns.masks)
        sound[masked] &= np.isfinite(raw[masked].amax(dim=-1).numpy())
    sampled = np.flatnonzero(sound & (columns.params["temperature"] >= GREEDY_BELOW))
    if sampled.size:
        temperature = columns.params["temperature"][sampled, None]
        token[sampled] = _sample_rows(values[sampled] / temperature, top[sampled, None] / temperature, columns, sampled)
    if not sound.all():
        token[~sound] = np.where(np.isfinite(raw.amax(dim=-1).numpy()[~sound]), NOTHING_LEFT, DAMAGED)
    return token


def _restrict(values: Float32, columns: SamplingColumns) -> None:
    """Change, in place, the logits [N, V] of rows with blocked tokens, controls or masks: controls are applied, and
    what may not be sampled becomes -inf. Blocked tokens are free if the row's mask allows no others."""
    blocked = dict(columns.blocked)
    for row, mask in columns.masks.items():
        if row in blocked and mask.allows_only(blocked[row]):
            del blocked[row]
        mask.restrict(values[row])
    for row, ids in blocked.items():
        if row not in columns.controls:
            values[row, ids] = -np.inf
    for row, controls in columns.controls.items():
        controls.apply(values[row], blocked.get(row), columns.masks.get(row))
        if row in columns.masks:  # what a logits processor made of the other tokens counts for nothing
            columns.masks[row].restrict(values[row])


@dataclass(slots=True)
class _Filtered:
    """Rows that keep few tokens, with these tokens, and the indices of the other rows."""

    rows: list[int] = field(default_factory=list)
    kept: list[Int64] = field(default_factory=list)
    others: list[int] = field(default_factory=list)


def _sample_rows(scaled: Float32, top: Float32, columns: SamplingColumns, rows: Int64) -> Int64:
    """Sample tokens for rows that are not greedy: the largest `scaled` logit plus Gumbel noise among the tokens that
    the limits keep. `rows` are their indices in the columns, and `top` their largest scaled logits. Overwrites `scaled`
    [N, V]."""
    token = np.empty(rows.size, np.int64)
    filtered = _filter(scaled, top, columns, rows)
    if filtered.rows:
        size = [kept.size for kept in filtered.kept]
        ids, owner = np.concatenate(filtered.kept), np.repeat(filtered.rows, size)
        mine = rows[owner]
        params = columns.params.take(mine)
        score = noise_of_tokens(params["seed"], params["sample_index"], columns.position[mine], ids)
        score += scaled[owner, ids]
        end = np.cumsum(size)
        for row, kept, begin in zip(filtered.rows, filtered.kept, end - size, strict=True):
            token[row] = kept[score[begin : begin + kept.size].argmax()]
    vocab_size = scaled.shape[1]
    step = max(1, _BLOCK_ELEMENTS // vocab_size)
    for first in range(0, len(filtered.others), step):
        part = filtered.others[first : first + step]
        mine = rows[part]
        params = columns.params.take(mine)
        noise = noise_of_rows(params["seed"], params["sample_index"], columns.position[mine], vocab_size)
        noise += scaled[part]
        token[part] = noise.argmax(axis=1)
    return token


def _filter(scaled: Float32, top: Float32, columns: SamplingColumns, rows: Int64) -> _Filtered:
    """Apply the rows' limits (top_k, top_p and the like). Returns the rows that keep less than a quarter of the
    vocabulary, with these tokens. In the other rows, tokens that are not kept become -inf in `scaled`."""
    vocab_size = scaled.shape[1]
    params = columns.params.take(rows)
    asked = asks_limits(params)
    found = _Filtered(others=np.flatnonzero(~asked).tolist())
    chosen = np.flatnonzero(asked)
    if chosen.size == 0:
        return found
    # Through float64, whose exp does not slow down where float32 underflows.
    weight: Float32 = torch.from_numpy(scaled[chosen] - top[chosen]).double().exp_().float().numpy()
    for each, row in zip(weight, chosen.tolist(), strict=True):
        kept = _kept(scaled[row], each, params[row])
        if kept.size * LANES < vocab_size:
            found.rows.append(row)
            found.kept.append(kept)
        else:
            dropped = np.ones(vocab_size, np.bool_)
            dropped[kept] = False
            scaled[row, dropped] = -np.inf
            found.others.append(row)
    return found


def _kept(scaled: Float32, weight: Float32, draw: np.void) -> Int64:
    """Return the ids, ascending, of the tokens that the limits (min_p, top_k, top_p, typical_p) of a row keep. `weight`
    is exp(z - max z).

    Tokens of weight 0 are not kept. The range of the noise is about 21, so a token that is 100 below the largest cannot
    win.
    """
    top_k, top_p, min_p = int(draw["top_k"]), float(draw["top_p"]), float(draw["min_p"])
    mass = weight
    if min_p > 0.0:
        mass = np.where(weight >= min(min_p, 1.0), mass, _NONE)
    if 0 < top_k < scaled.size:
        least = np.partition(scaled, scaled.size - top_k)[scaled.size - top_k]
        mass = np.where(scaled >= least, mass, _NONE)
    kept = np.flatnonzero(mass >= _top_p_mass(mass, top_p) if top_p < 1.0 else mass > _NONE)
    typical_p = float(draw["typical_p"])
    return kept[_typical(scaled[kept], weight[kept], typical_p)] if typical_p < 1.0 else kept


def _typical(scaled: Float32, weight: Float32, typical_p: float) -> Bool:
    """Return flags of the tokens that locally typical sampling keeps (Meister et al. 2022): those nearest to the
    entropy, until they weigh typical_p. Equally near tokens are kept too.

    -log p differs from the entropy by as much as z differs from its mean.
    """
    z, mass = scaled.astype(np.float64), weight.astype(np.float64)
    wanted = typical_p * mass.sum()
    distance = np.abs(z - (mass * z).sum() / mass.sum())
    # Mostly few tokens are near enough: the others are not sorted.
    size = min(_NEAR, len(distance))
    near = distance <= np.partition(distance, size - 1)[size - 1]
    while mass[near].sum() < wanted and size < len(distance):
        size = min(4 * size, len(distance))
        near = distance <= np.partition(distance, size - 1)[size - 1]
    order = np.argsort(distance[near], kind="stable")
    last = int(np.searchsorted(np.cumsum(mass[near][order]), wanted))
    found: Bool = distance <= distance[near][order[min(last, len(order) - 1)]]
    return found


def _top_p_mass(mass: Float32, top_p: float) -> float:
    """Return the weight of the least likely token that top_p keeps: tokens whose strictly larger ones sum to less than
    top_p of all, and always the likeliest. Only tokens that are likely enough are sorted."""
    total = mass.sum(dtype=np.float64)
    # All tokens below this together make up at most half of the tail that top_p drops.
    likely = np.sort(mass[mass > 0.5 * (1.0 - top_p) * total / mass.size])[::-1]
    larger = np.cumsum(likely, dtype=np.float64) - likely
    # Sums of what is strictly larger: among equals, that of the first.
    return float(likely[max(1, int(np.count_nonzero(larger < top_p * total))) - 1])

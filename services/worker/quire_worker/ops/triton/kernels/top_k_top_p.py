"""Top-k, top-p, min-p and typical-p: a search finds the range of logits that a row keeps.

The definition is that of sampling/sampler.py, with float32 in place of float64: z = x / temperature. min_p and top_k
are applied first, then top_p to the rest, then typical_p (typical_p.py) to the rest of that. The vocabulary is never
sorted. One pass finds the largest logit of each group of neighbours. With a small top_k, these maxima show which few
groups can hold kept tokens, and the rest is done in registers.

Otherwise a threshold is found by quartering the ordered integers of float32; each turn is one pass over logits that lie
in the L2 cache. Only rows that are not greedy and have top_k or typical_p are searched. min_p needs no search, and
top_p without these two is applied by top_p.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import from_ordered, let_next_start, ordered, wait
from quire_worker.ops.triton.kernels.row import PARAM, WORDS, has_filters, row_logits, sampling_param, store_range
from quire_worker.ops.triton.kernels.typical_p import typical_range

# ordered(-inf)
_LEAST: tl.constexpr = tl.constexpr(-2139095041)


@triton.jit
def group_maxima_kernel(
    logits,
    param_rows,
    blocked,
    stop_id,
    maximum,
    control,
    changed,
    allowed,
    vocab,
    stops,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, PARTS]: maximum [rows, PARTS * GROUPS] takes the largest logit of each GROUP neighbours, in rows with
    limits; NaN where one is NaN, -inf past the end. Other arguments are as in top_k_top_p_kernel."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    if has_filters(param_rows, row):
        group = part * GROUPS + tl.arange(0, GROUPS)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = row_logits(
            logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
        )
        spoiled = tl.max((x != x).to(tl.int32), axis=1) > 0
        most = tl.where(spoiled, float("nan"), tl.max(x, axis=1))
        tl.store(maximum + row * (PARTS * GROUPS) + group, most)


@triton.jit
def top_k_top_p_kernel(
    logits,
    param_rows,
    blocked,
    stop_id,
    maximum,
    chosen,
    candidate,
    ranges,
    control,
    changed,
    allowed,
    vocab,
    stops,
    groups,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: ranges [rows, RANGE] takes the range of logits that a row keeps by min_p, top_k, top_p and
    typical_p, which is everything for a greedy row or one without limits. A row with top_p but neither top_k nor
    typical_p leaves top_p to top_p_kernel.

    A top_k of `vocab` or more is none. With a top_k of at most LANES / 4, group maxima name the few groups to search.
    With a larger one, or if these groups have more than CANDIDATES logits to search, the bounds of top_k and top_p are
    searched by passes over the row. logits [rows, vocab]. blocked [rows] not 0: stop_id [rows, stops] may not be
    sampled; -1 is no id. maximum [rows, groups], at most LANES groups. Scratch memory: chosen [rows, groups] int32 and
    candidate [rows, CANDIDATES] float32; FEW is a smaller number of candidates that are searched faster. CONTROLLED: a
    row whose control [rows] is not 0 takes the logits of changed [rows, vocab] instead, and its blocked ids are not
    looked at. MASKED: only tokens whose bit in allowed [rows, words] is 1 count.
    """
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    if not has_filters(param_rows, row):
        store_range(ranges, row, float("-inf"), float("inf"), 1.0)
        return
    heat = sampling_param(param_rows, row, PARAM.temperature)
    k = tl.load(param_rows + row * WORDS + PARAM.top_k)
    p = sampling_param(param_rows, row, PARAM.top_p)
    least = sampling_param(param_rows, row, PARAM.min_p)
    lane = tl.arange(0, LANES)
    of_group = tl.load(maximum + row * groups + lane, mask=lane < groups, other=float("-inf"))
    most = tl.max(tl.where(of_group == of_group, of_group, float("-inf")), axis=0)
    cut = tl.full([], float("-inf"), tl.float32)
    if least > 0.0:
        # exp((x - most) / heat) >= min_p
        cut = most + heat * tl.log(tl.minimum(least, 1.0))
    few = tl.zeros([], tl.int32)
    by_k = (k > 0) & (k < vocab)
    if by_k & (k <= LANES // 4):
        # At least k logits reach the k-th largest of the groups' maxima, and hardly more do; half of its bits suffice.
        bound = heavy_key(ordered(of_group), tl.full([LANES], 1.0, tl.float32), k, 2, 8)
        floor = from_ordered(tl.maximum(bound, _LEAST))
        kept, counted = candidate + row * CANDIDATES, chosen + row * groups
        reaches = (of_group >= floor) & (lane < groups)
        tl.store(counted + tl.cumsum(reaches.to(tl.int32), axis=0) - 1, lane, mask=reaches)
        tl.debug_barrier()
        many = tl.sum(reaches.to(tl.int32), axis=0)
        found = tl.zeros([], tl.int32)
        place = tl.arange(0, BLOCK)
        for start in range(0, many, BLOCK // GROUP):
            index = start + place // GROUP
            group = tl.load(counted + index, mask=index < many, other=groups)
            token = tl.where(index < many, group * GROUP + place % GROUP, vocab)
            x = row_logits(
                logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
            )
            mine = (x >= floor) & (token < vocab)
            at = found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
            tl.store(kept + at, x, mask=mine & (at < CANDIDATES))
            found += tl.sum(mine.to(tl.int32), axis=0)
        tl.debug_barrier()
        if found <= FEW:
            cut = _among(kept, found, cut, most, heat, k, p, 4, FEW)
            few += 1
        elif found <= CANDIDATES:
            cut = _among(kept, found, cut, most, heat, k, p, 2, CANDIDATES)
            few += 1
    typical = sampling_param(param_rows, row, PARAM.typical_p)
    by_typical = (typical < 1.0) & (tl.abs(most) < float("inf"))
    if (few == 0) & by_k:
        cut = _top_k_cut(
            logits, row, blocked, stop_id, control, changed, allowed, k, cut, vocab, stops, BLOCK, CONTROLLED, MASKED
        )
    if (few == 0) & (p < 1.0) & (by_k | by_typical):
        cut = _top_p_cut(
            logits,
            row,
            blocked,
            stop_id,
            control,
            changed,
            allowed,
            heat,
            p,
            most,
            cut,
            vocab,
            stops,
            BLOCK,
            CONTROLLED,
            MASKED,
        )
    # All limits but typical_p keep the largest logit.
    cut = tl.minimum(cut, most)
    if by_typical:
        # The three masses of a whole block would take more registers than there are.
        HALF: tl.constexpr = BLOCK // 2
        cut, most = typical_range(
            logits,
            row,
            blocked,
            stop_id,
            control,
            changed,
            allowed,
            heat,
            typical,
            most,
            cut,
            vocab,
            stops,
            HALF,
            CONTROLLED,
            MASKED,
        )
    # top_p.py applies the top_p of the other rows.
    store_range(ranges, row, cut, most, tl.where(by_k | by_typical, 1.0, p))


@triton.jit
def _among(candidate, found, cut, most, heat, k, p, BITS: tl.constexpr, LANES: tl.constexpr):
    """Return the least logit that top_k keeps, and then top_p among these, over the first `found` of the candidate
    logits. It is at least `cut`. `heat`: the temperature. `most`: the row's largest logit."""
    lane = tl.arange(0, LANES)
    x = tl.load(candidate + lane, mask=lane < found, other=float("-inf"))
    key = ordered(x)
    cut = tl.maximum(cut, from_ordered(heavy_key(key, tl.where(lane < found, 1.0, 0.0), k, BITS, 32 // BITS)))
    if p < 1.0:
        weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
        bound = heavy_key(key, weight, p * tl.sum(weight, axis=0), BITS, 32 // BITS)
        cut = tl.maximum(cut, from_ordered(tl.minimum(bound, ordered(most))))
    return cut


@triton.jit
def _top_k_cut(
    logits, row, blocked, stop_id, control, changed, allowed, k, cut, vocab, stops, BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip  # passed on as they are
    """Return the least logit that top_k keeps, the k-th largest, or `cut` if that is larger. Each of 16 turns quarters
    the range of ordered integers by a pass over the whole vocabulary."""
    lane = tl.arange(0, BLOCK)
    low = tl.full([], -2147483648, tl.int64)
    width = tl.full([], 1073741824, tl.int64)
    for _ in range(16):
        one, two, three = low + width, low + 2 * width, low + 3 * width
        counts = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            x = row_logits(
                logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
            )
            key = ordered(x).to(tl.int64)
            real = token < vocab
            counts += (real & (key >= one)).to(tl.int64)
            counts += (real & (key >= two)).to(tl.int64) << 21
            counts += (real & (key >= three)).to(tl.int64) << 42
        total = tl.sum(counts, axis=0)
        if (total >> 42) >= k:
            low = three
        elif ((total >> 21) & 0x1FFFFF) >= k:
            low = two
        elif (total & 0x1FFFFF) >= k:
            low = one
        width = width // 4
    return tl.maximum(cut, from_ordered(low.to(tl.int32)))


@triton.jit
def _top_p_cut(
    logits, row, blocked, stop_id, control, changed, allowed, heat, p, most, cut, vocab, stops, BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip  # passed on as they are
    """Return the least logit that top_p (`p`) keeps of the tokens that reach the cut; at least `cut` and at most the
    row's largest logit, `most`. `heat`: the temperature. Each of 16 turns quarters the range of ordered integers by a
    pass over the whole vocabulary."""
    mass = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        x = row_logits(
            logits, row, start + lane, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
        )
        mass += tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
    wanted = p * tl.sum(mass, axis=0)
    low = tl.full([], -2147483649, tl.int64)
    width = tl.full([], 1073741824, tl.int64)
    for _ in range(16):
        one, two, three = low + width, low + 2 * width, low + 3 * width
        mass1 = tl.zeros([BLOCK], tl.float32)
        mass2 = tl.zeros([BLOCK], tl.float32)
        mass3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = row_logits(
                logits, row, start + lane, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
            )
            key = ordered(x).to(tl.int64)
            weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
            mass1 += tl.where(key > one, weight, 0.0)
            mass2 += tl.where(key > two, weight, 0.0)
            mass3 += tl.where(key > three, weight, 0.0)
        if tl.sum(mass3, axis=0) >= wanted:
            low = three
        elif tl.sum(mass2, axis=0) >= wanted:
            low = two
        elif tl.sum(mass1, axis=0) >= wanted:
            low = one
        width = width // 4
    return tl.maximum(cut, from_ordered(tl.minimum((low + 1).to(tl.int32), ordered(most))))


@triton.jit
def heavy_key(key, weight, wanted, BITS: tl.constexpr, TURNS: tl.constexpr):
    """Return the largest bound such that the keys at or above it weigh at least `wanted`. With all weights 1, this is
    the k-th largest key. `key` is ordered int32. Only the upper BITS * TURNS bits of the bound are found; the others
    are 0.

    A turn finds BITS bits, with one sum for each value of these bits. The sums are one reduction.
    """
    step = tl.arange(0, 1 << BITS)
    low = tl.full([], -2147483648, tl.int32)
    width = tl.full([], 1, tl.int32) << (32 - BITS)
    for _ in range(TURNS):
        bound = low + step * width
        above = tl.sum(tl.where(key[None, :] >= bound[:, None], weight[None, :], 0.0), axis=1)
        # The first value is the one that the turn before found.
        low += tl.sum(((above >= wanted) & (step > 0)).to(tl.int32), axis=0) * width
        width = width >> BITS
    return low

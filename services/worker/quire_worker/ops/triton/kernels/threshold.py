"""Thresholds of top-k, top-p and min-p: the least logit that a row keeps, found by search.

The definition is that of sampling/sampler.py, with float32 in place of float64: z = x / temperature; min_p and top_k
cut first, top_p what remains. The vocabulary is never sorted: a threshold is found by quartering the ordered integers
of float32, each turn one pass over logits that lie in the L2 cache. Only rows that ask are searched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import from_ordered, let_next_start, ordered, wait

GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)


@triton.jit
def load_logits(logits, at, token, vocab, stop_id, stops, BLOCKED: tl.constexpr):
    """Logits of a block in float32; -inf past the end, and for blocked ids."""
    x = tl.load(logits + at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if BLOCKED:
        for index in range(stops):
            banned = tl.load(stop_id + index)
            x = tl.where(token == banned, float("-inf"), x)
    return x


@triton.jit
def threshold_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    blocked,
    stop_id,
    counter,
    candidate,
    threshold,
    control,
    changed,
    vocab,
    stops,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: threshold [rows], the least logit that a row keeps; -inf where nothing is asked. logits [rows,
    vocab]; blocked [rows] not 0: stop_id [rows, stops] may not be drawn, -1 being nobody. Scratch: counter [rows], zero
    before, and candidate [rows, CANDIDATES] float32. CONTROLLED: a row whose control [rows] is not 0 is drawn from
    changed [rows, vocab] instead, as it is."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    unasked = ((k <= 0) | (k >= vocab)) & (p >= 1.0) & (least <= 0.0)
    if (heat < GREEDY_BELOW) | unasked:
        tl.store(threshold + row, float("-inf"))
        return
    of_row = logits + row * vocab
    ids = stop_id + row * stops
    count, kept = counter + row, candidate + row * CANDIDATES
    blocks = tl.load(blocked + row) != 0
    if CONTROLLED:
        if tl.load(control + row) != 0:
            of_row_changed = changed + row * vocab
            cut = _search(of_row_changed, ids, stops, count, kept, heat, k, p, least, vocab, BLOCK, CANDIDATES, False)
        else:
            cut = _search_raw(of_row, blocks, ids, stops, count, kept, heat, k, p, least, vocab, BLOCK, CANDIDATES)
    else:
        cut = _search_raw(of_row, blocks, ids, stops, count, kept, heat, k, p, least, vocab, BLOCK, CANDIDATES)
    tl.store(threshold + row, cut)


@triton.jit
def _search_raw(
    logits,
    blocks,
    stop_id,
    stops,
    counter,
    candidate,
    heat,
    k,
    p,
    least,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Stop ids are looked at only where they are blocked."""
    if blocks:
        cut = _search(logits, stop_id, stops, counter, candidate, heat, k, p, least, vocab, BLOCK, CANDIDATES, True)
    else:
        cut = _search(logits, stop_id, stops, counter, candidate, heat, k, p, least, vocab, BLOCK, CANDIDATES, False)
    return cut


@triton.jit
def _search(
    logits,
    stop_id,
    stops,
    counter,
    candidate,
    heat,
    k,
    p,
    least,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """A row's threshold. With a small top_k two passes find a few candidates, and the rest is done in registers."""
    lane = tl.arange(0, BLOCK)
    most_of = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        most_of = tl.maximum(most_of, load_logits(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED))
    most = tl.max(most_of, axis=0)
    cut = tl.full([], float("-inf"), tl.float32)
    if least > 0.0:
        # exp((x - most) / heat) >= min_p
        cut = most + heat * tl.log(tl.minimum(least, 1.0))
    few = tl.zeros([], tl.int32)
    if (k > 0) & (k <= BLOCK // 4):
        # At least k logits reach the k-th largest of the lanes' maxima, and hardly more do.
        floor = from_ordered(_kth(ordered(most_of), k))
        for start in range(0, vocab, BLOCK):
            x = load_logits(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED)
            chosen = x >= floor
            at = tl.atomic_add(counter + lane * 0, 1, mask=chosen)
            tl.store(candidate + at, x, mask=chosen & (at < CANDIDATES))
        tl.debug_barrier()
        found = tl.load(counter)
        if found <= CANDIDATES:
            place = tl.arange(0, CANDIDATES)
            x = tl.load(candidate + place, mask=place < found, other=float("-inf"))
            key = ordered(x)
            cut = tl.maximum(cut, from_ordered(_kth(key, k)))
            if p < 1.0:
                weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
                cut = tl.maximum(cut, from_ordered(_nucleus(key, weight, p * tl.sum(weight, axis=0))))
            few += 1
    if few == 0:
        cut = _search_all(logits, stop_id, stops, heat, k, p, most, cut, vocab, BLOCK, BLOCKED)
    # The largest itself is always kept.
    return tl.minimum(cut, most)


@triton.jit
def _kth(key, k):
    """The k-th largest of a block of ordered int32, by quarters; the three counts of a turn are one sum."""
    low = tl.full([], -2147483648, tl.int64)
    width = tl.full([], 1073741824, tl.int64)
    wide = key.to(tl.int64)
    for _ in range(16):
        one, two, three = low + width, low + 2 * width, low + 3 * width
        counts = (wide >= one).to(tl.int64) + ((wide >= two).to(tl.int64) << 21) + ((wide >= three).to(tl.int64) << 42)
        total = tl.sum(counts, axis=0)
        if (total >> 42) >= k:
            low = three
        elif ((total >> 21) & 0x1FFFFF) >= k:
            low = two
        elif (total & 0x1FFFFF) >= k:
            low = one
        width = width // 4
    return low.to(tl.int32)


@triton.jit
def _nucleus(key, weight, wanted):
    """The least key whose strictly larger ones weigh less than `wanted`."""
    low = tl.full([], -2147483649, tl.int64)
    width = tl.full([], 1073741824, tl.int64)
    wide = key.to(tl.int64)
    for _ in range(16):
        one, two, three = low + width, low + 2 * width, low + 3 * width
        if tl.sum(tl.where(wide > two, weight, 0.0), axis=0) >= wanted:
            low = two
            if tl.sum(tl.where(wide > three, weight, 0.0), axis=0) >= wanted:
                low = three
        elif tl.sum(tl.where(wide > one, weight, 0.0), axis=0) >= wanted:
            low = one
        width = width // 4
    return (low + 1).to(tl.int32)


@triton.jit
def _search_all(logits, stop_id, stops, heat, k, p, most, cut, vocab, BLOCK: tl.constexpr, BLOCKED: tl.constexpr):
    """The same by passes over the whole vocabulary: a turn of the search is a pass."""
    lane = tl.arange(0, BLOCK)
    if (k > 0) & (k < vocab):
        low = tl.full([], -2147483648, tl.int64)
        width = tl.full([], 1073741824, tl.int64)
        for _ in range(16):
            one, two, three = low + width, low + 2 * width, low + 3 * width
            counts = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                token = start + lane
                key = ordered(load_logits(logits, 0, token, vocab, stop_id, stops, BLOCKED)).to(tl.int64)
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
        cut = tl.maximum(cut, from_ordered(low.to(tl.int32)))
    if p < 1.0:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = load_logits(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED)
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
                x = load_logits(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED)
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
        cut = tl.maximum(cut, from_ordered((low + 1).to(tl.int32)))
    return cut

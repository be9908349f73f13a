"""From logits to tokens: thresholds of top-k, top-p and min-p by search, then Gumbel noise and argmax in one pass.

The definition is that of sampling/sampler.py, with float32 in place of float64: z = x / temperature; min_p and top_k
cut first, top_p what remains; the token is the largest z + noise among the kept, the lowest id among equals. The
vocabulary is never sorted: a threshold is found by quartering the ordered integers of float32, each turn one pass over
logits that lie in the L2 cache. Only rows that ask are searched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait

GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)


@triton.jit
def _ordered(x):
    """float32 -> int32 that sorts alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The inverse."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, at, token, vocab, stop_id, stops, BLOCKED: tl.constexpr):
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
    vocab,
    stops,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: threshold [rows], the least logit that a row keeps; -inf where nothing is asked. logits [rows,
    vocab]; blocked [rows] not 0: stop_id [rows, stops] may not be drawn, -1 being nobody. Scratch: counter [rows], zero
    before, and candidate [rows, CANDIDATES] float32."""
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
    if tl.load(blocked + row) != 0:
        cut = _search(of_row, ids, stops, count, kept, heat, k, p, least, vocab, BLOCK, CANDIDATES, True)
    else:
        cut = _search(of_row, ids, stops, count, kept, heat, k, p, least, vocab, BLOCK, CANDIDATES, False)
    tl.store(threshold + row, cut)


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
        most_of = tl.maximum(most_of, _load(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED))
    most = tl.max(most_of, axis=0)
    cut = tl.full([], float("-inf"), tl.float32)
    if least > 0.0:
        # exp((x - most) / heat) >= min_p
        cut = most + heat * tl.log(tl.minimum(least, 1.0))
    few = tl.zeros([], tl.int32)
    if (k > 0) & (k <= BLOCK // 4):
        # At least k logits reach the k-th largest of the lanes' maxima, and hardly more do.
        floor = _value(_kth(_ordered(most_of), k))
        for start in range(0, vocab, BLOCK):
            x = _load(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED)
            chosen = x >= floor
            at = tl.atomic_add(counter + lane * 0, 1, mask=chosen)
            tl.store(candidate + at, x, mask=chosen & (at < CANDIDATES))
        tl.debug_barrier()
        found = tl.load(counter)
        if found <= CANDIDATES:
            place = tl.arange(0, CANDIDATES)
            x = tl.load(candidate + place, mask=place < found, other=float("-inf"))
            key = _ordered(x)
            cut = tl.maximum(cut, _value(_kth(key, k)))
            if p < 1.0:
                weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
                cut = tl.maximum(cut, _value(_nucleus(key, weight, p * tl.sum(weight, axis=0))))
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
                key = _ordered(_load(logits, 0, token, vocab, stop_id, stops, BLOCKED)).to(tl.int64)
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
        cut = tl.maximum(cut, _value(low.to(tl.int32)))
    if p < 1.0:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _load(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED)
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
                x = _load(logits, 0, start + lane, vocab, stop_id, stops, BLOCKED)
                key = _ordered(x).to(tl.int64)
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
        cut = tl.maximum(cut, _value((low + 1).to(tl.int32)))
    return cut


@triton.jit
def draw_kernel(
    logits,
    temperature,
    threshold,
    seed,
    sample_index,
    position,
    blocked,
    stop_id,
    part_score,
    part_token,
    vocab,
    stops,
    per_part,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, PARTS]: the best token of a part of the vocabulary, and its score; NaN where a logit is NaN.

    seed [rows] int64; position [rows] absolute index of the token that is drawn. per_part: a multiple of BLOCK."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    if tl.load(blocked + row) != 0:
        score, token = _best(
            logits, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops, per_part,
            BLOCK, True,
        )  # fmt: skip  # one call, two ways
    else:
        score, token = _best(
            logits, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops, per_part,
            BLOCK, False,
        )  # fmt: skip  # one call, two ways
    tl.store(part_score + row * PARTS + part, score)
    tl.store(part_token + row * PARTS + part, token)


@triton.jit
def _best(
    logits,
    temperature,
    threshold,
    seed,
    sample_index,
    position,
    stop_id,
    row,
    part,
    vocab,
    stops,
    per_part,
    BLOCK: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    cut = tl.load(threshold + row)
    key = tl.load(seed + row)
    sample = tl.load(sample_index + row)
    at = tl.load(position + row)
    greedy = heat < GREEDY_BELOW
    inverse = 1.0 / tl.where(greedy, 1.0, heat)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK], 2147483647, tl.int32)
    spoiled = tl.zeros([BLOCK], tl.int32)
    first = part * per_part
    for start in range(first, tl.minimum(first + per_part, vocab), BLOCK):
        token = start + lane
        x = _load(logits, row * vocab, token, vocab, stop_id + row * stops, stops, BLOCKED)
        spoiled = spoiled | (x != x).to(tl.int32)
        score = x
        if not greedy:
            score = tl.where(x >= cut, x * inverse + _gumbel(key, token, at, sample), float("-inf"))
        better = (score > best) & (token < vocab)
        best = tl.where(better, score, best)
        chosen = tl.where(better, token, chosen)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, chosen, 2147483647), axis=0)
    most = tl.where(tl.max(spoiled, axis=0) > 0, float("nan"), most)
    return most, token


@triton.jit
def _gumbel(key, token, position, sample):
    """Noise of sampling/gumbel.py: philox4x32-10 of (token // 4, position, sample, 0) keyed by the seed."""
    zero = token * 0
    a, b, c, d = tl.philox(
        key.to(tl.uint64), (token // 4).to(tl.uint32), (zero + position).to(tl.uint32), (zero + sample).to(tl.uint32),
        zero.to(tl.uint32),
    )  # fmt: skip  # the counter in one line
    lane = token % 4
    word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    # Half a step off both ends; near 1 the distance to it is what counts, and float32 has it exactly from above.
    top = (word >> 8).to(tl.int32)
    from_above = (16777215 - top).to(tl.float32) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    uniform = top.to(tl.float32) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    # -log(1 - y) = y + y^2/2 + y^3/3 + ...: to y = 1/16 seven terms are exact to float32; 1 - y would be rounded.
    y = from_above
    series = y * (1.0 + y * (0.5 + y * (0.33333334 + y * (0.25 + y * (0.2 + y * (0.16666667 + y * 0.14285715))))))
    return -tl.log(tl.where(y < 0.0625, series, -tl.log(uniform)))


@triton.jit
def settle_kernel(
    part_score,
    part_token,
    wanted,
    last,
    slot,
    stop_id,
    last_token,
    out_token,
    out_finish,
    stops,
    FINISH_STOP: tl.constexpr,
    FINISH_LENGTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: the best of all parts becomes the row's token, is fed back by slot and checked for stops.

    wanted [rows] 0: nothing is drawn (out_token -1); last [rows] not 0: ends by length whatever is drawn; slot [rows],
    negative: a padding row. out_token -1 also where a logit was NaN."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    let_next_start(PDL)
    score = tl.load(part_score + row * PARTS + lane, mask=lane < PARTS, other=float("-inf"))
    token = tl.load(part_token + row * PARTS + lane, mask=lane < PARTS, other=2147483647)
    spoiled = tl.max((score != score).to(tl.int32), axis=0) > 0
    most = tl.max(tl.where(score == score, score, float("-inf")), axis=0)
    best = tl.min(tl.where(score == most, token, 2147483647), axis=0)
    good = (not spoiled) & (most > float("-inf")) & (most < float("inf"))
    drawn = tl.load(wanted + row) != 0
    best = tl.where(good & drawn, best, -1)
    finish = tl.where(tl.load(last + row) != 0, FINISH_LENGTH, 0)
    stopped = False
    for index in range(stops):
        stopped = stopped | (tl.load(stop_id + row * stops + index) == best)
    finish = tl.where(stopped & (best >= 0), FINISH_STOP, finish)
    tl.store(out_token + row, best)
    tl.store(out_finish + row, finish)
    at = tl.load(slot + row).to(tl.int64)
    tl.store(last_token + at, tl.maximum(best, 0), mask=(at >= 0) & drawn)

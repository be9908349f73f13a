"""Device functions that load the logits from which a row samples. Ids that the row may not sample are left out, and so
are tokens that its grammar does not allow. A row with controls takes the logits that these have changed."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import Offsets
from quire_worker.sampling import param_rows

GREEDY_BELOW: tl.constexpr = tl.constexpr(param_rows.GREEDY_BELOW)
WORDS: tl.constexpr = tl.constexpr(param_rows.WORDS)
PARAM: tl.constexpr = Offsets(param_rows.OFFSETS)
# The range of logits that the search keeps of a row, as RANGE numbers: the least and the largest kept logit, and the
# top_p that is still to be applied to them (1: none).
RANGE: tl.constexpr = tl.constexpr(3)
LEAST_KEPT: tl.constexpr = tl.constexpr(0)
MOST_KEPT: tl.constexpr = tl.constexpr(1)
TOP_P_LEFT: tl.constexpr = tl.constexpr(2)


@triton.jit
def row_logits(
    logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip  # passed on as they are
    """Load the logits of some tokens in float32; -inf past the end, and for blocked ids.

    blocked [rows] not 0: stop_id [rows, stops] may not be sampled; -1 is no id. CONTROLLED: a row whose control [rows]
    is not 0 takes the logits of changed [rows, vocab] instead, and its blocked ids are not looked at. MASKED: only
    tokens whose bit in allowed [rows, words] is 1 may be sampled; a NaN or +inf of another token stays, because it
    shows that the row is damaged. Those of blocked ids do not stay.
    """
    inside = token < vocab
    blocks = tl.load(blocked + row) != 0
    if CONTROLLED:
        replaced = tl.load(control + row) != 0
        blocks = blocks & (not replaced)
        if replaced:
            x = tl.load(changed + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
        else:
            x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
    if blocks:
        for index in range(stops):
            x = tl.where(token == tl.load(stop_id + row * stops + index), float("-inf"), x)
    if MASKED:
        x = tl.where(is_allowed(allowed, row, token, vocab) | (not_below_infinity(x) & inside), x, float("-inf"))
    return x


@triton.jit
def is_allowed(allowed, row, token, vocab):
    """Whether a row's grammar allows each of some tokens. allowed [rows, words] int32 has a bit for every token of the
    vocabulary, the lowest bit of a word first. `words` is a multiple of 32."""
    words = (vocab + 1023) // 1024 * 32
    bits = tl.load(allowed + row * words + token // 32, mask=token < vocab, other=0)
    return ((bits >> (token % 32)) & 1) != 0


@triton.jit
def not_below_infinity(x):
    """Whether each number is NaN or infinity."""
    return (x < float("inf")) == 0


@triton.jit
def has_filters(param_rows, row):
    """Whether a row is not greedy and has limits, such as top_k or top_p."""
    return tl.load(param_rows + row * WORDS + PARAM.filtered) != 0


@triton.jit
def sampling_param(param_rows, row, WORD: tl.constexpr):
    """Load a number of a row's sampling parameters in float32. `param_rows` has the rows of sampling/param_rows.py."""
    return tl.load(param_rows + row * WORDS + WORD).to(tl.float32, bitcast=True)


@triton.jit
def random_key(param_rows, row):
    """Load a row's seed (uint64) and its sample index."""
    start = param_rows + row * WORDS
    low = tl.load(start + PARAM.seed).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(start + PARAM.seed + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low, tl.load(start + PARAM.sample_index)


@triton.jit
def store_range(ranges, row, least, most, top_p):
    """Store the range that a row keeps. ranges [rows, RANGE] float32."""
    tl.store(ranges + row * RANGE + LEAST_KEPT, least)
    tl.store(ranges + row * RANGE + MOST_KEPT, most)
    tl.store(ranges + row * RANGE + TOP_P_LEFT, top_p)

"""What a row is drawn from: its logits without the ids that may not be drawn, or what its controls made of them."""

from __future__ import annotations

import triton
import triton.language as tl

GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)


@triton.jit
def row_logits(logits, row, token, blocked, stop_id, control, changed, vocab, stops, CONTROLLED: tl.constexpr):
    """Logits of some tokens in float32; -inf past the end, and for blocked ids.

    blocked [rows] not 0: stop_id [rows, stops] may not be drawn, -1 being nobody. CONTROLLED: a row whose control
    [rows] is not 0 is drawn from changed [rows, vocab] instead, as it is."""
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
    return x


@triton.jit
def has_filters(temperature, top_k, top_p, min_p, row, vocab):
    """Whether a row is drawn from less than all."""
    k = tl.load(top_k + row)
    limits = ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    return limits & (tl.load(temperature + row) >= GREEDY_BELOW)


@triton.jit
def is_top_p_only(temperature, top_k, top_p, row, vocab):
    """Whether a row asks for top_p without top_k."""
    k = tl.load(top_k + row)
    unlimited = (k <= 0) | (k >= vocab)
    return unlimited & (tl.load(top_p + row) < 1.0) & (tl.load(temperature + row) >= GREEDY_BELOW)

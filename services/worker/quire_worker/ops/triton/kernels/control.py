"""Applies logit controls to the rows of requests that have them; sampling/logits_state.py has the definition.

Each such row has a logits processor state (sampling/state_layout.py) on the device, found by its address. The kernel
copies the row in float32, changes the copy, and the step samples from the copy. The logits themselves stay raw, for
logprobs. Forbidden ids are applied after the other controls, which therefore cannot bring back a token at -inf. A
forced token is applied last, and is then the only one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import Offsets, let_next_start, wait
from quire_worker.ops.triton.kernels.row import is_allowed
from quire_worker.sampling import state_layout

AT: tl.constexpr = Offsets(state_layout.OFFSETS)
LISTED: tl.constexpr = tl.constexpr(256)


@triton.jit
def control_kernel(
    logits,
    control,
    first_row,
    fed,
    slot,
    last_token,
    blocked,
    stop_id,
    changed,
    allowed,
    vocab,
    stops,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: copy logits [rows, vocab] to changed [rows, vocab] float32, and apply the row's logits processor
    state to the copy. A row whose state's address, control [rows] int64, is 0 is not copied.

    Allowed tokens, biases, penalties, bad words, blocked stop ids and the thinking budget are applied in this order.
    first_row [rows] is the row's first token in the step. fed [tokens] 1: this token is the last one that was sampled
    in the row's slot, last_token [slots] at slot [rows], and the kernel first appends it to the state. blocked [rows]
    not 0: the row's stop_id [rows, stops] (-1: none) are forbidden. MASKED: allowed [rows, words] are the tokens that
    rows' grammars allow; the others are -inf from the start, and none of them is forced.

    If a penalty makes a logit +inf that nothing forbids, the whole changed row is -inf, except for a token that the
    thinking budget forces. If the raw row has a NaN, or its largest logit is infinite, the first element of the changed
    row is NaN, so that the row ends as damaged.
    """
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    address = tl.load(control + row)
    if address == 0:
        return
    state = address.to(tl.pointer_type(tl.int32))
    target = changed + row * vocab
    if tl.load(fed + tl.load(first_row + row)) == 1:
        _append(state, tl.load(last_token + tl.load(slot + row)))
    tl.debug_barrier()
    good = _copy_allowed(logits + row * vocab, state, target, allowed, row, vocab, BLOCK, MASKED)
    tl.debug_barrier()
    _add_biases(state, target)
    tl.debug_barrier()
    infinite = _penalise(state, target)
    tl.debug_barrier()
    _forbid_words(state, target)
    if tl.load(blocked + row) != 0:
        for index in range(stops):
            banned = tl.load(stop_id + row * stops + index)
            tl.store(target + banned, float("-inf"), mask=banned >= 0)
    tl.debug_barrier()
    if infinite > 0:
        _leave_nothing(state, target, vocab, BLOCK)
        tl.debug_barrier()
    _force(logits + row * vocab, state, target, allowed, row, vocab, BLOCK, MASKED)
    tl.debug_barrier()
    tl.store(target, float("nan"), mask=good == 0)


@triton.jit
def _append(state, token):
    """Append a sampled token to the state of a row, in place: update the thinking state, the ring of last tokens and
    the number of tokens. If the state counts tokens, increment the token's count, or add its id while there is room."""
    lane = tl.arange(0, LISTED)
    written, known = tl.load(state + AT.written), tl.load(state + AT.known)
    ring, capacity = tl.load(state + AT.ring), tl.load(state + AT.capacity)
    counting = tl.load(state + AT.counting) != 0
    # Every thread has read before one of them writes.
    tl.debug_barrier()
    _track_thinking(state, token)
    tl.store(state + AT.written, written + 1)
    tl.store(state + tl.load(state + AT.ring_at) + written % tl.maximum(ring, 1), token, mask=ring > 0)
    if counting:
        ids = state + tl.load(state + AT.ids_at)
        place = known
        for start in range(0, known, LISTED):
            at = start + lane
            same = tl.load(ids + at, mask=at < known, other=-1) == token
            place = tl.minimum(place, tl.min(tl.where(same, at, known), axis=0))
        room = place < capacity
        before = tl.load(ids + capacity + place, mask=room, other=0)
        tl.debug_barrier()
        tl.store(ids + place, token, mask=room)
        tl.store(ids + capacity + place, before + 1, mask=room)
        tl.store(state + AT.known, tl.minimum(tl.maximum(known, place + 1), capacity))


@triton.jit
def _track_thinking(state, token):
    """Take one more token into the thinking state, in place: outside thinking look for the start mark; inside, count
    the token in `spent` and look for the end mark. A whole start mark sets `spent` to 0, a whole end mark to -1.
    Without a budget, do nothing. `state` is a pointer. See ThinkingTrack.fed."""
    if tl.load(state + AT.budget) >= 0:
        spent = tl.load(state + AT.spent)
        inside = spent >= 0
        length = tl.load(state + tl.where(inside, AT.ends, AT.starts))
        matched = tl.load(state + tl.where(inside, AT.ended, AT.started))
        mark = state + tl.load(state + tl.where(inside, AT.ends_at, AT.starts_at))
        while (matched > 0) & (tl.load(mark + matched) != token):
            matched = tl.load(mark + length + matched - 1)
        matched += (tl.load(mark + matched) == token).to(tl.int32)
        whole = matched == length
        now = tl.where(inside, tl.where(whole, -1, spent + 1), tl.where(whole, 0, -1))
        # Every thread has read before one of them writes.
        tl.debug_barrier()
        tl.store(state + AT.spent, now)
        tl.store(state + tl.where(inside, AT.ended, AT.started), tl.where(whole, 0, matched))


@triton.jit
def _force(logits, state, target, allowed, row, vocab, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """If the row is thinking and its thinking budget is spent, write a row to `target`: the raw logit of the end mark's
    next token, and -inf for all others. Else write nothing. `logits` is a row to read, `state` the logits processor
    state; all are pointers. MASKED: only a token that the row's grammar allows is forced."""
    budget = tl.load(state + AT.budget)
    forced = 0
    forces = (budget >= 0) & (tl.load(state + AT.spent) >= budget)
    if forces:
        forced = tl.load(state + tl.load(state + AT.ends_at) + tl.load(state + AT.ended))
    if MASKED:
        forces = forces & is_allowed(allowed, row, forced, vocab)
    if forces:
        lane = tl.arange(0, BLOCK)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            x = tl.load(logits + token, mask=token == forced, other=float("-inf")).to(tl.float32)
            tl.store(target + token, x, mask=token < vocab)


@triton.jit
def _copy_allowed(logits, state, target, allowed, row, vocab, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Copy a row of logits to `target` in float32. Tokens that the state's mask or the row's grammar forbids become
    -inf.

    Returns 1 if the raw row is sound, else 0: it has a NaN, or its largest logit is +inf or -inf.
    """
    lane = tl.arange(0, BLOCK)
    masked = tl.load(state + AT.masked) != 0
    mask = state + tl.load(state + AT.mask_at)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    spoiled = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        inside = token < vocab
        x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        spoiled = spoiled | (x != x).to(tl.int32)
        most = tl.maximum(most, x)
        bits = tl.load(mask + token // 32, mask=inside & masked, other=-1)
        x = tl.where(((bits >> (token % 32)) & 1) != 0, x, float("-inf"))
        if MASKED:
            x = tl.where(is_allowed(allowed, row, token, vocab), x, float("-inf"))
        tl.store(target + token, x, mask=inside)
    largest = tl.max(most, axis=0)
    sound = (tl.max(spoiled, axis=0) == 0) & (largest > float("-inf")) & (largest < float("inf"))
    return sound.to(tl.int32)


@triton.jit
def _add_biases(state, target):
    """Add the state's biases (ids, then as many amounts) to their tokens' logits in `target`, in place."""
    lane = tl.arange(0, LISTED)
    count = tl.load(state + AT.biases)
    ids = state + tl.load(state + AT.bias_at)
    for start in range(0, count, LISTED):
        at = start + lane
        real = at < count
        token = tl.load(ids + at, mask=real, other=0)
        amount = tl.load(ids + count + at, mask=real, other=0).to(tl.float32, bitcast=True)
        x = tl.load(target + token, mask=real, other=0.0)
        tl.store(target + token, x + amount, mask=real)


@triton.jit
def _penalise(state, target):
    """Apply repetition, frequency and presence penalties to the logits in `target` of all tokens that the state knows,
    in place. The repetition penalty also applies to tokens that only the prompt has. Returns not 0 if a penalised logit
    is +inf."""
    lane = tl.arange(0, LISTED)
    known, capacity = tl.load(state + AT.known), tl.load(state + AT.capacity)
    repetition = tl.load(state + AT.repetition_penalty).to(tl.float32, bitcast=True)
    frequency = tl.load(state + AT.frequency_penalty).to(tl.float32, bitcast=True)
    presence = tl.load(state + AT.presence_penalty).to(tl.float32, bitcast=True)
    ids = state + tl.load(state + AT.ids_at)
    infinite = tl.zeros([LISTED], tl.int32)
    for start in range(0, known, LISTED):
        at = start + lane
        real = at < known
        token = tl.load(ids + at, mask=real, other=0)
        count = tl.load(ids + capacity + at, mask=real, other=0).to(tl.float32)
        x = tl.load(target + token, mask=real, other=0.0)
        x = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = x - frequency * count
        x = x - tl.where(count > 0.0, presence, 0.0)
        tl.store(target + token, x, mask=real)
        infinite = infinite | (real & (x == float("inf"))).to(tl.int32)
    return tl.max(infinite, axis=0)


@triton.jit
def _leave_nothing(state, target, vocab, BLOCK: tl.constexpr):
    """If the logit of a known token is still +inf after bans, set the whole row to -inf, so that no token is left to
    sample."""
    lane = tl.arange(0, LISTED)
    known = tl.load(state + AT.known)
    ids = state + tl.load(state + AT.ids_at)
    infinite = tl.zeros([LISTED], tl.int32)
    for start in range(0, known, LISTED):
        at = start + lane
        token = tl.load(ids + at, mask=at < known, other=0)
        x = tl.load(target + token, mask=at < known, other=0.0)
        infinite = infinite | (x == float("inf")).to(tl.int32)
    # Every thread has read before one of them writes.
    tl.debug_barrier()
    if tl.max(infinite, axis=0) > 0:
        token = tl.arange(0, BLOCK)
        for start in range(0, vocab, BLOCK):
            tl.store(target + start + token, float("-inf"), mask=start + token < vocab)


@triton.jit
def _forbid_words(state, target):
    """Set the logit of the last token of each bad word to -inf in `target`, if the output ends with the tokens before
    it. The state's ring has the output's last tokens."""
    lane = tl.arange(0, LISTED)
    words, written, ring = tl.load(state + AT.words), tl.load(state + AT.written), tl.load(state + AT.ring)
    begins = state + tl.load(state + AT.words_at)
    tail = state + tl.load(state + AT.ring_at)
    for start in range(0, words, LISTED):
        word = start + lane
        real = word < words
        begin = tl.load(begins + word, mask=real, other=0)
        end = tl.load(begins + word + 1, mask=real, other=1)
        before = end - begin - 1
        same = real & (written >= before)
        for index in range(ring):
            compared = same & (index < before)
            wanted = tl.load(state + begin + index, mask=compared, other=0)
            place = tl.where(compared, written - before + index, 0) % ring
            same = same & (wanted == tl.load(tail + place, mask=compared, other=0))
        banned = tl.load(state + end - 1, mask=same, other=0)
        tl.store(target + banned, float("-inf"), mask=same)

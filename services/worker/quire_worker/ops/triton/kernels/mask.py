"""Masks of grammars, from the matcher's ring in the host's memory into the device's, just before a step draws.

The matcher may write an entry of the ring while this kernel reads it. The stamp of an entry names the sequence and the
position of its mask, and is 0 while the mask is written: see matcher/mask_ring.py. So each thread reads the stamp, then
its part of the mask, then the stamp again. The loads are volatile, so that the GPU performs them one by one and past
its caches (`relaxed.sys` in PTX's memory model), with a fence in between. If the first stamp is right, the mask was
complete before; if the second one is right, no later mask was started. A row whose mask is missing is held; the kernel
does not wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.matcher import mask_ring
from quire_worker.ops.triton.kernels.common import let_next_start, system_fence, wait
from quire_worker.sampling.token_mask import MaskKind

# The states of a row. Without a grammar it may sample all tokens.
FREE: tl.constexpr = tl.constexpr(0)
HAS_MASK: tl.constexpr = tl.constexpr(1)
HELD: tl.constexpr = tl.constexpr(2)
_NO_GRAMMAR: tl.constexpr = tl.constexpr(-1)
_ONE: tl.constexpr = tl.constexpr(int(MaskKind.ONE))
_KIND_AND_TOKEN_AT: tl.constexpr = tl.constexpr(mask_ring.KIND_AND_TOKEN_AT // 8)
_BITS_AT: tl.constexpr = tl.constexpr(mask_ring.BITS_AT // 4)


@triton.jit(do_not_specialize=["words", "stops", "entry_words"])
def fetch_masks_kernel(
    ring,
    mask_slot,
    generation,
    drawn_at,
    stop_id,
    blocked,
    allowed,
    mask_kind,
    words,
    stops,
    entries_per_slot,
    entry_words,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: writes a row's mask to allowed [rows, words] int32, and FREE, HAS_MASK or HELD to mask_kind [rows].

    ring: the address of the first entry; each has entry_words int32, and a mask slot has entries_per_slot of them.
    mask_slot [rows]: -1 for a row without a grammar, whose bits are all 1; other negative numbers for a sequence that
    has no mask slot yet. generation [rows] as in the stamp, drawn_at [rows] the position of the token. blocked [rows]
    becomes 0 where the mask allows nothing but stop_id [rows, stops]. THREADS: one lane for each of the program's
    threads."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    its = tl.load(mask_slot + row)
    lane = tl.arange(0, BLOCK)
    thread = tl.arange(0, THREADS)
    target = allowed + row * words
    kind = tl.where(its == _NO_GRAMMAR, FREE, HELD)
    if its == _NO_GRAMMAR:
        for start in range(0, words, BLOCK):
            tl.store(target + start + lane, tl.full([BLOCK], -1, tl.int32), mask=start + lane < words)
    if its >= 0:
        at = tl.load(drawn_at + row).to(tl.int64)
        wanted = (tl.load(generation + row).to(tl.int64) << 32) | at
        index = its.to(tl.int64) * entries_per_slot + at % entries_per_slot
        entry = tl.multiple_of((ring.to(tl.int64) + index * entry_words * 4).to(tl.pointer_type(tl.int32)), 16)
        stamps = entry.to(tl.pointer_type(tl.int64)) + thread * 0
        before = tl.load(stamps, volatile=True)
        system_fence(thread)
        if tl.min((before == wanted).to(tl.int32), axis=0) != 0:
            kind_and_token = tl.max(tl.load(stamps + _KIND_AND_TOKEN_AT, volatile=True), axis=0)
            single = (kind_and_token & 0xFF) == _ONE
            token = (kind_and_token >> 8).to(tl.int32)
            others = tl.zeros([BLOCK], tl.int32)
            blocks = tl.load(blocked + row) != 0
            for start in range(0, words, BLOCK):
                word = start + lane
                bits = tl.load(entry + _BITS_AT + word, mask=(word < words) & (not single), other=0, volatile=True)
                bits = tl.where(single & (word == token // 32), 1 << (token % 32), bits)
                tl.store(target + word, bits, mask=word < words)
                if blocks:
                    for nth in range(stops):
                        stop = tl.load(stop_id + row * stops + nth)
                        clears = (stop >= 0) & (word == stop // 32)
                        bits = tl.where(clears, bits & ~(1 << (stop % 32)), bits)
                    others = others | bits
            system_fence(thread)
            after = tl.load(stamps, volatile=True)
            if tl.min((after == wanted).to(tl.int32), axis=0) != 0:
                kind = tl.full([], HAS_MASK, tl.int32)
                if blocks & (tl.max((others != 0).to(tl.int32), axis=0) == 0):
                    tl.store(blocked + row, 0)
    tl.store(mask_kind + row, kind)

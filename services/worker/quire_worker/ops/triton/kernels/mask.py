"""`fetch_masks_kernel` reads the masks of grammars from the matcher's ring in host memory into device memory, before a
step samples.

The matcher may write an entry of the ring while this kernel reads it. The stamp of an entry names the sequence and the
position of its mask, and is 0 while the mask is written; see matcher/mask_ring.py. So each thread reads the stamp, then
its part of the mask, then the stamp again. The loads are volatile, so that the GPU performs them one by one and past
its caches (`relaxed.sys` in PTX's memory model), with a fence in between. If the first stamp is right, the mask was
complete before the read. If the second stamp is right, no later mask was started. A row whose mask is missing is held;
the kernel does not wait. Several programs read one row, and the last of them to end combines their results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.matcher import mask_ring
from quire_worker.ops.triton.kernels.common import let_next_start, load_system_words, system_fence, wait
from quire_worker.sampling.token_mask import MaskKind

# The states of a row. Without a grammar it may sample all tokens.
FREE: tl.constexpr = tl.constexpr(0)
HAS_MASK: tl.constexpr = tl.constexpr(1)
HELD: tl.constexpr = tl.constexpr(2)
_NO_GRAMMAR: tl.constexpr = tl.constexpr(-1)
_ONE: tl.constexpr = tl.constexpr(int(MaskKind.ONE))
_KIND_AND_TOKEN_AT: tl.constexpr = tl.constexpr(mask_ring.KIND_AND_TOKEN_AT // 8)
_BITS_AT: tl.constexpr = tl.constexpr(mask_ring.BITS_AT // 4)


# The programs of a row add up these units: each its own _COME, _WHOLE if both stamps were right, and _LEAVES if its
# part of the mask allows a token that is not blocked.
_COME: tl.constexpr = tl.constexpr(1)
_WHOLE: tl.constexpr = tl.constexpr(1 << 10)
_LEAVES: tl.constexpr = tl.constexpr(1 << 20)
_COUNT: tl.constexpr = tl.constexpr((1 << 10) - 1)


@triton.jit(do_not_specialize=["words", "stops", "entry_words"])
def fetch_masks_kernel(
    ring,
    mask_slot,
    generation,
    sample_position,
    stop_id,
    blocked,
    allowed,
    mask_kind,
    arrived,
    words,
    stops,
    entries_per_slot,
    entry_words,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, blocks of words]: copies a row's mask from the ring to allowed [rows, words] int32, and writes FREE,
    HAS_MASK or HELD to mask_kind [rows]. A row is HELD if its mask is missing or changed during the read; its words of
    `allowed` are then arbitrary. `words` is a multiple of 32.

    `ring` is the address of the first entry. Each entry has entry_words int32, and a mask slot has entries_per_slot
    entries. mask_slot [rows] is -1 for a row without a grammar, which may sample all tokens; other negative numbers
    mean that the sequence has no mask slot yet. generation [rows] is as in the stamp, and sample_position [rows] is the
    position of the token. blocked [rows] becomes 0 if the mask allows only stop_id [rows, stops]. arrived [rows] counts
    programs, and is 0 before and after. THREADS: one lane for each of the program's threads.
    """
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    wait(PDL)
    let_next_start(PDL)
    its = tl.load(mask_slot + row)
    # A thread has groups of four words, and reads all of them at once: PCIe answers each request late, but many
    # requests at a time.
    word = block * BLOCK + 4 * tl.arange(0, BLOCK // 4)
    inside = word < tl.multiple_of(words, 32)
    target = allowed + row * tl.multiple_of(words, 32) + word
    if its == _NO_GRAMMAR:
        all_allowed = tl.full([BLOCK // 4], -1, tl.int32)
        for nth in tl.static_range(4):
            tl.store(target + nth, all_allowed, mask=inside)
        if block == 0:
            tl.store(mask_kind + row, FREE)
    else:
        stopped = tl.load(blocked + row) != 0
        told = tl.full([], _COME, tl.int32)
        if its >= 0:
            thread = tl.arange(0, THREADS)
            at = tl.load(sample_position + row).to(tl.int64)
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
                first, second, third, fourth = load_system_words(entry + _BITS_AT + tl.where(inside, word, 0))
                its_stops = stop_id + row * stops
                left = _keep(first, word, inside, target, single, token, stopped, its_stops, stops)
                left |= _keep(second, word + 1, inside, target + 1, single, token, stopped, its_stops, stops)
                left |= _keep(third, word + 2, inside, target + 2, single, token, stopped, its_stops, stops)
                left |= _keep(fourth, word + 3, inside, target + 3, single, token, stopped, its_stops, stops)
                told += tl.max((left != 0).to(tl.int32), axis=0) * _LEAVES
                system_fence(thread)
                after = tl.load(stamps, volatile=True)
                told += tl.min((after == wanted).to(tl.int32), axis=0) * _WHOLE
        total = tl.atomic_add(arrived + row, told) + told
        if (total & _COUNT) == blocks:
            whole = ((total // _WHOLE) & _COUNT) == blocks
            tl.store(mask_kind + row, tl.where(whole, HAS_MASK, HELD))
            if whole & stopped & (total < _LEAVES):
                tl.store(blocked + row, 0)
            tl.store(arrived + row, 0)


@triton.jit
def _keep(bits, word, inside, target, single, token, stopped, stop_id, stops):
    """Store some words of a mask, or of the mask that stands for a single token. Returns the bits; those of stop_id
    [stops] are 0 if the row may not stop yet (`stopped`)."""
    bits = tl.where(single, tl.where(word == token // 32, 1 << (token % 32), 0), bits)
    tl.store(target, bits, mask=inside)
    bits = tl.where(inside, bits, 0)
    if stopped:
        for nth in range(stops):
            stop = tl.load(stop_id + nth)
            clears = (stop >= 0) & (word == stop // 32)
            bits = tl.where(clears, bits & ~(1 << (stop % 32)), bits)
    return bits

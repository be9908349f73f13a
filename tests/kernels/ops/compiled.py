"""`python -m tests.kernels.ops.compiled`: kernels compiled for Hopper, on a machine without a GPU.

The interpreter takes what the compiler refuses: this finds it before a GPU does. Prints a line for each kernel. A
process of its own, since the interpreter is chosen when kernels are imported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire_worker.ops.triton.kernels.activation import sigmoid_gate_kernel
from quire_worker.ops.triton.kernels.control import control_kernel
from quire_worker.ops.triton.kernels.decode_attention import decode_attention_kernel, merge_splits_kernel
from quire_worker.ops.triton.kernels.feed import place_kernel
from quire_worker.ops.triton.kernels.gather_pages import gather_pages_kernel
from quire_worker.ops.triton.kernels.logprob import block_logprobs_kernel, merge_logprobs_kernel
from quire_worker.ops.triton.kernels.mask import fetch_masks_kernel
from quire_worker.ops.triton.kernels.prefill_attention import prefill_attention_kernel
from quire_worker.ops.triton.kernels.rope import qk_norm_rope_write_kernel
from quire_worker.ops.triton.kernels.sample import finish_kernel, sample_kernel
from quire_worker.ops.triton.kernels.top_k_top_p import group_maxima_kernel, top_k_top_p_kernel
from quire_worker.ops.triton.kernels.top_p import top_p_kernel, top_p_mass_kernel

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = frozenset(
    [
        "candidate",
        "ranges",
        "maximum",
        "part_mass",
        "part_score",
        "part_out",
        "part_lse",
        "part_sum",
        "cos",
        "sin",
        "sinks",
        "slopes",
    ]
)
BF16 = frozenset(["query", "pages", "out", "qkv", "query_norm_weight", "key_norm_weight", "logits"])
WIDE = frozenset(("control", "part_key"))
SCALARS = {"scale": "fp32", "softcap": "fp32", "eps": "fp32"} | dict.fromkeys(
    (
        "window",
        "page_stride",
        "head_stride",
        "layer_offset",
        "value_offset",
        "vocab",
        "stops",
        "groups",
        "rows",
        "splits_count",
        "most",
        "tiles",
        "tile_step",
        "head_step",
        "words",
        "entries_per_slot",
        "entry_words",
    ),
    "i32",
)
HEADS = {"HEADS": 16, "KV_HEADS": 8, "DIM": 128, "LANES": 128, "PAGE": 64, "PDL": True}
OPTIONS = {"CAPPED": False, "WINDOWED": False, "CHUNKED": False, "ALIBI": False, "SINKS": False}
ALL_OPTIONS = OPTIONS | {"CAPPED": True, "WINDOWED": True, "SINKS": True}
OTHER_OPTIONS = OPTIONS | {"CHUNKED": True, "ALIBI": True, "DIM": 80}
MERGE = {"WIDTH": 2, "MERGED": 4}
DECODE = HEADS | {"TILE": 32, "ROWS": 16, "STAGES": 5} | MERGE
ROPE = HEADS | {"NORM": 1, "TABLE": 64, "LANES": 64, "PARTS": 4, "KEPT": True}
PREFILL = HEADS | {"TILE": 64, "TOKENS": 32, "ROWS": 64, "STAGES": 2}
FP8 = {"pages": "*fp8e4nv"}
CHANGED = {"changed": "*fp32"}
PARTS = {"PARTS": 38, "PDL": False}
ENDS = {"FINISH_STOP": 1, "FINISH_LENGTH": 2}
THRESHOLD = {"LANES": 4096, "GROUP": 64, "BLOCK": 4096, "FEW": 128, "CANDIDATES": 2048, "PDL": False}
LOGPROBS = {"PARTS": 149, "BLOCK": 1024, "PDL": False}
NUCLEUS = PARTS | {"LANES": 64, "SHARES": 38}
GATED = {"x": "*bf16", "gate": "*bf16", "columns": "i32"}
GATHER = {"PAGE_WORDS": 2048, "BLOCK": 1024}
GATHERED = {"source": "i64", "pages": "i32"}
FETCH = {"BLOCK": 1024, "THREADS": 32, "PDL": False}


def type_of(name: str, given: Mapping[str, str]) -> str:
    """A parameter's type by its name, which is the same in all kernels."""
    if name in given or name in SCALARS:
        return given.get(name) or SCALARS[name]
    if name in BF16:
        return "*bf16"
    if name in FLOATS:
        return "*fp32"
    return "*i64" if name in WIDE else "*i32"


def check(name: str, kernel: Any, constants: Mapping[str, Any], warps: int, given: Mapping[str, str]) -> str:
    """Compile to machine code, and return its PTX; raises where the compiler does."""
    types = {each: "constexpr" if each in constants else type_of(each, given) for each in kernel.arg_names}
    done = triton.compile(ASTSource(kernel, types, dict(constants)), target=HOPPER, options={"num_warps": warps})
    print(name, len(done.asm["cubin"]), flush=True)
    return str(done.asm["ptx"])


def memory_order(ptx: str) -> list[str]:
    """Fences, and volatile loads by the bits of their elements, in the order of the code; a run of equal ones once."""
    found = re.findall(r"fence\.acq_rel\.sys|ld\.(?:volatile|relaxed\.sys)\.global(?:\.v[24])?\.b\d+", ptx)
    named = ["fence" if each.startswith("fence") else each.rpartition(".")[2] for each in found]
    return [each for before, each in itertools.pairwise(["", *named]) if each != before]


def main() -> None:
    for pages in ({}, FP8):
        kind = " of fp8" if pages else ""
        for rows, warps in ((1, 2), (4, 1)):
            check(f"rope{kind}, {rows} rows", qk_norm_rope_write_kernel, ROPE | {"TOGETHER": rows}, warps, pages)
        still = ROPE | {"TOGETHER": 1, "TABLE": 0}
        check(f"rope{kind}, no rotation", qk_norm_rope_write_kernel, still, 2, pages)
        odd = ROPE | {"TOGETHER": 1, "NORM": 2, "DIM": 96, "TABLE": 48}
        check(f"rope{kind}, normed after it, heads of 96", qk_norm_rope_write_kernel, odd, 2, pages)
        for options, named in ((OPTIONS, ""), (ALL_OPTIONS, ", all options"), (OTHER_OPTIONS, ", others, heads of 80")):
            told = kind + named
            for merges in (False, True):
                how = DECODE | options | {"LAST_MERGES": merges}
                check(f"decode attention{told}, {merges=}", decode_attention_kernel, how, 2, pages)
            wide = DECODE | options | {"LAST_MERGES": False, "TILE": 64}
            check(f"decode attention{told}, wide", decode_attention_kernel, wide, 4, pages)
            check(f"prefill attention{told}", prefill_attention_kernel, PREFILL | options, 4, pages)
    heads = {name: size for name, size in HEADS.items() if name != "PAGE"}
    check("merge", merge_splits_kernel, heads | MERGE, 2, {})
    for controlled, masked in ((False, False), (True, False), (False, True), (True, True)):
        told = ", controlled" * controlled + ", masked" * masked
        more: dict[str, Any] = {"CONTROLLED": controlled, "MASKED": masked}
        check(f"maxima{told}", group_maxima_kernel, PARTS | {"GROUPS": 64, "GROUP": 64} | more, 4, CHANGED)
        check(f"threshold{told}", top_k_top_p_kernel, THRESHOLD | more, 8, CHANGED)
        check(f"mass{told}", top_p_mass_kernel, NUCLEUS | {"BLOCK": 4096} | more, 4, CHANGED)
        check(f"nucleus{told}", top_p_kernel, NUCLEUS | {"SHARE_LANES": 64, "BLOCK": 8192} | more, 32, CHANGED)
        check(f"draw{told}", sample_kernel, PARTS | {"BLOCK": 1024, "GROUPS": 16, "FILTERED": True} | more, 1, CHANGED)
        check(f"settle{told}", finish_kernel, PARTS | ENDS | {"BLOCK": 64} | more, 1, CHANGED)
    check("logprobs of blocks", block_logprobs_kernel, LOGPROBS, 1, {})
    check("logprobs", merge_logprobs_kernel, LOGPROBS | {"LANES": 256}, 8, {})
    check("gather pages", gather_pages_kernel, GATHER, 8, GATHERED)
    for masked in (False, True):
        told = ", masked" * masked
        check(f"control{told}", control_kernel, {"BLOCK": 4096, "MASKED": masked, "PDL": False}, 8, CHANGED)
    check("output gate", sigmoid_gate_kernel, {"BLOCK": 1024, "PDL": True}, 4, GATED)
    check("positions", place_kernel, {"BLOCK": 256, "PDL": False}, 4, {})
    fetch = check("masks", fetch_masks_kernel, FETCH, 1, {"ring": "i64"})
    print("order of the masks' loads:", *memory_order(fetch), flush=True)


if __name__ == "__main__":
    main()

"""`python -m tests.kernels.compiled`: kernels compiled for Hopper, on a machine without a GPU.

The interpreter takes what the compiler refuses: this finds it before a GPU does. Prints a line for each kernel. A
process of its own, since the interpreter is chosen when kernels are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire_worker.ops.triton.kernels.control import control_kernel
from quire_worker.ops.triton.kernels.decode_attention import decode_attention_kernel, merge_splits_kernel
from quire_worker.ops.triton.kernels.gather_pages import gather_pages_kernel
from quire_worker.ops.triton.kernels.logprob import block_logprobs_kernel, merge_logprobs_kernel
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
    ),
    "i32",
)
HEADS = {"HEADS": 16, "KV_HEADS": 8, "DIM": 128, "PAGE": 64, "PDL": True}
OPTIONS = {"CAPPED": False, "WINDOWED": False, "SINKS": False}
ALL_OPTIONS = dict.fromkeys(OPTIONS, True)
MERGE = {"WIDTH": 2, "MERGED": 4}
DECODE = HEADS | {"TILE": 32, "ROWS": 16, "STAGES": 5} | MERGE
ROPE = HEADS | {"NORM": True, "PARTS": 4, "KEPT": True}
PREFILL = HEADS | {"TILE": 64, "TOKENS": 32, "ROWS": 64, "STAGES": 2}
FP8 = {"pages": "*fp8e4nv"}
CHANGED = {"changed": "*fp32"}
PARTS = {"PARTS": 38, "PDL": False}
ENDS = {"FINISH_STOP": 1, "FINISH_LENGTH": 2}
THRESHOLD = {"LANES": 4096, "GROUP": 64, "BLOCK": 4096, "FEW": 128, "CANDIDATES": 2048, "PDL": False}
LOGPROBS = {"PARTS": 149, "BLOCK": 1024, "PDL": False}
NUCLEUS = PARTS | {"LANES": 64, "SHARES": 38}
GATHER = {"PAGE_WORDS": 2048, "BLOCK": 1024}
GATHERED = {"source": "i64", "pages": "i32"}


def type_of(name: str, given: Mapping[str, str]) -> str:
    """A parameter's type by its name, which is the same in all kernels."""
    if name in given or name in SCALARS:
        return given.get(name) or SCALARS[name]
    if name in BF16:
        return "*bf16"
    if name in FLOATS:
        return "*fp32"
    return "*i64" if name in WIDE else "*i32"


def check(name: str, kernel: Any, constants: Mapping[str, Any], warps: int, given: Mapping[str, str]) -> None:
    """Compile to machine code; raises where the compiler does."""
    types = {each: "constexpr" if each in constants else type_of(each, given) for each in kernel.arg_names}
    done = triton.compile(ASTSource(kernel, types, dict(constants)), target=HOPPER, options={"num_warps": warps})
    print(name, len(done.asm["cubin"]), flush=True)


def main() -> None:
    for pages in ({}, FP8):
        kind = " of fp8" if pages else ""
        for rows, warps in ((1, 2), (4, 1)):
            check(f"rope{kind}, {rows} rows", qk_norm_rope_write_kernel, ROPE | {"TOGETHER": rows}, warps, pages)
        for options in (OPTIONS, ALL_OPTIONS):
            told = f"{kind}, all options" if options is ALL_OPTIONS else kind
            for merges in (False, True):
                how = DECODE | options | {"LAST_MERGES": merges}
                check(f"decode attention{told}, {merges=}", decode_attention_kernel, how, 2, pages)
            wide = DECODE | options | {"LAST_MERGES": False, "TILE": 64}
            check(f"decode attention{told}, wide", decode_attention_kernel, wide, 4, pages)
            check(f"prefill attention{told}", prefill_attention_kernel, PREFILL | options, 4, pages)
    heads = {name: size for name, size in HEADS.items() if name != "PAGE"}
    check("merge", merge_splits_kernel, heads | MERGE, 2, {})
    for controlled in (False, True):
        told = ", controlled" if controlled else ""
        more: dict[str, Any] = {"CONTROLLED": controlled}
        check(f"maxima{told}", group_maxima_kernel, PARTS | {"GROUPS": 64, "GROUP": 64} | more, 4, CHANGED)
        check(f"threshold{told}", top_k_top_p_kernel, THRESHOLD | more, 8, CHANGED)
        check(f"mass{told}", top_p_mass_kernel, NUCLEUS | {"BLOCK": 4096} | more, 4, CHANGED)
        check(f"nucleus{told}", top_p_kernel, NUCLEUS | {"SHARE_LANES": 64, "BLOCK": 8192} | more, 32, CHANGED)
        check(f"draw{told}", sample_kernel, PARTS | {"BLOCK": 1024, "GROUPS": 16, "FILTERED": True} | more, 1, CHANGED)
        check(f"settle{told}", finish_kernel, PARTS | ENDS | {"BLOCK": 64} | more, 1, CHANGED)
    check("logprobs of blocks", block_logprobs_kernel, LOGPROBS, 1, {})
    check("logprobs", merge_logprobs_kernel, LOGPROBS | {"LANES": 256}, 8, {})
    check("gather pages", gather_pages_kernel, GATHER, 8, GATHERED)
    check("control", control_kernel, {"BLOCK": 4096, "PDL": False}, 8, CHANGED)


if __name__ == "__main__":
    main()

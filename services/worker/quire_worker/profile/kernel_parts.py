"""Splits the parts of a step that one `Ops` call combines, by the kernels that compute them.

Attention is one call for decode and prefill rows. Sampling and logprobs are launched after the decoder. Triton names
kernels as in their source code. All other kernels of attention belong to a library, which computes prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from quire_worker.profile.cost import Cost, controls_cost, logits_cost
from quire_worker.profile.trace_times import OUTSIDE, Times
from quire_worker.step import StepBatch

ATTENTION = "attention"
DECODE_ATTENTION, PREFILL_ATTENTION = "decode attention", "prefill attention"
FEED, THRESHOLDS, SAMPLE = "feed tokens", "sampling: thresholds", "sampling: draw"
CONTROLS, MASKS, LOGPROBS = "sampling: controls", "sampling: masks", "logprobs"
ATTENTION_KERNELS: Mapping[str, str] = MappingProxyType(
    {"decode_attention_kernel": DECODE_ATTENTION, "merge_splits_kernel": DECODE_ATTENTION}
)
KERNELS_BEHIND: Mapping[str, str] = MappingProxyType(
    {
        "feed_kernel": FEED,
        "place_kernel": FEED,
        "group_maxima_kernel": THRESHOLDS,
        "top_k_top_p_kernel": THRESHOLDS,
        "top_p_mass_kernel": THRESHOLDS,
        "top_p_kernel": THRESHOLDS,
        "sample_kernel": SAMPLE,
        "finish_kernel": SAMPLE,
        "control_kernel": CONTROLS,
        "fetch_masks_kernel": MASKS,
        "block_logprobs_kernel": LOGPROBS,
        "merge_logprobs_kernel": LOGPROBS,
    }
)


def by_part(times: Mapping[str, Times]) -> dict[str, Times]:
    """Split the time spent in attention, and the time outside any named range, into parts by kernel. Other ranges stay
    as they are, and so do ranges without kernels on a device."""
    found: dict[str, Times] = {}
    for name, spent in times.items():
        if name not in (ATTENTION, OUTSIDE) or not spent.kernels:
            found[name] = spent
            continue
        parts, other = (ATTENTION_KERNELS, PREFILL_ATTENTION) if name == ATTENTION else (KERNELS_BEHIND, OUTSIDE)
        for kernel, of_kernel in spent.kernels.items():
            part = found.setdefault(parts.get(kernel, other), Times())
            part.add_kernel(kernel, of_kernel)
    return found


def costs_behind(batch: StepBatch, vocab: int, element: int) -> dict[str, Cost]:
    """Return, by part, the bytes of logits that thresholds, sampling, logprobs and controls of one step must read, for
    the rows that need each (for sampling, all sequences). Parts without rows are left out. All follow the decoder."""
    rows = {
        THRESHOLDS: int(np.count_nonzero(batch.params["filtered"])),
        SAMPLE: len(batch.count),
        LOGPROBS: int(np.count_nonzero((batch.logprobs >= 0) & batch.sample)),
    }
    costs = {name: logits_cost(count, vocab, element) for name, count in rows.items() if count}
    return costs | ({CONTROLS: controls_cost(len(batch.controls), vocab, element)} if batch.controls else {})

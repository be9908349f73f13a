"""Launchers of sampling: logits to tokens, fed back by slot and checked for stops, with nothing read by the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_common.credit import Finish
from quire_worker.ops.triton.kernels.sample import draw_kernel, settle_kernel
from quire_worker.ops.triton.kernels.threshold import threshold_kernel
from quire_worker.ops.triton.launch import options, power_of_two

_BLOCK = 1024
_PER_PART = 4 * _BLOCK
_SEARCH_BLOCK = 4096
_CANDIDATES = 2048


@dataclass(slots=True)
class DrawColumns:
    """Device tensors of N rows; meanings are those of StepBatch."""

    temperature: Tensor
    """float32."""
    top_k: Tensor
    """int32."""
    top_p: Tensor
    """float32."""
    min_p: Tensor
    """float32."""
    seed: Tensor
    """int64, the bits of the unsigned seed."""
    sample_index: Tensor
    """int32, the bits of the unsigned index."""
    position: Tensor
    """int32, absolute index of the token that is drawn."""
    blocked: Tensor
    """int32; not 0: stop_id may not be drawn."""
    stop_id: Tensor
    """int32 [N, I], -1 where unused."""
    wanted: Tensor
    """int32; 0: nothing is drawn."""
    last: Tensor
    """int32; not 0: the sequence ends with this token."""
    slot: Tensor
    """int32; negative: padding."""


def draw(
    logits: Tensor,
    columns: DrawColumns,
    last_token: Tensor,
    out_token: Tensor,
    out_finish: Tensor,
    *,
    filtered: bool,
    pdl: bool,
    changed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Tokens of logits [N, V] into out_token [N] int32 (-1: none, or NaN; -2: the row's controls left nothing), finish
    codes into out_finish [N] int32, and what is fed back into last_token [slots] int32. `filtered`: some row may ask
    for top_k, top_p or min_p; without it none may. `changed`: [N] int64, and float32 [N, V] to draw from in its place
    where that is not 0."""
    rows, vocab = logits.shape
    stops = columns.stop_id.shape[1]
    parts = -(-vocab // _PER_PART)
    # Without it the kernels do not look at the two.
    control, replaced = (columns.slot, logits) if changed is None else changed
    controlled = changed is not None
    threshold = torch.full((rows,), -torch.inf, dtype=torch.float32, device=logits.device)
    if filtered:
        threshold_kernel[(rows,)](
            logits,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            columns.blocked,
            columns.stop_id,
            torch.zeros(rows, dtype=torch.int32, device=logits.device),
            torch.empty((rows, _CANDIDATES), dtype=torch.float32, device=logits.device),
            threshold,
            control,
            replaced,
            vocab,
            stops,
            BLOCK=min(_SEARCH_BLOCK, power_of_two(vocab)),
            CANDIDATES=_CANDIDATES,
            CONTROLLED=controlled,
            **options(pdl, num_warps=16),
        )
    part_score = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    part_token = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    draw_kernel[(rows, parts)](
        logits,
        columns.temperature,
        threshold,
        columns.seed,
        columns.sample_index,
        columns.position,
        columns.blocked,
        columns.stop_id,
        part_score,
        part_token,
        control,
        replaced,
        vocab,
        stops,
        _PER_PART,
        PARTS=parts,
        BLOCK=_BLOCK,
        CONTROLLED=controlled,
        **options(pdl, num_warps=4),
    )
    settle_kernel[(rows,)](
        part_score,
        part_token,
        columns.wanted,
        columns.last,
        columns.slot,
        columns.stop_id,
        last_token,
        out_token,
        out_finish,
        control,
        stops,
        FINISH_STOP=int(Finish.STOP),
        FINISH_LENGTH=int(Finish.LENGTH),
        PARTS=parts,
        BLOCK=power_of_two(parts),
        CONTROLLED=controlled,
        **options(pdl, num_warps=1),
    )

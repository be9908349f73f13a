"""Launchers of the sampling kernels. They turn logits into tokens, feed the tokens back by slot and check stops; the
host reads nothing in between."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_common.credit import Finish
from quire_worker.ops.triton.kernels.row import RANGE
from quire_worker.ops.triton.kernels.sample import finish_kernel, sample_kernel
from quire_worker.ops.triton.kernels.top_k_top_p import group_maxima_kernel, top_k_top_p_kernel
from quire_worker.ops.triton.kernels.top_p import top_p_kernel, top_p_mass_kernel
from quire_worker.ops.triton.launch import options, power_of_two
from quire_worker.ops.triton.masks import RowMasks

_BLOCK = 1024
# Without this bound, fewer programs fit on a multiprocessor.
_SAMPLE_WARPS, _SAMPLE_REGISTERS = 1, 80
# The search for thresholds knows the largest logit of each group of so many neighbours.
_GROUP = 64
_GROUPS = 64
_GROUP_WARPS = 4
_SEARCH_BLOCK = 4096
_SEARCH_WARPS = 8
# A part of the mass of the top-p set.
_SHARE, _SHARE_WARPS = 4096, 4
_TOP_P_BLOCK, _TOP_P_WARPS = 8192, 32
_FEW, _CANDIDATES = 128, 2048


@dataclass(slots=True)
class DeviceSamplingColumns:
    """Device tensors of N rows, with the meanings of StepBatch."""

    params: Tensor
    """int32, the words of N param rows; see sampling/param_rows.py."""
    position: Tensor
    """int32, the absolute index of the token that is sampled."""
    blocked: Tensor
    """int32; not 0: stop_id may not be sampled."""
    stop_id: Tensor
    """int32 [N, I], -1 where unused."""
    wanted: Tensor
    """int32; 0: the row samples nothing."""
    last: Tensor
    """int32; not 0: the sequence ends with this token."""
    slot: Tensor
    """int32; negative: padding."""


@dataclass(slots=True)
class _Source:
    """The inputs of sampling beside logits, and the kernels' flags for them."""

    control: Tensor
    replaced: Tensor
    allowed: Tensor
    flags: dict[str, bool]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors in the kernels' order."""
        return self.control, self.replaced, self.allowed


def sample_rows(
    logits: Tensor,
    columns: DeviceSamplingColumns,
    last_token: Tensor,
    out_token: Tensor,
    out_finish: Tensor,
    *,
    filtered: bool,
    pdl: bool,
    changed: tuple[Tensor, Tensor] | None = None,
    masks: tuple[RowMasks, Tensor] | None = None,
) -> None:
    """Sample a token for each row of logits [N, V]. `out_token` [N] int32 takes the tokens (-1: none, or the logits
    without blocked ids hold a NaN or have no finite maximum; -2: the row's controls or grammar left no token; -3: the
    row is held). `out_finish` [N] int32 takes finish codes (0: none), and `last_token` [slots] int32 takes the tokens
    that are fed back.

    `filtered` says that some row may have limits. `changed` has [N] int64, and float32 [N, V]: the logits that a row
    uses in place of its own if its number is not 0. `masks` has the masks of rows' grammars, whose `known` and `held`
    are updated by slot, and the step's tokens [R] int32.
    """
    rows, vocab = logits.shape
    stops = columns.stop_id.shape[1]
    block = min(_BLOCK, power_of_two(vocab))
    parts = -(-vocab // block)
    # Without them the kernels do not look at these.
    unused = columns.slot
    control, replaced = (unused, logits) if changed is None else changed
    source = _Source(
        control,
        replaced,
        unused if masks is None else masks[0].allowed,
        {"CONTROLLED": changed is not None, "MASKED": masks is not None},
    )
    part_score = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    # Without them the kernels do not look at these.
    maximum = ranges = part_score
    if filtered:
        maximum, ranges = _search_ranges(logits, columns, source, pdl)
    part_token = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    sample_kernel[(rows, parts)](
        logits,
        columns.params,
        maximum,
        ranges,
        columns.position,
        columns.blocked,
        columns.stop_id,
        part_score,
        part_token,
        *source.tensors,
        vocab,
        stops,
        maximum.shape[1] if filtered else 0,  # not rows, by which Triton would compile it anew
        PARTS=parts,
        GROUPS=max(1, block // _GROUP),
        BLOCK=block,
        FILTERED=filtered,
        **source.flags,
        **options(pdl, num_warps=_SAMPLE_WARPS, maxnreg=_SAMPLE_REGISTERS),
    )
    if filtered:
        _apply_top_p(logits, columns, (ranges, part_score, part_token), source, pdl)
    finish_kernel[(rows,)](
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
        *_held_columns(masks, unused),
        stops,
        FINISH_STOP=int(Finish.STOP),
        FINISH_LENGTH=int(Finish.LENGTH),
        PARTS=parts,
        BLOCK=power_of_two(parts),
        **source.flags,
        **options(pdl, num_warps=1),
    )


def _held_columns(masks: tuple[RowMasks, Tensor] | None, unused: Tensor) -> tuple[Tensor, ...]:
    """Return the six columns of held rows that finish_kernel needs; `unused` six times without masks."""
    if masks is None:
        return (unused,) * 6
    rows, token = masks
    return rows.kind, token, rows.last_row, rows.row_position, rows.known, rows.held


def _search_ranges(logits: Tensor, columns: DeviceSamplingColumns, source: _Source, pdl: bool) -> tuple[Tensor, Tensor]:
    """Return two float32 tensors. The first has the largest logit of each group [N, G], and only for rows with filters
    such as top-k and top-p. The second has the range of logits that each row keeps [N, RANGE], for all rows: the
    least and the largest kept logit, and the top_p that a later kernel still has to apply to them (1: none)."""
    rows, vocab = logits.shape
    stops = columns.stop_id.shape[1]
    parts = -(-vocab // (_GROUPS * _GROUP))
    groups = parts * _GROUPS
    asked = (columns.params, columns.blocked, columns.stop_id)
    maximum = torch.empty((rows, groups), dtype=torch.float32, device=logits.device)
    group_maxima_kernel[(rows, parts)](
        logits,
        *asked,
        maximum,
        *source.tensors,
        vocab,
        stops,
        PARTS=parts,
        GROUPS=_GROUPS,
        GROUP=_GROUP,
        **source.flags,
        **options(pdl, num_warps=_GROUP_WARPS),
    )
    ranges = torch.empty((rows, RANGE.value), dtype=torch.float32, device=logits.device)
    top_k_top_p_kernel[(rows,)](
        logits,
        *asked,
        maximum,
        torch.empty((rows, groups), dtype=torch.int32, device=logits.device),
        torch.empty((rows, _CANDIDATES), dtype=torch.float32, device=logits.device),
        ranges,
        *source.tensors,
        vocab,
        stops,
        groups,
        LANES=power_of_two(groups),
        GROUP=_GROUP,
        BLOCK=_SEARCH_BLOCK,
        FEW=_FEW,
        CANDIDATES=_CANDIDATES,
        **source.flags,
        **options(pdl, num_warps=_SEARCH_WARPS),
    )
    return maximum, ranges


def _apply_top_p(
    logits: Tensor,
    columns: DeviceSamplingColumns,
    sampled: Listed[Tensor],
    source: _Source,
    pdl: bool,
) -> None:
    """In rows to which top_p is still to be applied, sample again if top_p drops the sampled token. `sampled` has the
    ranges that rows keep, and scores and tokens of the parts of the vocabulary; the kernels change the latter two."""
    (rows, vocab), stops = logits.shape, columns.stop_id.shape[1]
    ranges, part_score, part_token = sampled
    parts = part_score.shape[1]
    shares = -(-vocab // _SHARE)
    part_mass = torch.empty((rows, 2, shares), dtype=torch.float32, device=logits.device)
    asked = (columns.params, columns.blocked, columns.stop_id, ranges)
    sizes = {"PARTS": parts, "LANES": power_of_two(parts), "SHARES": shares, **source.flags}
    top_p_mass_kernel[(rows, shares)](
        logits,
        *asked,
        part_score,
        part_token,
        part_mass,
        *source.tensors,
        vocab,
        stops,
        BLOCK=_SHARE,
        **sizes,
        **options(pdl, num_warps=_SHARE_WARPS),
    )
    top_p_kernel[(rows,)](
        logits,
        *asked,
        columns.position,
        part_score,
        part_token,
        part_mass,
        *source.tensors,
        vocab,
        stops,
        SHARE_LANES=power_of_two(shares),
        BLOCK=_TOP_P_BLOCK,
        **sizes,
        **options(pdl, num_warps=_TOP_P_WARPS),
    )

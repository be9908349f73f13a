"""Launchers of the two kernels of steps with grammars. `place_rows` corrects the positions of rows before the model
runs, and `fetch_masks` reads masks before the step samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_worker.ops.triton.kernels.common import INTERPRET
from quire_worker.ops.triton.kernels.feed import place_kernel
from quire_worker.ops.triton.kernels.mask import fetch_masks_kernel
from quire_worker.ops.triton.kv_splits import COLUMNS
from quire_worker.ops.triton.launch import options, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256
_WORDS, _FETCH_WARPS = 1024, 1
_WARP = 32


@dataclass(frozen=True, slots=True)
class MappedRing:
    """The address of a MaskRing's entries on the device, and their shape."""

    address: int
    words: int
    """The length of a mask, in int32 words."""
    entries_per_slot: int
    """The entries of a mask slot."""
    entry_words: int


@dataclass(slots=True)
class RowMasks:
    """Device tensors of a step with R tokens, and N rows that may sample."""

    mask_slot: Tensor
    """int32 [N]; -1: no grammar."""
    generation: Tensor
    """int32 [N]."""
    allowed: Tensor
    """int32 [N, words], written by fetch_masks: a bit for every token of the vocabulary."""
    kind: Tensor
    """int32 [N], written by fetch_masks: FREE, HAS_MASK or HELD, as in kernels/mask.py."""
    arrived: Tensor
    """int32 [N], counts the programs of fetch_masks that have ended; 0 before and after it."""
    bound: Tensor
    """int32 [N]."""
    min_len: Tensor
    """int32 [N]."""
    blocked: Tensor
    """int32 [N], changed by both launchers."""
    last_row: Tensor
    """int32 [N]."""
    row_position: Tensor
    """int32 [R], changed by place_rows."""
    known: Tensor
    """int32 [slots]: the position of a slot's last token."""
    held: Tensor
    """int32 [slots], not 0: that token was computed before, by a row that was held."""


def place_rows(masks: RowMasks, views: dict[str, Tensor], splits: Tensor | None) -> None:
    """Replace the greatest possible positions by the true ones, in the columns `views` of a step, for rows that decode
    by a grammar. Also correct what follows from them: `fed` and `last` in the views, row_position and blocked in
    `masks`, and the ends of `splits` (as in TritonPlan)."""
    rows = len(masks.mask_slot)
    count = 0 if splits is None else splits.numel() // COLUMNS
    place_kernel[(-(-max(rows, count) // _BLOCK),)](
        masks.mask_slot,
        views["slot"],
        views["first_row"],
        masks.bound,
        masks.min_len,
        masks.known,
        masks.held,
        views["fed"],
        views["position"],
        masks.row_position,
        views["sample_position"],
        views["last"],
        masks.blocked,
        masks.mask_slot if splits is None else splits,
        rows,
        count,
        BLOCK=_BLOCK,
        **options(pdl=False),
    )


def fetch_masks(masks: RowMasks, ring: MappedRing, sample_position: Tensor, stop_id: Tensor) -> None:
    """Launch the kernel that copies masks of rows from the matcher's ring in host memory to `masks`, for the tokens at
    positions sample_position [N]. It sets `kind` and `allowed`, and clears `blocked` where only stop_id int32 [N, I] is
    allowed."""
    rows, stops = stop_id.shape
    threads = 1 if INTERPRET.value else _FETCH_WARPS * _WARP
    block = min(_WORDS, power_of_two(ring.words))
    fetch_masks_kernel[(rows, -(-ring.words // block))](
        ring.address,
        masks.mask_slot,
        masks.generation,
        sample_position,
        stop_id,
        masks.blocked,
        masks.allowed,
        masks.kind,
        masks.arrived,
        ring.words,
        stops,
        ring.entries_per_slot,
        ring.entry_words,
        BLOCK=block,
        THREADS=threads,
        **options(pdl=False, num_warps=_FETCH_WARPS),
    )

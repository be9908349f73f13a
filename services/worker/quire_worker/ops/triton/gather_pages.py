"""Launcher of gather_pages_kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire_worker.ops.triton.kernels.common import INTERPRET
from quire_worker.ops.triton.kernels.gather_pages import gather_pages_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.arrays import Int32

_WORD = 4
ALIGNED = 16
"""Bytes to which the pages of both pools are aligned."""


@dataclass(frozen=True, slots=True)
class GatherShape:
    """The number of words that a program copies at once, and the number of programs. There are enough programs to fill
    the link, and few enough to leave the device's processors to the steps."""

    programs: int = 128
    block: int = 4096
    """Words."""
    warps: int = 8


DEFAULT = GatherShape()


def gather_pages(
    source: int, target: Tensor, source_page: Int32, target_page: Int32, shape: GatherShape = DEFAULT
) -> None:
    """Copy pages `source_page` of the pool at the address `source` to pages `target_page` of `target` [pages, bytes]
    uint8, on the current stream. Do nothing without pages.

    Asynchronous. The caller must make sure that both pools have pages with these numbers. Raises ValueError if the
    pages' size or the address is no multiple of 16 bytes.
    """
    pages = len(source_page)
    if not pages:
        return
    # Both rows are aligned for wide loads; otherwise Triton would compile another kernel.
    both = torch.zeros((2, -(-pages // ALIGNED) * ALIGNED), dtype=torch.int32, pin_memory=target.is_cuda)
    rows = both.numpy()
    rows[0, :pages], rows[1, :pages] = source_page, target_page
    if target.is_cuda:
        both = both.to(target.device, non_blocking=True)
    _launch(source, target, both, pages, shape)


def compile_gather(target: Tensor) -> None:
    """Compile the kernel for such pages, by a launch that copies nothing. This takes up to some seconds."""
    _launch(target.data_ptr(), target, torch.zeros((2, ALIGNED), dtype=torch.int32, device=target.device), 0, DEFAULT)


def _launch(source: int, target: Tensor, both: Tensor, pages: int, shape: GatherShape) -> None:
    """Launch the kernel for the first `pages` numbers. `both` int32 [2, at least pages]: page numbers of the source,
    and of the target. Raises ValueError if the pages' size or the address is no multiple of 16 bytes."""
    page_bytes = target.shape[1]
    if page_bytes % ALIGNED or source % ALIGNED:
        raise ValueError(f"pages of {page_bytes} bytes from {source} on are not aligned to {ALIGNED}")
    options = {} if INTERPRET.value else {"num_warps": shape.warps}
    gather_pages_kernel[(shape.programs,)](
        source,
        target.view(torch.int32),
        both[0],
        both[1],
        pages,
        PAGE_WORDS=page_bytes // _WORD,
        BLOCK=shape.block,
        **options,
    )

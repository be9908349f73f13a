"""What the kernels cannot do, as errors that say so before anything is loaded. This module needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from quire_worker.model.arch_spec import DecoderSpec

_PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
# A head is a block of a kernel: wide enough for a matrix instruction and narrow enough for registers.
_HEAD_MULTIPLE, _MOST_HEAD = 16, 256


def check_kernels(spec: DecoderSpec, page_size: int) -> None:
    """Raise ConfigError for a page size that is no power of two from 16 to 1024. Raise Unsupported for a head size that
    is no multiple of 16 or above 256. The kernels compute others wrongly or not at all."""
    if page_size not in _PAGE_SIZES:
        raise ConfigError(
            "BAD_BLOCK_SIZE",
            f"On a GPU a page cannot have {page_size} tokens.",
            f"Give --block-size one of {', '.join(map(str, _PAGE_SIZES))}.",
            param="block_size",
        )
    if spec.head_dim % _HEAD_MULTIPLE or spec.head_dim > _MOST_HEAD:
        raise Unsupported(
            "UNSUPPORTED_HEAD_DIM",
            f"The model's heads have {spec.head_dim} elements, for which there are no GPU kernels.",
            f"Serve it with --device cpu, or a model with heads of a multiple of {_HEAD_MULTIPLE} up to {_MOST_HEAD}.",
            param="model",
        )

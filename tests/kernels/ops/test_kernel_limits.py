"""Sizes that the kernels cannot do are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu.shapes import LLAMA_8B, QWEN3_06B
from quire_common.errors import ConfigError, Unsupported
from quire_worker.cuda.kernel_limits import check_kernels


@pytest.mark.parametrize("page_size", [16, 64, 1024])
def test_what_kernels_can_do(page_size: int) -> None:
    check_kernels(LLAMA_8B, page_size)
    layer = replace(QWEN3_06B.layers[0], mixer=replace(QWEN3_06B.attention[0], head_dim=64))
    check_kernels(replace(QWEN3_06B, layers=(layer,)), page_size)


@pytest.mark.parametrize("page_size", [8, 24, 48, 80, 96])
def test_pages_that_tiles_would_leave(page_size: int) -> None:
    with pytest.raises(ConfigError, match="BAD_BLOCK_SIZE"):
        check_kernels(LLAMA_8B, page_size)


@pytest.mark.parametrize("head_dim", [8, 72, 100, 272, 512])
def test_heads_that_are_no_block(head_dim: int) -> None:
    with pytest.raises(Unsupported, match="UNSUPPORTED_HEAD_DIM"):
        layer = replace(LLAMA_8B.layers[0], mixer=replace(LLAMA_8B.attention[0], head_dim=head_dim))
        check_kernels(replace(LLAMA_8B, layers=(layer,)), 64)

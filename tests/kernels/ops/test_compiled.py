"""Kernels with options compile for the GPU that they are meant for, though there may be none here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.uninterpreted import run_uninterpreted

_SHARED_BYTES = 232_448
"""Of a multiprocessor, that one program may have."""


def compiled(folder: Path, module: str, *arguments: str) -> list[str]:
    """Lines that the module prints."""
    return run_uninterpreted("-m", f"tests.kernels.ops.{module}", *arguments, TRITON_CACHE_DIR=str(folder)).splitlines()


@pytest.mark.deep
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    *lines, order = compiled(tmp_path, "compiled")
    assert len(lines) == 65 and all(int(line.rsplit(" ", 1)[1]) > 1000 for line in lines)
    # The stamp, the mask's head, its bits, the stamp again.
    assert order == "order of the masks' loads: b64 fence b64 b32 fence b64"


@pytest.mark.parametrize("arguments", [("kinds",), pytest.param((), marks=pytest.mark.slow)])
def test_ways_of_products_compile_and_fit(arguments: tuple[str, ...], tmp_path: Path) -> None:
    lines = compiled(tmp_path, "compiled_gemm", *arguments)
    assert len(lines) >= (5 if arguments else 24)
    gated = sum(line.startswith("GatedGemmConfig(") for line in lines)
    assert gated == 1 if arguments else gated >= 4
    assert all(0 < int(line.rsplit(" ", 1)[1]) <= _SHARED_BYTES for line in lines)

"""Measured kernel configs of linear layers. Each device has two JSON files, made by `python -m
bench.gpu.choose_products` and `bench.gpu.choose_gated`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from quire_worker.ops.triton.gated_gemm import GatedGemmConfig
from quire_worker.ops.triton.gemm import GemmConfig, GemmConfigs, Gemv, Shape, Tall

_FOLDER = Path(__file__).parent
_FILES: Mapping[str, str] = {"NVIDIA H200": "h200.json"}
_GATED_FILES: Mapping[str, str] = {"NVIDIA H200": "h200_gated.json"}
_KINDS: Mapping[str, type[Gemv | Tall]] = {"Gemv": Gemv, "Tall": Tall}


def gemm_configs_for(device_name: str, *, batch_invariant: bool = False) -> GemmConfigs:
    """Return the kernel configs that were measured as the fastest on a device. The tables of a device without
    measurements are empty."""
    return GemmConfigs(configs_of(device_name), gated_configs_of(device_name), batch_invariant=batch_invariant)


def gated_configs_of(device_name: str) -> dict[Shape, GatedGemmConfig | None]:
    """Return the kernel configs of gated linear layers that were measured on a device, by (least rows, outputs,
    inputs); empty for a device without measurements. None: from so many rows on, two kernels are faster, one for the
    linear layer and one for the activation.
    """
    file = _GATED_FILES.get(device_name)
    return {} if file is None else read_gated_configs(_FOLDER / file)


def read_gated_configs(path: Path) -> dict[Shape, GatedGemmConfig | None]:
    """Return the configs in a JSON file of gated linear layers, by (rows, outputs, inputs). None: two kernels are
    faster."""
    return {
        (entry["rows"], entry["outputs"], entry["inputs"]): None
        if entry["way"] is None
        else GatedGemmConfig(**entry["way"])
        for entry in json.loads(path.read_text())
    }


def configs_of(device_name: str) -> dict[Shape, GemmConfig]:
    """Return the configs that were measured on a device; empty for a device without measurements."""
    file = _FILES.get(device_name)
    return {} if file is None else read_configs(_FOLDER / file)


def read_configs(path: Path) -> dict[Shape, GemmConfig]:
    """Return the configs in a JSON file, by (rows, outputs, inputs). Entries without a config, for which cuBLAS was the
    fastest, are left out. Their numbers of rows then take the config of the next larger entry of the shape, if there
    is one."""
    table: dict[Shape, GemmConfig] = {}
    for entry in json.loads(path.read_text()):
        if entry["way"] is not None:
            fields = dict(entry["way"])
            kind = _KINDS[fields.pop("kind")]
            table[entry["rows"], entry["outputs"], entry["inputs"]] = kind(**fields)
    return table

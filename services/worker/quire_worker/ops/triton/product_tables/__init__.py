"""Measured ways of products, one JSON file per device, made by `python -m bench.gpu_products`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from quire_worker.ops.triton.products import Gemv, Shape, Tall, Way

_FOLDER = Path(__file__).parent
_FILES: Mapping[str, str] = {"NVIDIA H200": "h200.json"}
_KINDS: Mapping[str, type[Gemv | Tall]] = {"Gemv": Gemv, "Tall": Tall}


def table_of(device_name: str) -> dict[Shape, Way]:
    """The ways that were measured on a device; empty for a device that nobody has measured."""
    file = _FILES.get(device_name)
    return {} if file is None else read_table(_FOLDER / file)


def read_table(path: Path) -> dict[Shape, Way]:
    """Entries of a file; those without a way go to cuBLAS, and are left out."""
    table: dict[Shape, Way] = {}
    for entry in json.loads(path.read_text()):
        if entry["way"] is not None:
            fields = dict(entry["way"])
            kind = _KINDS[fields.pop("kind")]
            table[entry["rows"], entry["outputs"], entry["inputs"]] = kind(**fields)
    return table

"""Finds the model family of a GGUF file by its `general.architecture`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire_common.errors import Unsupported
from quire_common.gguf import GgufModel
from quire_worker.model.architectures import ALL_FAMILIES
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap

# By name, and a key that only files of this family have: such entries come first.
ARCHITECTURES: Final = MappingProxyType(
    {
        (files.architecture, files.if_key): (family, files)
        for family, files in sorted(
            ((family, files) for family in ALL_FAMILIES for files in family.gguf),
            key=lambda each: not each[1].if_key,
        )
    }
)


def find_architecture(model: GgufModel) -> tuple[Family, GgufMap]:
    """Return the family of the file, and the map of the family's GGUF files. An entry with a key that only this
    family's files have comes first. Raises Unsupported for an unknown `general.architecture`."""
    name = model.metadata.text("general.architecture")
    for (architecture, key), found in ARCHITECTURES.items():
        if architecture == name and (not key or f"{name}.{key}" in model.metadata):
            return found
    known = sorted({architecture for architecture, _ in ARCHITECTURES})
    raise Unsupported(
        "UNSUPPORTED_ARCHITECTURE",
        f"{model.metadata.path} is of the architecture {name[:80]}, which is not supported in GGUF files. "
        f"Supported: {', '.join(known)}.",
        "Serve a model of a supported architecture, or its safetensors folder.",
    )

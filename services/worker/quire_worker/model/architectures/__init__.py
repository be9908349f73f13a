"""The registry of model families."""

from __future__ import annotations

from quire_common.errors import Unsupported
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.llama import LLAMA
from quire_worker.model.architectures.qwen2 import QWEN2
from quire_worker.model.architectures.qwen3 import QWEN3
from quire_worker.model.config_file import ConfigFile

FAMILIES: dict[str, Family] = {name: family for family in (LLAMA, QWEN2, QWEN3) for name in family.architectures}


def find_family(config: ConfigFile) -> tuple[str, Family]:
    """The first of the config's architectures that is supported, with its family."""
    wanted = config.texts("architectures")
    for name in wanted:
        if name in FAMILIES:
            return name, FAMILIES[name]
    asked = ", ".join(wanted) if wanted else f"none (model_type {config.text('model_type', 'absent')})"
    raise Unsupported(
        "UNSUPPORTED_ARCHITECTURE",
        f"{config.source} names the architecture {asked}, which is not supported. Supported: {', '.join(FAMILIES)}.",
        "Serve a model of a supported architecture.",
    )

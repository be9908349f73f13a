"""What a model family is to the worker: the architectures that it answers to, a spec builder and a name map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry. Adding a family takes one of these and nothing else."""

    architectures: tuple[str, ...]
    """Values of config.json's `architectures`."""
    build_spec: Callable[[str, ConfigFile], ArchSpec]
    """(architecture, config) -> spec; raises ConfigError or Unsupported."""
    names: Mapping[str, str]
    """Role of a parameter -> its name in the checkpoint, {layer} being the layer's index."""
    model_type: str
    """What config.json calls it, where it says so."""
    says: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys of config.json that say what the family does anyway."""

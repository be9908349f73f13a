"""Family: the worker's description of a model family, with the architecture names that it supports, a spec builder and
a map of tensor names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry. To add a family, add one of these."""

    architectures: tuple[str, ...]
    """Values of config.json's `architectures`."""
    build_spec: Callable[[str, ConfigFile], ArchSpec]
    """(architecture, config) -> spec; raises ConfigError or Unsupported."""
    names: Mapping[str, str]
    """Role of a parameter -> its name in the checkpoint, {layer} being the layer's index. Roles of one name are stacked
    in one tensor."""
    model_type: str
    """What config.json calls it, where it says so."""
    says: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys of config.json that say what the family does anyway."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The family's keys of config.json that others call by another name -> that name."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields, by those names, where config.json has none."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that hold nothing to compute with."""
    transposed: frozenset[str] = frozenset()
    """Roles whose matrices are [inputs, outputs] in checkpoints."""
    by_head: bool = False
    """In a tensor of queries, keys and values: for each KV head its query heads, its key head and its value head. In a
    tensor of queries and output gates: for each head its query and its gate."""
    prefix: str = ""
    """The prefix of all names of tensors but the head's; some checkpoints leave it out."""
    names_for: Callable[[ConfigFile], Mapping[str, str]] | None = None
    """The name map of a config, for a family whose tensors have other names in some models."""
    covers: Callable[[ConfigFile], bool] | None = None
    """Whether Quire computes the model of a config; None: always. `build_spec` refuses other models by name, and the
    Transformers backend may compute them."""
    gguf: tuple[GgufMap, ...] = ()
    """Maps of the GGUF files of the family's models; empty: such files are refused."""
    models: str = ""
    """Well-known models of the family, for the documentation."""

    def adapt(self, config: ConfigFile) -> ConfigFile:
        """Return the config with the usual names in place of the family's own field names, and with the family's
        defaults."""
        return config.adapted(self.renamed, self.defaults)

    def has_model(self, config: ConfigFile) -> bool:
        """Whether Quire computes the model of a config, which may have the family's own field names."""
        return self.covers is None or self.covers(self.adapt(config))

    def of(self, config: ConfigFile) -> Family:
        """Return the family with the name map of one model's config."""
        return self if self.names_for is None else replace(self, names=self.names_for(config))

    def in_checkpoint(self, names: Collection[str]) -> Family:
        """Return the family with the tensor names of this checkpoint. If no name has the family's prefix, the prefix is
        left out of all."""
        if not self.prefix or any(name.startswith(self.prefix) for name in names):
            return self
        return replace(self, names={role: name.removeprefix(self.prefix) for role, name in self.names.items()})

    def tensor_name(self, role: str, layer: int) -> str:
        """Return the name of a parameter's tensor in the checkpoint."""
        return self.names[role].format(layer=layer)

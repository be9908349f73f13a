"""The sizes that `quire plan` computes, against those of the model that the worker makes of the same config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.capacity.model_sizes import read_sizes
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures import ALL_FAMILIES, find_family
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.parameters import parameter_specs
from tests.parity.families import CASES, SIZES, causal_class

# Fields that these models' own config.json files have.
EXTRA_FIELDS: dict[str, dict[str, Any]] = {"mpt": {"max_seq_len": 256}}


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a case."""
    fields = {key: value for key, value in (SIZES | CASES[name][1]).items() if value is not ...}
    named = {"architectures": [causal_class(name)]}
    _, family = find_family(ConfigFile(named))
    return fields | named | {"model_type": family.model_type} | EXTRA_FIELDS.get(name, {})


def spec_of(fields: dict[str, Any]) -> ArchSpec:
    """What the worker makes of a config.json."""
    architecture, family = find_family(ConfigFile(fields))
    return family.build_spec(architecture, family.adapt(ConfigFile(fields)))


OPTIONAL = ("head_dim", "n_inner")


@pytest.mark.parametrize(
    ("name", "left_out"),
    [(name, left_out) for name in CASES for left_out in ("", *OPTIONAL) if not left_out or left_out in config_of(name)],
)
def test_plan_reads_the_same_sizes_as_the_worker(name: str, left_out: str, tmp_path: Path) -> None:
    fields = {key: value for key, value in config_of(name).items() if key != left_out}
    for tied in (None, False, True):
        config = fields if tied is None else fields | {"tie_word_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec, found = spec_of(config), read_sizes(tmp_path)
        shapes = [each.shape for each in parameter_specs(spec)]
        assert found.parameters == sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        assert (found.tied, found.context) == (spec.tied_embeddings, spec.max_positions)
        attention = spec.attention[0]
        assert (found.kv_heads, found.head_dim) == (attention.kv_heads, attention.head_dim)


def test_every_family_has_a_case() -> None:
    assert {config_of(name)["model_type"] for name in CASES} == {family.model_type for family in ALL_FAMILIES}

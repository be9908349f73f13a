"""Fields of config.json that are null, or absent: where Quire and transformers both load the model, both have the same
logits. transformers takes null for a value of its own in some fields, and for an error in most."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_common.errors import QuireError
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model.architectures import find_family
from quire_worker.model.architectures.ropes import KEYS
from quire_worker.model.config_file import ConfigFile
from tests.model.batches import pages_for
from tests.oracle import quiet_transformers
from tests.parity.families import CASES, SIZES, causal_class, write_family
from tests.parity.model_runs import LENGTH, logits, prompt
from tests.tiers import deep_after

# Fields whose null Quire takes where transformers fails: for the usual value, or because the model does not need them.
_LENIENT = {
    "head_dim", "layer_types", "max_window_layers", "num_key_value_heads", "parallel_attn", "partial_rotary_factor",
    "sliding_window_pattern",
}  # fmt: skip  # a list of names
# Fields that say nothing of what is computed.
_SILENT = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "model_type", "pad_token_id",
    "transformers_version", "use_cache",
}  # fmt: skip  # a list of names
FIRST = ("gemma2", "exaone4", "olmo3", "cohere", "smollm3")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", deep_after(1, [*FIRST, *(name for name in CASES if name not in FIRST)]))
def test_null_and_absent_fields_are_what_transformers_takes_them_for(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    both, wrong = 0, list[str]()
    refused = {f"{field} null" for field in fields_read(config) - _LENIENT - _SILENT}
    for label, changed in changes(config):
        file.write_text(json.dumps(changed))
        wanted, found = of_transformers(folder, name), of_quire(folder)
        if wanted is None and found is not None and label in refused:
            wrong.append(f"{label} is refused by transformers")
        if wanted is None or found is None:
            continue
        both += 1
        if (wanted - found).abs().max() > 1e-4:
            wrong.append(label)
    assert not wrong
    assert both >= 3, "a test that compares nothing"


# Three cases are left out: Quire refuses two, and transformers fails with the other.
@pytest.mark.parametrize("name", sorted(set(CASES) - {"smollm3, windows", "exaone4, without windows", "qwen3-next"}))
def test_an_absent_window_is_transformers_default(name: str) -> None:
    """It is longer than the contexts of the tiny models, which cannot show it."""
    with quiet_transformers():
        import transformers

        config = getattr(transformers, causal_class(name)).config_class(
            **{key: value for key, value in (SIZES | CASES[name][1]).items() if value is not ...}
        )
        fields = config.to_dict() | {"architectures": [causal_class(name)], "max_position_embeddings": 1 << 20}
        for absent in ("sliding_window", "layer_types"):
            fields.pop(absent, None)
        taken = type(config).from_dict(fields)
    window, types = getattr(taken, "sliding_window", None) or 0, getattr(taken, "layer_types", None)
    wanted = [window] * taken.num_hidden_layers
    if types is not None:
        wanted = [window if each == "sliding_attention" else 0 for each in types]
    architecture, family = find_family(ConfigFile(fields))
    spec = family.build_spec(architecture, family.adapt(ConfigFile(fields)))
    assert list(spec.windows) == wanted


def changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field that the file has or that the family reads, null and absent; and so the fields of its objects."""
    for name in sorted(fields_read(config) | set(config) - _SILENT):
        for label, changed in without(config, name):
            yield f"{name} {label}", changed
        found = config.get(name)
        section: dict[str, Any] = found if isinstance(found, dict) else {}
        for inner in sorted({*section, *(KEYS.get(section.get("rope_type", ""), ()))}):
            for label, changed in without(section, inner):
                yield f"{name}.{inner} {label}", config | {name: changed}


def without(fields: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if fields.get(name, "") is not None:
        yield "null", fields | {name: None}
    if name in fields:
        yield "absent", {key: value for key, value in fields.items() if key != name}


def fields_read(config: dict[str, Any]) -> set[str]:
    """The fields that a model's family reads, by the names that they have in its config.json."""
    architecture, family = find_family(ConfigFile(config))
    usual = family.adapt(ConfigFile(config))
    family.build_spec(architecture, usual)
    own = {name: own for own, name in family.renamed.items()}
    return {own.get(name, name) for name in usual.seen}


def of_quire(folder: Path) -> Tensor | None:
    """The prompt's logits; None where the model is refused."""
    try:
        model = load_model(folder, LoadOptions(kv_cache_bytes=4 << 20))
    except QuireError:
        return None
    return logits(model, prompt(), pages_for(LENGTH, 1), 0)


def of_transformers(folder: Path, name: str) -> Tensor | None:
    """Return the logits that transformers computes; None if it fails, or needs other weights than the folder has."""
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        attention = "sdpa" if name == "falcon rw" else "eager"
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
            )
            model, told = loaded
            with torch.no_grad():
                found: Tensor = model(torch.tensor([prompt()]), use_cache=False).logits[0]
        except Exception:  # transformers has errors of many types
            return None
    return None if any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")) else found

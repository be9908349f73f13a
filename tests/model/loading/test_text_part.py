"""Configs of multimodal models: which language model is taken, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import QuireError
from quire_worker.loading import LoadOptions, find_source
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures import FAMILIES
from quire_worker.model.text_part import DEFAULT_SIZES, MULTIMODAL, TEXT_CLASSES
from quire_worker.paced.facts import read_facts
from tests.oracle import quiet_transformers

# As published: the sizes that are not here are transformers' defaults.
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def spec_of(folder: Path, fields: dict[str, Any], **options: Any) -> ArchSpec:
    (folder / "config.json").write_text(json.dumps(fields))
    spec = find_source(folder, LoadOptions(load_format="dummy", **options), lambda *_: None).spec
    assert isinstance(spec, ArchSpec)
    return spec


def test_sizes_that_a_file_leaves_out_are_transformers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GEMMA_3_4B)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_positions, spec.tied_embeddings) == (262208, 131072, True)
    assert spec.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    full, sliding = (spec.attention[layer].rope for layer in (5, 0))
    assert full is not None and sliding is not None
    assert (full.kind, full.factor, full.theta, sliding.kind, sliding.theta) == ("linear", 8.0, 1e6, "default", 1e4)
    facts = read_facts(str(tmp_path))
    assert (facts.vocab_size, facts.eos_token_ids, facts.max_model_len) == (262208, (1, 106), 131072)


def test_default_sizes_and_classes_are_those_of_transformers() -> None:
    with quiet_transformers():
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        for text_type, architecture in TEXT_CLASSES.items():
            assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text_type] == architecture
            config = CONFIG_MAPPING[text_type]()
            for name, value in DEFAULT_SIZES.get(text_type, {}).items():
                assert getattr(config, name) == value, (text_type, name)
        for name, each in MULTIMODAL.items():
            assert name in dir(__import__("transformers")) and set(each.text_types) <= set(TEXT_CLASSES)
    own = {name for name, each in TEXT_CLASSES.items() if each in FAMILIES}
    assert own >= set(DEFAULT_SIZES), "a family of Quire's own reads these sizes"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another class": (
        {"architectures": ["PaliGemmaForConditionalGeneration"]},
        "UNSUPPORTED_ARCHITECTURE",
        "Gemma3ForConditionalGeneration, Mistral3ForConditionalGeneration",
    ),
    "another language model": (
        {"text_config": {"model_type": "phi3"}},
        "UNSUPPORTED_ARCHITECTURE",
        "the language model of Gemma3ForConditionalGeneration is of the type phi3",
    ),
    "no language model": ({"text_config": None}, "BAD_CONFIG", "`text_config`"),
    "a language model that is no object": ({"text_config": [1]}, "BAD_CONFIG", "`text_config` is [1]"),
    "attention that nobody reads": ({"sliding_window": 7}, "UNSUPPORTED_CONFIG", "`sliding_window` is 7"),
    "attention of the text that nobody reads": (
        {"text_config": GEMMA_3_4B["text_config"] | {"alibi": True}},
        "UNSUPPORTED_CONFIG",
        "text_config: `alibi`",
    ),
    "quantised text": (
        {"text_config": GEMMA_3_4B["text_config"] | {"quantization_config": {"bits": 4}}},
        "UNSUPPORTED_QUANTIZATION",
        "text_config",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, code, told = REFUSED[name]
    with pytest.raises(QuireError) as raised:
        spec_of(tmp_path, GEMMA_3_4B | changes)
    assert raised.value.code == code and told in raised.value.message and raised.value.fix


def test_an_override_replaces_a_field_of_the_text(tmp_path: Path) -> None:
    assert set(spec_of(tmp_path, GEMMA_3_4B, hf_overrides={"sliding_window": 512}).windows) == {0, 512}

"""Model folders, sound and broken, through the one entrance `load_model`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_common.errors import ConfigError, QuireError
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures import FAMILIES as REGISTRY
from quire_worker.model.parameters import MODEL_WIDE
from tests.model.batches import Run, make_batch
from tests.model.folders import FAMILIES, random_tensors, write_config, write_sharded, write_single

OPTIONS = LoadOptions(kv_cache_bytes=1 << 20)


def sound(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    tensors = random_tensors(write_config(folder, **changes))
    write_single(folder, tensors)
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = sound(folder)
    change(tensors)
    write_single(folder, tensors)


def pop_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("model.layers.1.mlp.up_proj.weight")


def add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)


def nudge_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] += 1.0


def reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(47).bfloat16()


def recast_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int32)


def sharded(folder: Path) -> None:
    write_sharded(folder, random_tensors(write_config(folder)))


def lose_a_shard(folder: Path) -> None:
    sharded(folder)
    next(folder.glob("model-00002-*")).unlink()


def cut_a_shard(folder: Path) -> None:
    sharded(folder)
    shard = next(folder.glob("model-00002-*"))
    shard.write_bytes(shard.read_bytes()[:-3])


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    sharded(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def other_format(folder: Path) -> None:
    write_config(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def only_text(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(text)


ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (lambda f: None, "MODEL_NOT_FOUND", "no model folder"),
    "no config": (lambda f: f.mkdir(), "MISSING_CONFIG", "config.json"),
    "config is no JSON": (lambda f: only_text(f, "{"), "BAD_CONFIG", "not JSON"),
    "config is a list": (lambda f: only_text(f, "[]"), "BAD_CONFIG", "no JSON object"),
    "unknown architecture": (
        lambda f: write_config(f, architectures=["OwnForCausalLM"]),
        "UNSUPPORTED_ARCHITECTURE",
        "OwnForCausalLM",
    ),
    "no architecture": (lambda f: write_config(f, architectures=...), "UNSUPPORTED_ARCHITECTURE", "none"),
    "no hidden size": (lambda f: write_config(f, hidden_size=...), "BAD_CONFIG", "lacks `hidden_size`"),
    "layers are text": (lambda f: write_config(f, num_hidden_layers="2"), "BAD_CONFIG", "'2'"),
    "zero layers": (lambda f: write_config(f, num_hidden_layers=0), "BAD_CONFIG", "num_hidden_layers"),
    "heads do not divide": (lambda f: write_config(f, num_key_value_heads=3), "BAD_CONFIG", "divisor"),
    "odd head size": (lambda f: write_config(f, head_dim=7), "BAD_CONFIG", "even"),
    "activation": (lambda f: write_config(f, hidden_act="mish"), "UNSUPPORTED_ACTIVATION", "silu"),
    "rope kind": (lambda f: write_config(f, rope_scaling={"rope_type": "spiral"}), "UNSUPPORTED_ROPE", "llama3"),
    "rope factors": (lambda f: write_config(f, rope_scaling=ROPE), "BAD_CONFIG", "high_freq_factor"),
    "rope is a number": (lambda f: write_config(f, rope_scaling=3), "BAD_CONFIG", "an object"),
    "layers beyond int32": (lambda f: write_config(f, num_hidden_layers=2**32), "BAD_CONFIG", "1 to 2147483647"),
    "a factor beyond floats": (
        lambda f: write_config(f, rope_scaling={"rope_type": "linear", "factor": 10**400}),
        "BAD_CONFIG",
        "`factor`",
    ),
    "context beyond int32": (
        lambda f: sound(f, max_position_embeddings=2**32),
        "BAD_CONFIG",
        "`max_position_embeddings` is 4294967296, not at most 2147483647",
    ),
    "eos id beyond int32": (
        lambda f: sound(f, eos_token_id=[2, 2**31]),
        "BAD_CONFIG",
        "config.json: `eos_token_id` is [2, 2147483648], not a token id from 0 to 2147483647",
    ),
    "eos id of the generation config": (
        lambda f: (sound(f), (f / "generation_config.json").write_text('{"eos_token_id": 4294967297}')),
        "BAD_CONFIG",
        "generation_config.json: `eos_token_id` is 4294967297",
    ),
    "quantised": (lambda f: write_config(f, quantization_config={}), "UNSUPPORTED_QUANTIZATION", "quantised"),
    "no weights": (write_config, "MISSING_WEIGHTS", "model.safetensors"),
    "other format": (other_format, "UNSUPPORTED_WEIGHT_FORMAT", "other than safetensors"),
    "missing shard": (lose_a_shard, "MISSING_SHARD", "model-00002-of-00003.safetensors"),
    "cut shard": (cut_a_shard, "TRUNCATED_SAFETENSORS", "model-00002-of-00003.safetensors"),
    "index without map": (lambda f: edit_index(f, lambda i: i.pop("weight_map")), "BAD_INDEX", "weight_map"),
    "index leads outside": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(x="../secret.safetensors")),
        "BAD_INDEX",
        "../secret",
    ),
    "index promises too much": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(ghost="model-00001-of-00003.safetensors")),
        "MISSING_TENSOR",
        "ghost",
    ),
    "missing tensor": (lambda f: rewrite(f, pop_one), "MISSING_TENSOR", "model.layers.1.mlp.up_proj.weight"),
    "extra tensor": (lambda f: rewrite(f, add_one), "UNEXPECTED_TENSOR", "q_proj.bias"),
    "wrong shape": (lambda f: rewrite(f, reshape_one), "SHAPE_MISMATCH", "[47]"),
    "wrong kind of number": (lambda f: rewrite(f, recast_one), "UNSUPPORTED_WEIGHT_DTYPE", "I32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_with_cause_and_fix(name: str, tmp_path: Path) -> None:
    make, code, cause = BROKEN[name]
    make(tmp_path / "model")
    with pytest.raises(QuireError) as error:
        load_model(tmp_path / "model", OPTIONS)
    assert error.value.code == code
    assert cause in error.value.message and error.value.fix


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    sound(tmp_path)
    with pytest.raises(QuireError) as error:
        load_model(tmp_path, LoadOptions(max_model_len=513))
    assert error.value.code == "MAX_MODEL_LEN_TOO_LARGE" and "512" in error.value.fix


def test_a_context_beyond_int32_needs_a_shorter_one(tmp_path: Path) -> None:
    sound(tmp_path, max_position_embeddings=10**18)
    with pytest.raises(QuireError) as error:
        load_model(tmp_path, OPTIONS)
    assert "--max-model-len" in error.value.fix
    assert load_model(tmp_path, replace(OPTIONS, max_model_len=100)).facts.max_model_len == 100


def test_an_eos_id_outside_the_vocabulary_loads(tmp_path: Path) -> None:
    """It is never sampled, and harms nobody."""
    sound(tmp_path, eos_token_id=2**31 - 1)
    assert load_model(tmp_path, OPTIONS).facts.eos_token_ids == (2**31 - 1,)


def test_a_cache_without_room_is_refused(tmp_path: Path) -> None:
    sound(tmp_path)
    with pytest.raises(QuireError) as error:
        load_model(tmp_path, LoadOptions(kv_cache_bytes=1000))
    assert error.value.code == "KV_CACHE_TOO_SMALL"


def test_shards_do_not_change_the_model(tmp_path: Path) -> None:
    sound(tmp_path / "single")
    sharded(tmp_path / "sharded")
    single, many = (load_model(tmp_path / name, OPTIONS) for name in ("single", "sharded"))
    assert single.facts == many.facts and single.geometry == many.geometry
    batch = make_batch([Run([5, 6, 7], 0, [1])])
    assert torch.equal(single.runner.all_logits(batch), many.runner.all_logits(batch))


def test_digest_and_namespace_see_weights_and_config(tmp_path: Path) -> None:
    sound(tmp_path / "a")
    rewrite(tmp_path / "b", nudge_one)
    sound(tmp_path / "c", rms_norm_eps=2e-5)
    sound(tmp_path / "d", transformers_version="5.0.0")
    loaded = {name: load_model(tmp_path / name, OPTIONS) for name in "abcd"}
    digests = {name: model.facts.digest for name, model in loaded.items()}
    namespaces = {name: model.geometry.namespace for name, model in loaded.items()}
    for found in digests, namespaces:
        assert found["a"] == found["d"]
        assert len(set(found.values())) == 3, "one must not read the pages that another computed"


def test_the_namespace_sees_the_page_size(tmp_path: Path) -> None:
    sound(tmp_path)
    names = [
        load_model(tmp_path, LoadOptions(kv_cache_bytes=1 << 20, page_size=size)).geometry.namespace
        for size in (16, 32, 16)
    ]
    assert names[0] == names[2] != names[1] and len(names[0]) == 32


def test_progress_runs_from_nothing_to_everything(tmp_path: Path) -> None:
    tensors = sound(tmp_path)
    seen: list[tuple[str, int, int]] = []
    load_model(tmp_path, OPTIONS, lambda *each: seen.append(each))
    weights = [(done, total) for phase, done, total in seen if phase == "weights"]
    assert weights[0][0] == 0 and weights[-1][0] == weights[-1][1] == sum(t.nbytes for t in tensors.values())
    assert weights == sorted(weights) and len(weights) == len(tensors) + 1
    assert seen[0][0] == "config" and seen[-1][0] == "kernels"


def test_facts(tmp_path: Path) -> None:
    tensors = sound(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    model = load_model(tmp_path, LoadOptions(kv_cache_bytes=1 << 20, max_model_len=100))
    assert model.facts.architecture == "LlamaForCausalLM"
    assert model.facts.eos_token_ids == (2, 9)
    assert (model.facts.max_model_len, model.facts.vocab_size) == (100, 97)
    assert model.facts.parameters == sum(tensor.numel() for tensor in tensors.values())
    (group,) = model.geometry.groups
    assert group.page_bytes == 2 * 2 * 2 * 16 * 12 * 4
    assert model.num_pages == (1 << 20) // group.page_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_need_a_config_only(family: str, tmp_path: Path) -> None:
    write_config(tmp_path, **FAMILIES[family])
    models = [
        load_model(tmp_path, LoadOptions(load_format="dummy", seed=seed, kv_cache_bytes=1 << 20)) for seed in (1, 1, 2)
    ]
    batch = make_batch([Run([5, 6, 7], 0, [1])])
    logits = [model.runner.all_logits(batch) for model in models]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert models[0].facts.digest == models[1].facts.digest != models[2].facts.digest
    assert logits[0].std() > 1e-3


def test_old_leftovers_and_a_tied_head_are_accepted(tmp_path: Path) -> None:
    tensors = sound(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    write_single(tmp_path, tensors)
    spec = load_model(tmp_path, OPTIONS).spec
    assert isinstance(spec, ArchSpec)
    assert spec.tied_embeddings


def test_a_tied_head_that_is_another_than_the_embedding_is_refused(tmp_path: Path) -> None:
    """transformers computes with the head then: to leave it out would give other answers."""
    tensors = sound(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    write_single(tmp_path, tensors)
    with pytest.raises(ConfigError, match="TIED_HEAD_DIFFERS") as error:
        load_model(tmp_path, OPTIONS)
    assert "tie_word_embeddings" in error.value.fix
    write_single(tmp_path, tensors | {"lm_head.weight": tensors["lm_head.weight"][:0]})
    with pytest.raises(ConfigError, match="TIED_HEAD_DIFFERS"):
        load_model(tmp_path, OPTIONS)
    write_single(tmp_path, tensors)
    spec = load_model(tmp_path, replace(OPTIONS, hf_overrides={"tie_word_embeddings": False})).spec
    assert isinstance(spec, ArchSpec)
    assert not spec.tied_embeddings


def test_only_these_roles_share_a_tensor() -> None:
    for family in REGISTRY.values():
        roles_of: dict[str, list[str]] = {}
        for role, name in family.names.items():
            roles_of.setdefault(name.format(layer=0), []).append(role.partition(".")[0])
        shared = [roles for roles in roles_of.values() if len(roles) > 1]
        known = ["q", "k", "v"], ["gate", "up"], ["q", "output_gate"]
        assert all(roles in known for roles in shared), family.model_type


def test_partitions_cut_between_heads() -> None:
    from quire_worker.model.arch_spec import ArchSpec, Attention, Dense, LayerSpec, NormSpec
    from quire_worker.model.parameters import parameter_specs

    layer = LayerSpec(Attention(6, 2, 4, qkv_bias=True, output_gate=True), Dense(32))
    spec = ArchSpec("X", 40, 24, (layer,) * 2, 8, NormSpec(1e-5))
    by_role = {each.role: each for each in parameter_specs(spec)}
    assert by_role["q.weight"].partition.unit * by_role["q.weight"].partition.units == 24
    assert by_role["k.bias"].partition.units == 2
    assert by_role["output_gate.weight"].partition == by_role["q.weight"].partition
    for each in by_role.values():
        cut = each.partition
        if cut.kind != "replicated":
            assert each.shape[cut.axis] == cut.unit * cut.units, each.role
    assert by_role["o.weight"].partition.kind == by_role["down.weight"].partition.kind == "row"
    assert by_role["embed.weight"].layer == MODEL_WIDE and by_role["embed.weight"].partition.kind == "vocab"


def test_the_namespace_sees_the_backend(tmp_path: Path) -> None:
    """Backends differ in the last bits: one must not read the pages that another computed."""
    sound(tmp_path)
    loaded = [
        load_model(tmp_path, LoadOptions(kv_cache_bytes=1 << 20, attention_backend=name)) for name in ("cpu", "torch")
    ]
    assert len({each.geometry.namespace for each in loaded}) == 2
    assert len({each.facts.digest for each in loaded}) == 1

"""Targets: what the worker reads of a model's folder: headers of GGUF and safetensors files, and configurations. They
come from strangers."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

from quire_common.errors import QuireError
from quire_common.gguf import TextArray, open_gguf
from quire_tokenizer.gguf.gguf_tokenizer import read_gguf
from quire_worker.model.architectures import FAMILIES, find_family
from quire_worker.model.config_check import check_config, check_model_type
from quire_worker.model.config_facts import context_length, eos_token_ids
from quire_worker.model.config_file import ConfigFile, read_json
from quire_worker.model.generation_config import sampling_defaults
from quire_worker.model.text_part import MULTIMODAL, text_part
from quire_worker.weights.gguf.architectures import find_architecture
from quire_worker.weights.gguf.config_fields import read_config
from quire_worker.weights.safetensors_file import SafetensorsFile
from tests.fuzz.changes.byte_changes import changed_bytes
from tests.fuzz.changes.gguf_changes import changed_gguf
from tests.fuzz.changes.json_changes import changed_json, is_json
from tests.fuzz.target import FILES_MARK, Finding, Outcome, Target, check_error
from tests.gguf.raw import ARRAY, BOOL, F32, I32, TEXT, U32, RawFile, Tensor, pair, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_DATA_BYTES = 1 << 16
_TENSORS = [
    Tensor("token_embd.weight", (32, 11), 0, 1408),
    Tensor("output_norm.weight", (32,), 0, 128),
    Tensor("blk.0.attn_q.weight", (32, 32), 2, 576),
]


def llama_header() -> bytes:
    """A GGUF header with an architecture and a tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(4)), "a", "b", "ab", "▁"]
    numbers = {
        "context_length": 512,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 8,
        "vocab_size": len(tokens),
    }
    pairs = [pair("general.architecture", TEXT, "llama"), pair("general.alignment", U32, 32)]
    pairs += [pair(f"llama.{key}", U32, value) for key, value in numbers.items()]
    pairs += [pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5), pair("llama.rope.freq_base", F32, 1e4)]
    pairs += [
        pair("tokenizer.ggml.model", TEXT, "llama"),
        pairs_of("tokenizer.ggml.tokens", TEXT, tokens),
        pairs_of("tokenizer.ggml.scores", F32, [0.0 - index for index in range(len(tokens))]),
        pairs_of("tokenizer.ggml.token_type", I32, [2, 3, 3, 6, 6, 6, 6, 1, 1, 1, 1]),
        pair("tokenizer.ggml.bos_token_id", U32, 1),
        pair("tokenizer.ggml.eos_token_id", U32, 2),
        pair("tokenizer.ggml.add_bos_token", BOOL, 1),
        pair("tokenizer.chat_template", TEXT, "{{ messages[0]['content'] }}"),
    ]
    return RawFile(pairs=pairs, tensors=_TENSORS).header()


def bpe_header() -> bytes:
    """Return the header of a GGUF file of another architecture, with a byte-level tokenizer."""
    tokens = ["a", "b", "ab", "Ġ", "<|end|>"]
    pairs = [
        pair("general.architecture", TEXT, "qwen2"),
        pair("tokenizer.ggml.model", TEXT, "gpt2"),
        pair("tokenizer.ggml.pre", TEXT, "qwen2"),
        pairs_of("tokenizer.ggml.tokens", TEXT, tokens),
        pairs_of("tokenizer.ggml.token_type", I32, [1, 1, 1, 1, 3]),
        pairs_of("tokenizer.ggml.merges", TEXT, ["a b"]),
        pair("tokenizer.ggml.eos_token_id", U32, 4),
    ]
    return RawFile(pairs=pairs, tensors=_TENSORS).header()


def windowed_header() -> bytes:
    """Return the header of a GGUF file without a tokenizer's texts, of an architecture with windows, soft caps and two
    rotary embeddings."""
    numbers = {
        "context_length": 512,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 64,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.factor": 8.0,
        "final_logit_softcapping": 30.0,
    }
    pairs = [pair("general.architecture", TEXT, "gemma3"), pair("gemma3.rope.scaling.type", TEXT, "yarn")]
    pairs += [pair(f"gemma3.{key}", U32, value) for key, value in numbers.items()]
    pairs += [pair(f"gemma3.{key}", F32, value) for key, value in floats.items()]
    pairs += [
        pairs_of("gemma3.attention.sliding_window_pattern", BOOL, [1, 0]),
        pair("gemma3.rope.scaling.original_context_length", U32, 64),
        pair("tokenizer.ggml.model", TEXT, "llama"),
        pairs_of("tokenizer.ggml.tokens", TEXT, ["<unk>", "a"]),
        pairs_of("tokenizer.ggml.scores", F32, [0.0, -1.0]),
        pairs_of("tokenizer.ggml.token_type", I32, [2, 1]),
        pair("tokenizer.ggml.add_bos_token", BOOL, 0),
    ]
    return RawFile(pairs=pairs, tensors=_TENSORS).header()


def nested_header() -> bytes:
    """A list of lists, which is known and refused."""
    nested = struct.pack("<Q", 4) + b"nest" + struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQi", I32, 1, 5)
    return RawFile(pairs=[pair("general.architecture", TEXT, "llama"), nested], tensors=_TENSORS).header()


class GgufTarget(Target):
    """A GGUF file: its header, its texts, the config and the tokenizer in it. Inputs are headers; the data is zeros."""

    covers = (
        "common/quire_common/gguf",
        "worker/quire_worker/weights/gguf/config_fields.py",
        "worker/quire_worker/weights/gguf/architectures.py",
        "worker/quire_worker/weights/gguf/rope_fields.py",
        "tokenizer/quire_tokenizer/gguf",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / "model.gguf"

    def seeds(self) -> list[bytes]:
        return [llama_header(), bpe_header(), windowed_header(), nested_header()]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return changed_gguf(data, choose)

    def run(self, data: bytes) -> Outcome:
        with self._path.open("wb") as file:
            file.write(data)
            file.truncate(len(data) + _DATA_BYTES)
        readable = data[:4] == b"GGUF" and data[4:8] in (b"\x02\0\0\0", b"\x03\0\0\0")
        outcomes = [_passes(part) for part in (self._header, self._config, self._tokenizer)]
        if not readable:
            return Outcome.UNREADABLE
        return Outcome.ACCEPTED if all(outcomes) else Outcome.REFUSED

    def _header(self) -> None:
        model = open_gguf(self._path)
        for key, value in model.metadata.values.items():
            if isinstance(value, TextArray):
                model.metadata.texts(key)
        size = self._path.stat().st_size
        for place in model.tensors.values():
            if not 0 < place.begin <= place.begin + place.num_bytes <= size:
                raise Finding(f"a tensor lies outside of the file: {place}")

    def _config(self) -> None:
        model = open_gguf(self._path)
        find_architecture(model)
        config = read_config(model)
        name, family = find_family(config)
        family.build_spec(name, config)

    def _tokenizer(self) -> None:
        read_gguf(self._path)


class SafetensorsTarget(Target):
    """The header of a safetensors file. Inputs are whole files; changes fix the length of the header again."""

    covers = ("worker/quire_worker/weights/safetensors_file.py",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / "model.safetensors"

    def seeds(self) -> list[bytes]:
        header = {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        }
        odd = {"c": {"dtype": "I8", "shape": [], "data_offsets": [32, 33]}}
        texts = [json.dumps(header).encode(), json.dumps({**header, **odd}).encode()]
        return [struct.pack("<Q", len(text)) + text + bytes(32 + number) for number, text in enumerate(texts)]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        length = int.from_bytes(data[:8], "little")
        if choose.random() < 0.05 or not 0 < length <= len(data) - 8:
            return changed_bytes(data, choose)
        words = ("dtype", "shape", "data_offsets", "F32", "BF16", "I8", "BOOL", "__metadata__")
        header = changed_json(data[8 : 8 + length], choose, words)
        body = data[8 + length :] if choose.random() < 0.9 else changed_bytes(data[8 + length :], choose)
        return struct.pack("<Q", len(header)) + header + body

    def run(self, data: bytes) -> Outcome:
        self._path.write_bytes(data)
        length = int.from_bytes(data[:8], "little")
        try:
            json.loads(data[8 : 8 + length])
            readable = True
        except (ValueError, RecursionError):
            readable = False
        try:
            with SafetensorsFile(self._path) as file:
                for entry in file.entries.values():
                    if entry.end > len(data) or entry.begin < 8 + length:
                        raise Finding(f"a tensor lies outside of the file: {entry}")
                    entry.name.encode()
                    file.tensor(entry)
        except QuireError as error:
            check_error(error)
            return Outcome.REFUSED if readable else Outcome.UNREADABLE
        return Outcome.ACCEPTED


class ConfigTarget(Target):
    """config.json and generation_config.json, as the worker reads them."""

    covers = (
        "worker/quire_worker/model/config_file.py",
        "worker/quire_worker/model/config_facts.py",
        "worker/quire_worker/model/generation_config.py",
        "worker/quire_worker/model/architectures",
        "worker/quire_worker/model/text_part.py",
    )

    def seeds(self) -> list[bytes]:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "max_position_embeddings": 512,
            **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 1e-5),
            "hidden_act": "silu",
            "eos_token_id": [1, 2],
            "tie_word_embeddings": True,
        }
        generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 2}
        ropes: list[dict[str, Any]] = [
            {"rope_theta": 1e4},
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            },
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ]
        configs = [
            {"architectures": [name], **_own_names(sizes, family.renamed), **rope}
            for name, family in FAMILIES.items()
            for rope in ropes
        ]
        configs += [
            {"architectures": [name], "text_config": {**sizes, "model_type": text_type}, "vision_config": {}}
            for name, each in MULTIMODAL.items()
            for text_type in each.text_types
        ]
        return [json.dumps(config).encode() + FILES_MARK + json.dumps(generation).encode() for config in configs]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        config, _, generation = data.partition(FILES_MARK)
        if choose.random() < 0.7:
            config = changed_json(config, choose, _WORDS)
        else:
            generation = changed_json(generation, choose, _WORDS)
        return config + FILES_MARK + generation

    def run(self, data: bytes) -> Outcome:
        config, _, generation = data.partition(FILES_MARK)
        (self.folder / "config.json").write_bytes(config)
        (self.folder / "generation_config.json").write_bytes(generation)
        accepted = [_passes(part) for part in (self._architecture, self._facts, self._defaults)]
        if not is_json(config):
            return Outcome.UNREADABLE
        return Outcome.ACCEPTED if all(accepted) else Outcome.REFUSED

    @property
    def _config(self) -> ConfigFile:
        return ConfigFile(read_json(self.folder / "config.json"))

    def _architecture(self) -> None:
        part = text_part(self._config, {"sliding_window": 64})
        config = self._config if part is None else part.config
        name, family = find_family(config)
        check_model_type(config, family)
        usual = family.adapt(config)
        family.build_spec(name, usual)
        check_config(usual, family)

    def _facts(self) -> None:
        eos_token_ids(self.folder, self._config)
        context_length(self._config, 0)

    def _defaults(self) -> None:
        sampling_defaults(self.folder)


def _own_names(fields: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The fields under the names that a family has for them."""
    own = {usual: name for name, usual in renamed.items()}
    return {own.get(name, name): value for name, value in fields.items()}


_TEXT_OF_WORDS = """
    rope_scaling rope_type type factor llama3 yarn linear dynamic longrope mscale head_dim sliding_window
    text_config mistral gemma3_text
    use_sliding_window layer_types attention_bias mlp_bias hidden_act gelu silu quantization_config model_type
    partial_rotary_factor eos_token_id no_rope_layers alibi clip_qkv query_pre_attn_scalar logit_scale rotary_dim
    """
_WORDS = (*_TEXT_OF_WORDS.split(),)


def _passes(read: Callable[[], None]) -> bool:
    try:
        read()
    except QuireError as error:
        check_error(error)
        return False
    return True

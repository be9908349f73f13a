"""Writes a demo model as a Hugging Face folder, and its model card from measurements.

Weights are written only as bf16 safetensors, without pickle and code.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import torch
from demo_net import Llama, NetShape
from demo_tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, TURN_END, token_id
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer


def write_folder(folder: Path, net: Llama, tokenizer: Tokenizer) -> None:
    """Write everything except the card. Existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in net.named_parameters()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    bos, eos, pad, turn_end = (token_id(tokenizer, token) for token in (BOS, EOS, PAD, TURN_END))
    ends = [eos, turn_end]
    _write_json(folder / "config.json", _config(net.shape, bos, ends, pad))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": bos,
            "do_sample": True,
            "eos_token_id": ends,
            "pad_token_id": pad,
            "temperature": 0.8,
            "top_p": 0.95,
        },
    )
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": net.shape.max_positions,
            "clean_up_tokenization_spaces": False,
            **names,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")


def read_weights(folder: Path, shape: NetShape, device: torch.device) -> Llama:
    """Read the network from the written file, so that the measurements are of the shipped weights."""
    net = Llama(shape)
    net.load_state_dict({name: tensor.float() for name, tensor in load_file(str(folder / "model.safetensors")).items()})
    return net.to(device).eval()


def write_card(folder: Path, body: str) -> None:
    """Write README.md with the front matter that model hubs read."""
    front = "---\nlicense: apache-2.0\nlanguage: en\npipeline_tag: text-generation\n---\n\n"
    (folder / "README.md").write_text(front + _reflow(body.strip()) + "\n", encoding="utf-8")


def _reflow(markdown: str) -> str:
    """Fill paragraphs again, since the numbers in them moved the line ends. Fenced text stays unchanged."""
    pieces = markdown.split("```")
    for at in range(0, len(pieces), 2):
        blocks = pieces[at].split("\n\n")
        pieces[at] = "\n\n".join(
            textwrap.fill(block, 120, break_long_words=False, break_on_hyphens=False)
            if block[:1].isalnum() or block.startswith(("`", "**"))
            else block
            for block in blocks
        )
    return "```".join(pieces)


def _config(shape: NetShape, bos: int, ends: list[int], pad: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

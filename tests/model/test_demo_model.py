"""The models in models/: what a fresh machine serves must load, speak the chat format, and know its Shakespeare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
jinja2_sandbox = pytest.importorskip("jinja2.sandbox")
safetensors = pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

MODELS = Path(__file__).resolve().parents[2] / "models"
NAMES = ("demo", "demo-draft")
WEIGHT_BYTES = {"demo": 16_000_000, "demo-draft": 2_000_000}
WEIGHT_COUNT = {"demo": range(5_000_000, 8_000_001), "demo-draft": range(500_000, 1_000_001)}
LAYERS = {"demo": 8, "demo-draft": 2}
# Nats per token: a model that knows nothing has 8.3. On HAMLET these have 5.0-5.1; wrongly loaded ones far more.
WORST_LOSS = {"demo": 5.4, "demo-draft": 5.5}
# Of a play that the training text has nothing of.
HAMLET = """\
HAMLET:
To be, or not to be: that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles,
And by opposing end them? To die: to sleep;
No more; and by a sleep to say we end
The heart-ache and the thousand natural shocks
That flesh is heir to, 'tis a consummation
Devoutly to be wish'd. To die, to sleep;
To sleep: perchance to dream: ay, there's the rub.

OPHELIA:
Good my lord,
How does your honour for this many a day?

HAMLET:
I humbly thank you; well, well, well.
"""


def read_json(name: str, file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODELS / name / file).read_text(encoding="utf-8"))
    return loaded


def tokenizer_of(name: str) -> Any:
    return tokenizers.Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))


def render(**given: Any) -> str:
    environment = jinja2_sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    template = environment.from_string((MODELS / "demo" / "chat_template.jinja").read_text(encoding="utf-8"))
    return str(template.render(**{"bos_token": "<|begin_of_text|>", "add_generation_prompt": True, **given}))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_holds_safetensors_and_text_alone(name: str) -> None:
    files = {path.name for path in (MODELS / name).iterdir()}
    text = {"README.md", "config.json", "generation_config.json", "chat_template.jinja"}
    assert files == text | {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert (MODELS / name / "model.safetensors").stat().st_size <= WEIGHT_BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_shapes_that_the_config_says(name: str) -> None:
    config = read_json(name, "config.json")
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        expected |= {at + f"{norm}_layernorm.weight": [hidden] for norm in ("input", "post_attention")}
        expected |= {at + f"mlp.{part}_proj.weight": [config["intermediate_size"], hidden] for part in ("gate", "up")}
        expected[at + "mlp.down_proj.weight"] = [hidden, config["intermediate_size"]]
        expected[at + "self_attn.q_proj.weight"] = [heads * dim, hidden]
        expected |= {at + f"self_attn.{part}_proj.weight": [kv_heads * dim, hidden] for part in "kv"}
        expected[at + "self_attn.o_proj.weight"] = [hidden, heads * dim]
    count = 0
    with safetensors.safe_open(str(MODELS / name / "model.safetensors"), "pt") as weights:
        names = list(weights.keys())
        assert {name: weights.get_slice(name).get_shape() for name in names} == expected
        for key in names:
            tensor = weights.get_tensor(key)
            assert str(tensor.dtype) == "torch.bfloat16"
            assert bool(tensor.isfinite().all()), key
            count += tensor.numel()
    assert count in WEIGHT_COUNT[name]
    assert config["num_hidden_layers"] == LAYERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_config_is_a_llama_that_ends_a_turn(name: str) -> None:
    config, generation, tokenizer = (
        read_json(name, "config.json"),
        read_json(name, "generation_config.json"),
        tokenizer_of(name),
    )
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == read_json(name, "tokenizer_config.json")["model_max_length"] == 8192
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 4096
    ends = [tokenizer.token_to_id("<|end_of_text|>"), tokenizer.token_to_id("<|im_end|>")]
    assert config["eos_token_id"] == generation["eos_token_id"] == ends
    assert config["bos_token_id"] == tokenizer.token_to_id("<|begin_of_text|>")
    assert config["pad_token_id"] == tokenizer.token_to_id("<|pad|>")


def test_the_draft_has_the_models_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        assert (MODELS / "demo" / file).read_bytes() == (MODELS / "demo-draft" / file).read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        HAMLET,
        "  two  spaces,\ttabs\r\nand\n\n\nblank lines  \n",
        "naïve café, Ünïcödé, 東京は夜の七時, 안녕하세요, مرحبا",
        "👩‍👩‍👧‍👦 and 🏳️‍🌈, 𝔘𝔫𝔦, \u0000\u0007 and a lone accent: \u0301",
        "1234567890 + 3.14 == {'a': [0, 1]}; // ~`@#$%^&*",
    ],
)
def test_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = tokenizer_of("demo")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode(text).ids == [0, *ids], "a completion's prompt begins with the beginning-of-text token"


def test_special_tokens_are_the_first_ids() -> None:
    tokenizer = tokenizer_of("demo")
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    markup = ["tool_call", "tool_response", "tools", "think"]
    marks = [mark for name in markup for mark in (f"<{name}>", f"</{name}>")]
    reserved = [f"<|reserved_{index}|>" for index in range(19)]
    assert [tokenizer.token_to_id(token) for token in (*control, *marks, *reserved)] == list(range(32))
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content for token in added.values() if not token.special} == set(marks)
    assert tokenizer.decode(tokenizer.encode("<think>so</think><|im_end|>").ids) == "<think>so</think>"


def test_chat_template_renders_a_conversation() -> None:
    text = render(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": " goes?"}]},
            {"role": "assistant", "content": "A friend."},
            {"role": "user", "content": "Pass."},
        ]
    )
    assert text == (
        "<|begin_of_text|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho goes?<|im_end|>\n"
        "<|im_start|>assistant\nA friend.<|im_end|>\n<|im_start|>user\nPass.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert read_json("demo", "tokenizer_config.json")["chat_template"] == (
        (MODELS / "demo" / "chat_template.jinja").read_text(encoding="utf-8")
    )


def test_chat_template_renders_tools_and_their_calls() -> None:
    tool = {"type": "function", "function": {"name": "hour", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "hour", "arguments": {"city": "Verona"}}}
    written = {"id": "2", "type": "function", "function": {"name": "hour", "arguments": '{"city": "Pisa"}'}}
    text = render(
        tools=[tool],
        messages=[
            {"role": "user", "content": "What hour is it?"},
            {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [call, written]},
            {"role": "tool", "content": "three"},
        ],
        add_generation_prompt=False,
    )
    assert text.startswith("<|begin_of_text|><|im_start|>system\nYou may call these tools:\n<tools>\n")
    assert json.dumps(tool) in text
    assert "<think>\nAsk.\n</think>\n\n<tool_call>" in text
    calls = [
        part.split("</tool_call>")[0] for part in text.split("<|im_start|>assistant\n")[1].split("<tool_call>")[1:]
    ]
    assert [json.loads(part) for part in calls] == [
        {"name": "hour", "arguments": {"city": "Verona"}},
        {"name": "hour", "arguments": {"city": "Pisa"}},
    ]
    assert text.endswith("<|im_start|>tool\n<tool_response>\nthree\n</tool_response><|im_end|>\n")


@pytest.mark.filterwarnings("ignore")  # what transformers warns of while loading is not ours to fix
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_it_and_it_knows_the_style(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / name)
    assert tokenizer(HAMLET).input_ids == tokenizer_of(name).encode(HAMLET).ids
    messages = [{"role": "user", "content": "Who goes there?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == render(
        messages=messages
    )
    ids = torch.tensor([tokenizer_of(name).encode(HAMLET).ids])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < WORST_LOSS[name]

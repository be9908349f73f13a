"""Writes docs/models.md: the model families that have an entry in the worker's registry, how each is tested, and which
models without an entry were tested in the Transformers backend.

`python -m tools.models_table` writes the file; a test fails if the file is out of date.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from quire_worker.model.architectures import FAMILIES
from quire_worker.model.text_part import MULTIMODAL
from tests.gguf.families import READ_BY_TRANSFORMERS, REAL_MODELS
from tests.parity import transformers_models
from tests.parity.families import CASES, causal_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_worker.model.architectures.family import Family

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
_INTRO = """# Models

This page is for users. It lists the model architectures that Quire serves. The architecture of a model is the field
`architectures` of its `config.json`.

`python -m tools.models_table` generates this page from the worker's registry of model families.

## Architectures

Quire reads a Hugging Face folder with safetensors of each architecture in this table. It never runs code of a
model's folder. The column *GGUF* has the name of the architecture in GGUF files, where Quire reads those too. The next
section describes how these files are tested.

A test runs tiny random models of each architecture with Quire and with transformers, on the CPU in float32. Greedy
tokens must be equal, and logits may differ by 0.0001. The test also runs prompts in chunks, and prompts with a cached
prefix. Their logits must be equal to the bit. The column *configurations* has the number of tiny models.
"""
_MULTIMODAL = """## Multimodal models

Quire serves the text of these multimodal architectures. It takes the language model of `text_config`, and leaves the
weights of the other parts in the file. Requests with images are refused.

| architecture | `model_type` of `text_config` | tensors that are left out |
|---|---|---|
{rows}

A test compares tiny random models of each architecture with the multimodal class of transformers, for each layout of
names that their checkpoints have. `--hf-overrides` replaces fields of the language model. If the language model has no
entry in the table above, it runs in the [Transformers backend](#other-architectures). Examples are `ministral3`, and
`llama4_text` without `attn_temperature_tuning`.
"""
_GGUF = """## GGUF files

A GGUF file has other names of tensors than a folder, and some matrices have their rows in another order. A map beside
each family describes these differences. The column *GGUF test* says how the map is tested:

| GGUF test | a GGUF file of a tiny random model is compared with |
|---|---|
| converted | the model of transformers from which the file was converted |
| transformers | the same, and what transformers reads from the file |
| real model | the same, and a file that llama.cpp wrote (SmolLM2 135M, Gemma 3 270M) is compared with transformers |

All these tests compare logits and greedy tokens. They convert a model as llama.cpp's converter does: the package `gguf`
gives the names of tensors and keys. The tests themselves contain the order of rows, which follows llama.cpp's scripts.
So for *converted*, no other program confirms the order of rows.

Quire refuses a GGUF file of another architecture, a key of the architecture that it does not read, and a
pre-tokenizer that it does not know. The error names the cause. If only the pre-tokenizer is unknown, name the folder of
its tokenizer with `--tokenizer`. Quire knows these pre-tokenizers (`tokenizer.ggml.pre`) of byte-level vocabularies:

{pre_tokenizers}.

transformers does not have InternLM 2, EXAONE 3, MiniCPM and ChatGLM. Quire reads these models only from GGUF files,
and computes them as the family in the same row of the table, as llama.cpp's sources do. Their tests convert tiny
models of that family; no other program has confirmed them.

llama.cpp's converter changes some models:
- GGUF files of Mistral have the architecture `llama`. Files of Mistral 7B v0.1 and of StarCoder2 do not have the
  model's sliding window.
- GGUF files of SmolLM3 do not say which layers have no rotary embedding. Quire leaves it out in every fourth layer,
  as llama.cpp does.
- GGUF files of Gemma 2 and 3 have no attention scale (`query_pre_attn_scalar`). As llama.cpp does, Quire uses the size
  of a head instead. For the 27B models it uses the hidden size divided by the number of heads.
"""
_TRANSFORMERS_BACKEND = """## Other architectures

Models without an entry in the table run in the Transformers backend, and so do AFMoE models with experts. The Python
package transformers computes their layers operation by operation, and Quire's kernels compute attention over KV pages.
Prefix caching, chunked prefill, KV transfer and sampling work as for other models. Quire refuses Qwen3-Next models with
linear attention.

Steps take longer than in Quire's own code, mostly if they are small. On a CPU with one thread, a step of the demo
model took 8 ms instead of 1 ms for one sequence, and 34 ms instead of 23 ms for 64 ([log](../bench/LOG.md)).

On a GPU, the worker replaces parts of the model by Quire's kernels: RMS norms, gated MLPs, linear layers and rotations
of queries and keys. A part is replaced only if the kernel computes the same for random rows. The worker then captures
steps in CUDA graphs, if a replayed graph computes the same as a new pass. If not, it logs the reason, and steps run
kernel by kernel. On an H200, the time between tokens of a model with Qwen3 0.6B's shape was 1.06 ms for one sequence,
1.81 ms for 32 and 2.79 ms for 128. Quire's own code took 0.72, 1.24 and 2.11 ms.

```
pip install 'transformers>=5.23,<5.24'
quire serve org/name
```

The container images of workers have this package. `--model-impl` chooses the implementation:

| value | layers are computed by |
|---|---|
| `auto` | Quire if the table has the architecture, else the Transformers backend |
| `quire` (alias: `vllm`) | Quire. Other architectures are an error |
| `transformers` | the Transformers backend, also for architectures in the table, for example to compare the two |

The worker reads the weights itself, only from safetensors, and runs no code of the model's folder. Weights are float32
on the CPU and bfloat16 on a GPU. `--dtype`, `--quantize` and GGUF files need an entry in the table.

In the Transformers backend, the last bits of logits may depend on the batch. So greedy tokens may depend on the batch
too. The worker does not report the capability `batch_invariant`, and refuses `--batch-invariant`. The two
implementations never share KV pages.

The backend refuses a model that it would compute wrongly. The error says why:

| error | cause |
|---|---|
| `TRANSFORMERS_MISSING` | the package transformers is not installed |
| `UNSUPPORTED_ARCHITECTURE` | transformers has no such causal model, or the model has more parts than a decoder |
| `REMOTE_CODE` | the code of the model is in its folder |
| `UNSUPPORTED_LAYER_TYPE` | recurrent, convolution or linear-attention layers |
| `UNSUPPORTED_CACHE` | the code of the model defines its own cache class |
| `UNSUPPORTED_ATTENTION` | attention that Quire's pages or kernels do not support (see below) |
| `UNSUPPORTED_ROPE` | longrope, with sequences above the original context |
| `UNSUPPORTED_DTYPE`, `UNSUPPORTED_QUANTIZATION` | `--dtype` or `--quantize` |
| `NOT_BATCH_INVARIANT` | `--batch-invariant` |

The message of `UNSUPPORTED_ATTENTION` names one of these causes:

- layers that do not call attention through transformers' `AttentionInterface`, or not once each
- latent attention, and layers with heads of several shapes
- masks other than causal, sliding windows and chunks
- rows that depend on other sequences of the batch
- positions that do not start at 0, as those of RoBERTa

Tests cover the following architectures; others may work too. A test compares a tiny random model of each with
transformers alone, on the CPU in float32. Greedy tokens must be equal, and logits may differ by 0.0001.
"""
_OUTRO = """## GPUs

The GPU's kernels compute the same features as the CPU's. Tests run the kernels on the CPU by Triton's interpreter,
and compile them for Hopper. Only Llama and Qwen3 models have been run on a GPU, SmolLM2 among them, from its GGUF file.
The Transformers backend has been run on a GPU with two of them. The size of a head must be a multiple of 16, and at
most 256. The worker refuses other models, and its error names the size.

## What is refused

Some configs change the computation in a way that the worker does not support. The worker refuses such a model of the
table before it reads the weights. Each error names the field.

| error | cause |
|---|---|
| `UNSUPPORTED_ARCHITECTURE` | no family has this architecture, with `--model-impl quire` |
| `UNSUPPORTED_CONFIG` | a field asks for what the family does not compute, or is about attention and not read |
| `UNSUPPORTED_ROPE` | a rotary embedding other than default, linear, llama3, yarn, longrope |
| `UNSUPPORTED_LAYER_TYPE` | a layer that is neither full nor sliding attention |
| `UNSUPPORTED_ACTIVATION` | an activation that the worker does not know |
| `BAD_CONFIG` | a field is absent or of the wrong kind, or two fields contradict each other |
| `TIED_HEAD_DIFFERS` | the weights have an output head of their own, which the config denies |

Quire does not support latent attention, recurrent layers, vision and audio inputs, OPT 350M (other norms),
StableLM 2 12B (a norm for each head), and MPT models with biases or without ALiBi.

A `config.json` of OLMo 3 may have one rotary embedding for all layers, as transformers 4 wrote it. Releases of
transformers read some of these files in different ways: a `rope_theta` other than 500000, a scaled RoPE in
`rope_parameters`, or a `rope_scaling` without `rope_type`. Quire refuses such a file. The file is clear if
`--hf-overrides` gives `rope_parameters` with `full_attention` and `sliding_attention`, and null for `rope_scaling` and
`rope_theta`.

A RoPE of type `longrope` has two lists of factors, for short and for long sequences. transformers chooses a list by the
present length of the sequence. The worker chooses by `--max-model-len`: it uses the long factors if this option is
above `original_max_position_embeddings`. So a sequence keeps its cached pages as it grows.
"""


def document() -> str:
    """Return the whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield _INTRO
    cases = Counter(causal_class(name) for name in CASES)
    yield "| architecture | models | GGUF | GGUF test | configurations |"
    yield "|---|---|---|---|---|"
    for family in {each.model_type: each for each in FAMILIES.values()}.values():
        names = ", ".join(f"`{each}`" for each in family.architectures)
        gguf = ", ".join(f"`{each.architecture}`" for each in family.gguf)
        tested = sum(cases[each] for each in family.architectures)
        yield f"| {names} | {family.models} | {gguf} | {_gguf_test(family)} | {tested} |"
    yield ""
    yield f"In all: {len(FAMILIES)} architectures and {len(CASES)} configurations."
    yield ""
    yield _MULTIMODAL.format(rows="\n".join(_multimodal_rows()))
    yield _GGUF.format(pre_tokenizers=", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS)))
    yield _TRANSFORMERS_BACKEND
    yield ", ".join(f"`{model}`" for _, model, _ in transformers_models.CASES.values()) + "."
    yield ""
    yield _OUTRO


def _multimodal_rows() -> Iterator[str]:
    for name, each in MULTIMODAL.items():
        types, parts = (", ".join(f"`{one}`" for one in listed) for listed in (each.text_types, each.other_parts))
        yield f"| `{name}` | {types} | {parts} |"


def _gguf_test(family: Family) -> str:
    """Return the way in which the family's map of GGUF files is tested."""
    if not family.gguf:
        return ""
    if any(each.architecture in REAL_MODELS for each in family.gguf):
        return "real model"
    read = {causal_class(name) for name in READ_BY_TRANSFORMERS}
    return "transformers" if read & set(family.architectures) else "converted"


def main() -> None:
    DOCUMENT.write_text(document())


if __name__ == "__main__":
    main()

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

This page lists the model architectures that Quire serves. The architecture of a model is the field `architectures` of
its `config.json`. `python -m tools.models_table` generates this page from the worker's registry of model families.

## Architectures

Quire reads Hugging Face folders with safetensors for each architecture in this table. Quire also reads
[GGUF files](#gguf-files) whose architecture has a name in the column *GGUF*. Quire never runs code from a model's
folder.

A test compares tiny models of each architecture with the Python package transformers, on the CPU in float32. The models
have random weights. The column *configurations* shows the number of tiny models. The test requires:
- Greedy tokens are equal, and logits differ by at most 0.0001.
- Chunked prefill and prefix caching leave the logits the same, bit for bit.
"""
_MULTIMODAL = """## Multimodal models

A model of the architectures in the table below has several parts, for example a vision encoder and a language model.
Quire serves only the language model. The field `text_config` of `config.json` describes the language model. Quire does
not load the weights of the other parts, and refuses requests with images.

| architecture | `model_type` of `text_config` | tensors that are left out |
|---|---|---|
{rows}

- A test compares logits and greedy tokens of tiny random models with those of transformers.
- A field in `--hf-overrides` replaces the field of `text_config` that has the same name.
- Two language models of the table run in the [Transformers backend](#other-architectures): `ministral3`, and
  `llama4_text` if its field `attn_temperature_tuning` is false.
"""
_GGUF = """## GGUF files

Quire refuses a GGUF file in these cases. The error names the cause.
- The file's architecture is not in the table of [architectures](#architectures).
- Quire does not support a metadata key of the file's architecture.
- Quire does not support the value of a key, for example the RoPE type in `llama.rope.scaling.type`.
- Quire does not support the quantization of a tensor.
- Quire does not know the file's pre-tokenizer (key `tokenizer.ggml.pre`). In this case, set `--tokenizer` to a folder
  with the model's tokenizer.

Quire knows these pre-tokenizers of byte-level vocabularies:
{pre_tokenizers}.

GGUF files of Mistral models have the architecture `llama`.

The GGUF files of the models in this table lack a setting:

| models | missing setting | what Quire computes |
|---|---|---|
| Mistral 7B v0.1, StarCoder2 | the sliding window | full attention |
| SmolLM3 | which layers have no rotary embedding | as llama.cpp, no rotary embedding in every fourth layer |
| Gemma 2, Gemma 3 | `query_pre_attn_scalar` (attention scale) | as llama.cpp, with the size of a head as the scale |
| Gemma 2 27B, Gemma 3 27B | `query_pre_attn_scalar` | as llama.cpp, with hidden size / number of heads as the scale |

In GGUF files, tensors have other names than in Hugging Face folders, and some matrices have another row order. So a
test converts a tiny model to a GGUF file, as llama.cpp's converter does. Quire runs the GGUF file, and transformers
runs the original model. The logits and greedy tokens must match. The column *GGUF test* of the table of
[architectures](#architectures) says what else was compared:

| GGUF test | what else was compared |
|---|---|
| converted | Nothing. No other program has confirmed the order of matrix rows |
| transformers | transformers also reads the GGUF file, and the results match Quire's |
| real model | As *transformers*, and the same with a file of llama.cpp's converter (SmolLM2 135M, Gemma 3 270M) |

For InternLM 2, EXAONE 3, MiniCPM and ChatGLM, Quire reads only GGUF files. Each of these four models is in the row of a
similar family in the table of [architectures](#architectures), and runs with this family's code. No other program has
confirmed Quire's results for the four models.
"""
_TRANSFORMERS_BACKEND = """## Other architectures

The *Transformers backend* runs models that Quire's own layers do not support ([architectures](#architectures)), such as
Trinity. The Python package transformers computes the layers, and Quire's kernels compute attention over KV pages.
Prefix caching, chunked prefill, KV transfer and sampling work as for other models.

Quire refuses Qwen3-Next models with linear attention, which neither this backend nor Quire's own code supports.

The backend needs the package transformers. The container images of workers contain the package. Elsewhere, install it:

```
pip install 'transformers>=5.23,<5.24'
quire serve org/name
```

`--model-impl` chooses the implementation:

| value | layers are computed by |
|---|---|
| `auto` | Quire if the table has the architecture, else the Transformers backend |
| `quire` (alias: `vllm`) | Quire. Quire refuses architectures that the table does not have |
| `transformers` | the Transformers backend, also for architectures in the table, for example to compare the two |

These limits hold in the Transformers backend:
- The worker reads weights only from safetensors, and runs no code from the model's folder.
- Weights are float32 on the CPU and bfloat16 on a GPU. `--dtype`, `--quantize` and GGUF files do not work.
- The last bits of a sequence's logits, and so even greedy tokens, may depend on the other sequences in the batch. So
  the worker refuses `--batch-invariant`.
- A worker with this backend and a worker with Quire's own code never share KV pages.

Decode steps take longer in the Transformers backend than in Quire's own code, above all steps with few sequences
([log](../bench/LOG.md)):

| model and device | sequences | Transformers backend, ms | Quire's own code, ms |
|---|---|---|---|
| demo model, CPU with one thread | 1 | 8 | 1 |
| demo model, CPU with one thread | 64 | 34 | 23 |
| model with Qwen3 0.6B's shape, H200 | 1 | 1.06 | 0.72 |
| model with Qwen3 0.6B's shape, H200 | 32 | 1.81 | 1.24 |
| model with Qwen3 0.6B's shape, H200 | 128 | 2.79 | 2.11 |

The Transformers backend refuses a model or an option with one of these errors:

| error | cause |
|---|---|
| `TRANSFORMERS_MISSING` | the package transformers is not installed |
| `UNSUPPORTED_ARCHITECTURE` | transformers has no such causal model, or the model has more parts than a decoder |
| `REMOTE_CODE` | the code of the model is in the model's folder, and Quire runs no such code |
| `UNSUPPORTED_LAYER_TYPE` | the model has recurrent, convolution or linear-attention layers |
| `UNSUPPORTED_CACHE` | the code of the model defines its own cache class |
| `UNSUPPORTED_ATTENTION` | Quire's pages or kernels do not support the model's attention (see below) |
| `UNSUPPORTED_ROPE` | the model's rotary embedding is longrope, and `--max-model-len` is above the original context |
| `UNSUPPORTED_DTYPE`, `UNSUPPORTED_QUANTIZATION` | the backend does not support the option `--dtype` or `--quantize` |
| `NOT_BATCH_INVARIANT` | the backend does not support the option `--batch-invariant` |

The message of `UNSUPPORTED_ATTENTION` names the cause, for example:
- A layer calls transformers' `AttentionInterface` several times or never.
- The model has latent attention, or its layers have heads of different sizes.
- The model has attention masks other than causal masks, sliding windows and chunks.
- A layer mixes the sequences of a batch, for example because it shifts all tokens of the batch by one place.
- The model's first position is not 0, as in RoBERTa models.

A test runs tiny models with random weights in the Transformers backend, on the CPU in float32. The test compares the
results with those of the Python package transformers. Greedy tokens must be equal, and logits may differ by at most
0.0001. Architectures outside this test may work too. The test covers:"""
_OUTRO = """## GPUs

A GPU worker runs the same architectures as a CPU worker, with one exception. The size of an attention head must be a
multiple of 16, and at most 256. For any other size, the worker refuses the model with an error that names the size.

Tests run the GPU kernels on the CPU with Triton's interpreter, and compile the kernels for Hopper GPUs. On a real GPU,
we have run only these models:
- Llama and Qwen3 models
- SmolLM2 (a Llama model) and Gemma 3 270M, from GGUF files
- one Llama model and one Qwen3 model, in the Transformers backend

## What is refused

The worker checks `config.json` before it reads the weights. The worker refuses a model if a field asks for a
computation that the worker does not support. Each error names the field.

| error | cause |
|---|---|
| `UNSUPPORTED_ARCHITECTURE` | with `--model-impl quire`, no model family of Quire has this architecture |
| `UNSUPPORTED_CONFIG` | a field asks for a computation that the family lacks, or an attention field is unknown |
| `UNSUPPORTED_ROPE` | a rotary embedding other than default, linear, llama3, yarn, longrope |
| `UNSUPPORTED_LAYER_TYPE` | a layer that is neither full nor sliding attention |
| `UNSUPPORTED_ACTIVATION` | an activation that the worker does not know |
| `BAD_CONFIG` | a field is absent or of the wrong kind, or two fields contradict each other |
| `TIED_HEAD_DIFFERS` | the config ties the output head to the embedding, but the weights have a separate output head |

Quire does not support latent attention, recurrent layers, vision inputs or audio inputs. Nor does Quire support these
models:
- OPT 350M, which has its norms after the blocks
- StableLM 2 12B, which has a norm for each attention head
- MPT models with biases or without ALiBi

**Old files of OLMo 3.** In an old `config.json`, layers with full attention and layers with a sliding window share one
rotary embedding (RoPE). Quire refuses such a file in the following cases, because releases of transformers disagree
with each other about its meaning:
- `rope_theta` is not 500000.
- `rope_parameters` has a scaled RoPE.
- `rope_scaling` is there, but has no `rope_type`.

If Quire refuses an old `config.json` of OLMo 3, override its fields with `--hf-overrides`. `rope_parameters` must have
the RoPE of layers with full attention under `full_attention`, and the RoPE of layers with a sliding window under
`sliding_attention`. Set `rope_scaling` and `rope_theta` to null.

**longrope.** A rotary embedding of type `longrope` has factors for short and for long sequences. transformers chooses
the factors by the present length of a sequence. The worker uses the same factors for all sequences, so that cached
pages stay valid. If `--max-model-len` is above `original_max_position_embeddings`, the worker uses the factors for long
sequences. Otherwise, it uses the factors for short sequences.
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

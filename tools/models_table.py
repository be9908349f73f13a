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

Quire reads Hugging Face folders with safetensors for each architecture in this table. It never runs code from a
model's folder. If Quire also reads GGUF files of an architecture, the column *GGUF* has the architecture's name in
these files. The section [GGUF files](#gguf-files) explains the column *GGUF test*.

A test runs tiny random models of each architecture with Quire and with the Python package transformers, on the CPU in
float32. The greedy tokens of both must be equal, and their logits may differ by 0.0001. The test also runs prompts in
chunks, and prompts with a cached prefix. The logits must be bit for bit the same as for whole prompts. The column
*configurations* has the number of tiny models.
"""
_MULTIMODAL = """## Multimodal models

Quire serves only the language model of these multimodal architectures. The field `text_config` of `config.json`
describes this language model. Quire does not load the weights of the other parts, and refuses requests with images.

| architecture | `model_type` of `text_config` | tensors that are left out |
|---|---|---|
{rows}

A test runs tiny random models of each multimodal architecture. It compares the logits and greedy tokens with those of
the architecture's class in transformers. Some architectures have several kinds of checkpoints, with different names of
tensors. The test includes each kind.

Fields in `--hf-overrides` replace the same fields of `text_config`.

Some language models have no entry in the table of [architectures](#architectures). They run in the [Transformers
backend](#other-architectures). Examples are `ministral3`, and `llama4_text` without `attn_temperature_tuning`.
"""
_GGUF = """## GGUF files

GGUF files and Hugging Face folders have different names for the same tensors. Some matrices also have their rows in a
different order. Each model family has a map that describes these differences. The column *GGUF test* of the table of
architectures names the test of this map:

| GGUF test | comparison |
|---|---|
| converted | The test converts a tiny model of transformers. Quire's results from the file must match this model |
| transformers | As *converted*. In addition, transformers reads the file, and its results must match |
| real model | As *transformers*, and the same with a file that llama.cpp wrote (SmolLM2 135M, Gemma 3 270M) |

All tests in this table compare logits and greedy tokens of Quire with those of transformers. To make GGUF files, the
tests convert models in the same way as llama.cpp's converter. The tests take the names of tensors and keys from the
Python package `gguf`. The order of matrix rows is written down in the tests, and follows llama.cpp's scripts. In the
test *converted*, only Quire reads the GGUF file. So if an architecture has only this test, no other program has
confirmed the order of its matrix rows.

Quire refuses a GGUF file in these cases. The error names the cause:
- The file's architecture is not in the table of [architectures](#architectures).
- The file has a metadata key of its architecture that Quire does not read.
- Quire does not know the file's pre-tokenizer. In this case, set `--tokenizer` to a folder that contains the model's
  tokenizer.

Quire knows these pre-tokenizers of byte-level vocabularies (key `tokenizer.ggml.pre`):

{pre_tokenizers}.

The package transformers does not have InternLM 2, EXAONE 3, MiniCPM and ChatGLM. Quire reads these models only from
GGUF files. Quire computes each of them with the code of a similar model family. For example, Quire computes InternLM 2
with the code for Llama. The table of architectures lists each model in the row of its similar family. To test
InternLM 2, a test converts a tiny Llama model to a GGUF file of InternLM 2. The other three models are tested in the
same way. No other program has confirmed the results.

llama.cpp's converter changes some models:
- GGUF files of Mistral have the architecture `llama`. GGUF files of Mistral 7B v0.1 and of StarCoder2 do not contain
  the model's sliding window, so Quire computes full attention.
- GGUF files of SmolLM3 do not tell which layers have no rotary embedding. As llama.cpp does, Quire leaves out the
  rotary embedding in every fourth layer.
- GGUF files of Gemma 2 and 3 have no attention scale (`query_pre_attn_scalar`). As llama.cpp does, Quire uses the size
  of a head instead. For the 27B models it uses the hidden size divided by the number of heads.
"""
_TRANSFORMERS_BACKEND = """## Other architectures

Models without an entry in the table of [architectures](#architectures) run in the *Transformers backend*, and so do
AFMoE models with experts. In this backend, the Python package transformers computes the layers, and Quire's kernels
compute attention over KV pages. Prefix caching, chunked prefill, KV transfer and sampling work as for other models.
Quire refuses Qwen3-Next models with linear attention.

Steps take longer in the Transformers backend than in Quire's own code. Steps with few sequences slow down most. On a
CPU with one thread, a step of the demo model with one sequence took 8 ms instead of 1 ms. A step with 64 sequences took
34 ms instead of 23 ms ([log](../bench/LOG.md)).

On a GPU, the worker makes the Transformers backend faster in two ways:
- The worker replaces parts of the model by Quire's kernels: RMS norms, gated MLPs, linear layers, and rotations of
  queries and keys. It replaces a part only if the kernel and the part compute the same results from random input.
- The worker captures steps in CUDA graphs, if a replayed graph computes the same as a new pass. Otherwise it logs the
  reason, and runs steps kernel by kernel.

On an H200, the times between tokens of a model with Qwen3 0.6B's shape were:

| sequences | Transformers backend, ms | Quire's own code, ms |
|---|---|---|
| 1 | 1.06 | 0.72 |
| 32 | 1.81 | 1.24 |
| 128 | 2.79 | 2.11 |

The backend needs the package transformers, which the container images of workers contain:

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

For the Transformers backend, the worker reads weights only from safetensors, and runs no code from the model's folder.
Weights are float32 on the CPU and bfloat16 on a GPU. `--dtype`, `--quantize` and GGUF files work only with
architectures in the table.

In the Transformers backend, the last bits of logits may depend on the batch. So greedy tokens may depend on the batch
too. The worker does not report the capability `batch_invariant`, and refuses `--batch-invariant`. The backend and
Quire's own code never share KV pages.

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
| `UNSUPPORTED_DTYPE`, `UNSUPPORTED_QUANTIZATION` | the option `--dtype` or `--quantize` |
| `NOT_BATCH_INVARIANT` | the option `--batch-invariant` |

The message of `UNSUPPORTED_ATTENTION` names one of these causes:

- layers that do not call transformers' `AttentionInterface` exactly once
- latent attention, and layers with heads of several shapes
- masks other than causal, sliding windows and chunks
- results of a sequence that depend on other sequences of the batch
- positions that do not start at 0, as those of RoBERTa

Tests cover the following architectures in the Transformers backend. Other architectures may work too. A test runs a
tiny random model of each architecture twice, on the CPU in float32: in this backend, and in transformers without
Quire. Greedy tokens must be equal, and logits may differ by 0.0001.
"""
_OUTRO = """## GPUs

Quire's kernels for GPUs run the same architectures as its kernels for CPUs, with one exception: the size of an
attention head must be a multiple of 16, and at most 256. On a GPU, the worker refuses other models, and its error
names the size.

Tests run the GPU kernels on the CPU with Triton's interpreter, and compile them for Hopper. On a real GPU, we have run
only Llama and Qwen3 models, and two models from their GGUF files: SmolLM2 (a Llama model) and Gemma 3 270M. In the
Transformers backend, we have run one Llama model and one Qwen3 model on a GPU.

## What is refused

The worker may refuse a model although the table of [architectures](#architectures) lists the model's architecture. This
happens if the model's `config.json` asks for a computation that the worker does not support. The worker refuses the
model before it reads the weights. Each error names the field of `config.json`.

| error | cause |
|---|---|
| `UNSUPPORTED_ARCHITECTURE` | no family has this architecture, with `--model-impl quire` |
| `UNSUPPORTED_CONFIG` | a field asks for a computation that the family lacks, or an attention field is unknown |
| `UNSUPPORTED_ROPE` | a rotary embedding other than default, linear, llama3, yarn, longrope |
| `UNSUPPORTED_LAYER_TYPE` | a layer that is neither full nor sliding attention |
| `UNSUPPORTED_ACTIVATION` | an activation that the worker does not know |
| `BAD_CONFIG` | a field is absent or of the wrong kind, or two fields contradict each other |
| `TIED_HEAD_DIFFERS` | the config ties the output head to the embedding, but the weights have a separate output head |

Quire does not support latent attention, recurrent layers, vision inputs or audio inputs. It also does not support these
models:
- OPT 350M, which has its norms after the blocks
- StableLM 2 12B, which has a norm for each attention head
- MPT models with biases or without ALiBi

An old `config.json` of OLMo 3, for example from transformers 4, may have one rotary embedding (RoPE) for all layers
instead of one for each type of layer. The releases of transformers do not agree on what some of these files mean. Quire
refuses those files:

- files with a `rope_theta` other than 500000
- files with a scaled RoPE in `rope_parameters`
- files with a `rope_scaling` without `rope_type`

For such a file, name both RoPEs with `--hf-overrides`: set `rope_parameters` with `full_attention` and
`sliding_attention`, and set `rope_scaling` and `rope_theta` to null.

A RoPE of type `longrope` has two lists of factors: one for short sequences and one for long sequences. transformers
chooses the list by the present length of the sequence. The worker chooses the list once, by `--max-model-len`. If this
option is above `original_max_position_embeddings`, the worker uses the factors for long sequences. So the cached pages
of a sequence remain valid as the sequence grows.
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

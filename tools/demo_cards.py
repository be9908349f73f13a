"""The texts of the demo models' cards, with the figures that a training run measured."""

from __future__ import annotations

import argparse

import numpy as np
from demo_net import Llama
from demo_tokenizer import VOCAB_SIZE
from demo_training import Agreement


def figure_table(figures: dict[str, float]) -> str:
    """Return Markdown rows. A figure has a perplexity only if it is a loss per token."""
    lines = ["| measured on | loss (nats per token) | perplexity |", "| --- | --- | --- |"]
    for name, value in figures.items():
        if name != "bits per byte":
            lines.append(f"| {name} | {value:.4f} | {np.exp(value):.1f} |")
    return "\n".join(lines) + f"\n\nBits per byte on the test text: {figures['bits per byte']:.3f}."


def model_card(
    net: Llama,
    figures: dict[str, float],
    looks: dict[str, float],
    shown: list[tuple[str, str, str]],
    size: int,
    args: argparse.Namespace,
) -> str:
    """Return the card of the model itself."""
    shape = net.shape
    told = "\n\n".join(f"**{kind}**, `{prompt!r}`\n\n```text\n{answer}\n```" for kind, prompt, answer in shown)
    teachers = (
        f"{args.teachers} teachers of the same shape (dropout {args.teacher_dropout}, at most "
        f"{args.teacher_steps} steps), then the model from the text and the teachers' averaged distribution (share "
        f"{args.soft})"
        if args.teachers
        else "one model from the text alone"
    )
    return f"""
# Quire demo model

A Llama of {shape.parameters:,} weights ({size:,} bytes of bf16 safetensors) that writes in the manner of Shakespeare's
plays. It is there so that a fresh machine answers with no download, and so that tests have a model with real structure.
It knows nothing but the plays: it is no assistant, and what it says is true only by accident.

- {shape.layers} layers of hidden size {shape.hidden_size}; SwiGLU of {shape.intermediate_size}
- {shape.heads} query and {shape.kv_heads} key-value heads of {shape.head_dim}; RoPE (theta {shape.rope_theta:g})
- context of {shape.max_positions}; tied embeddings
- Byte-level BPE of {VOCAB_SIZE} entries: any text round-trips. ids 0-31 are special (chat, tool and reasoning marks,
  reserved ones). The chat format is ChatML, in `chat_template.jinja`. Tool and reasoning marks are only reserved: the
  weights have never seen them used.

## Held-out figures

The corpus is cut by size: 90 % to train on (tokenizer included), the next 5 % (validation) chose the checkpoint,
together with conversations made from it (chat), the last 5 % (test) was only measured. It is harder: half of it
is The Tempest, of which the training text has nothing. Windows of 1024 tokens. The rows by position compare the same
held-out tokens, read with less or more before them.

{figure_table(figures)}

After held-out prompts, {looks["existing words at 0.8"]:.1%} of the words that it writes at temperature 0.8 are words of
the corpus. Of the runs of eight tokens in 200 greedy ones, {looks["greedy runs of 8 that are new"]:.0%} do not repeat
an earlier run: greedy text goes round in circles, from some prompts at once. Sample from it.

## How it was made

`tools/train_demo_model.py`, seed {args.seed}, on one GPU: {teachers}. Rows of {args.lengths} tokens in shares
{args.length_shares}, {args.step_tokens} tokens a step, AdamW at {args.learning_rate:g}, BPE dropout {args.bpe_dropout},
averaged weights, of the last evaluation within {args.tolerance:g} nats of the best. About half of the rows are
conversations: dialogue of the plays with its speeches taken in turn by user and assistant, and requests (a topic, a
speaker, a scene) answered with a fitting speech. A seed repeats a run up to the order in which a GPU adds.

## Data and licence

The text is the "tiny Shakespeare" selection of the plays, which are in the public domain; the prompts and a few lines
of small talk were written for the tool. No other model or data set had a part. Weights and tokenizer: Apache-2.0.

## Samples

Not selected: the first that the tool drew.

{told}
"""


def draft_card(
    net: Llama, figures: dict[str, float], size: int, found: dict[str, Agreement], args: argparse.Namespace
) -> str:
    """Return the card of the draft model. Its main figure is how often the draft predicts the model's token."""
    rows = "\n".join(f"| {name} | {value.rate:.1%} | {value.accepted_of_4:.2f} |" for name, value in found.items())
    return f"""
# Quire demo draft

A Llama of {net.shape.parameters:,} weights ({size:,} bytes, {net.shape.layers} layers, hidden size
{net.shape.hidden_size}) with the tokenizer and chat template of `models/demo`, to draft for it in speculative
decoding. It was distilled from that model alone (its whole distribution, over the training text and text that the model
wrote), by the same run of `tools/train_demo_model.py` (seed {args.seed}).

Measured on text that the model wrote after held-out prompts (by the same texts the draft's checkpoint was chosen):

| text | same greedy choice | accepted of 4 drafted tokens |
| --- | --- | --- |
{rows}

As a language model by itself:

{figure_table(figures)}

Data and licence: as `models/demo` (public-domain text, Apache-2.0).
"""

"""Runs a loaded model as parity tests want it: logits of a prompt in steps that begin where the test says, and greedy
answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire_worker.loading import LoadedModel
from tests.model.batches import PAGE_SIZE, Run, make_batch, pages_for

# More than a tile of keys, than any window of the tiny models, and than the original context of their scaled RoPE.
LENGTH = 90
SHARED = 3 * PAGE_SIZE
ANSWER = 6
CUTS = (0, 1, 20, 67)
"""The positions at which the steps of a prompt in chunks begin."""


def prompt(length: int = LENGTH) -> list[int]:
    """Tokens of the tiny models' vocabulary, without the special ones."""
    return [int(token) for token in np.random.default_rng(1).integers(3, 131, length)]


def logits(model: LoadedModel, tokens: list[int], pages: list[int], *cuts: int) -> Tensor:
    """Logits of the tokens from the first cut on, in steps that begin at the cuts."""
    found = [
        model.runner.all_logits(make_batch([Run(tokens[begin:end], begin, pages)])).clone()
        for begin, end in zip(cuts, (*cuts[1:], len(tokens)), strict=True)
    ]
    return torch.cat(found)


def logits_of_rows(model: LoadedModel, tokens: list[int], pages: list[int], rows: Sequence[int]) -> Tensor:
    """Logits of these rows of a prompt, in one step whose last layer may leave the other rows out."""
    runner = model.runner
    ops, size = runner.decoder.ops, len(tokens)
    padded, outputs = (-(-count // ops.row_multiple) * ops.row_multiple for count in (size, len(rows)))
    token = torch.tensor(tokens + [0] * (padded - size))
    output_rows = torch.tensor([*rows, *[rows[0]] * (outputs - len(rows))])
    first, count, table = (np.array(each, np.int32) for each in ([0], [size], [pages]))
    with torch.inference_mode():
        plan = ops.plan(runner.pool.tensor, padded, first, count, table)
        hidden = runner.decoder.forward(token, runner.pool.tensor, plan, output_rows=output_rows)
        return runner.decoder.logits(hidden)[: len(rows)]


def cached_pages(pages: Sequence[int], first: int) -> list[int]:
    """The page table of a sequence that shares the first SHARED tokens with another; its own pages begin at `first`."""
    return [*pages[: SHARED // PAGE_SIZE], *pages_for(LENGTH, first)]


def greedy(model: LoadedModel, tokens: list[int], pages: list[int], first: int, length: int = ANSWER) -> list[int]:
    """The greedy answer to a prompt whose keys and values are in the pages; `first`: its first token."""
    answer = [first]
    while len(answer) < length:
        text = [*tokens, *answer]
        output = model.runner.run(make_batch([Run(text[-1:], len(text) - 1, pages)]))
        answer.append(int(output.token[0]))
    return answer

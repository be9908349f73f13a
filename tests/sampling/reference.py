"""The distribution of the next token, by definition: logits of transformers and everything after them in float64.

Shares no code with the worker. Also Pearson's chi-square test of counts against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tests.oracle import quiet_transformers

LEAST_EXPECTED = 5.0
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Asked:
    """What a request asks of sampling, by vLLM's names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()


class ReferenceModel:
    """A folder's model in float64."""

    def __init__(self, folder: Path) -> None:
        with quiet_transformers():
            self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def logits(self, tokens: Sequence[int]) -> Float64:
        """Of every position [tokens, vocabulary]."""
        with torch.inference_mode(), quiet_transformers():
            found: Float64 = self._model(torch.tensor([list(tokens)])).logits[0].numpy()
        return found

    def logprobs(self, tokens: Sequence[int]) -> Float64:
        """Raw ones, of every position."""
        logits = self.logits(tokens)
        top = logits.max(axis=1, keepdims=True)
        found: Float64 = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        return found


def distribution(logits: Float64, asked: Asked, prompt: Sequence[int], output: Sequence[int]) -> Float64:
    """Probabilities of the next token, in vLLM's order: controls, temperature, min_p, top_k, top_p,
    then typical_p."""
    x = logits.astype(np.float64).copy()
    if asked.allowed_token_ids:
        allowed = np.zeros(len(x), bool)
        allowed[list(asked.allowed_token_ids)] = True
        x[~allowed] = -np.inf
    for token, bias in asked.logit_bias.items():
        x[token] += bias
    seen = np.unique([*prompt, *output]).astype(int)
    x[seen] = np.where(x[seen] > 0, x[seen] / asked.repetition_penalty, x[seen] * asked.repetition_penalty)
    counts = np.bincount(np.array(output, int), minlength=len(x))
    x -= asked.frequency_penalty * counts + asked.presence_penalty * (counts > 0)
    x /= asked.temperature
    weights = np.exp(x - x.max())
    weights[weights < asked.min_p] = 0
    if asked.top_k > 0:
        weights[weights < np.sort(weights)[-asked.top_k]] = 0
    if asked.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= asked.top_p * weights.sum()]] = 0
    found: Float64 = weights / weights.sum()
    if asked.typical_p < 1:
        found = _typical(found, asked.typical_p)
    return found


def _typical(p: Float64, typical_p: float) -> Float64:
    """Locally typical sampling, by its definition."""
    surprise = -np.log(np.where(p > 0, p, 1.0))
    shifted = np.where(p > 0, np.abs(surprise - (p * surprise).sum()), np.inf)
    order = np.argsort(shifted, kind="stable")
    last = int((np.cumsum(p[order]) < typical_p).sum())
    kept = np.where(shifted <= shifted[order[min(last, len(p) - 1)]], p, 0.0)
    found: Float64 = kept / kept.sum()
    return found


def p_value(counts: NDArray[np.int64], expected: Float64) -> float:
    """Pearson's test; tokens that are expected too seldom are one bin. `expected` are probabilities."""
    total = int(counts.sum())
    often = expected * total >= LEAST_EXPECTED
    observed = np.append(counts[often], counts[~often].sum()).astype(float)
    wanted = np.append(expected[often] * total, expected[~often].sum() * total)
    if wanted[-1] < LEAST_EXPECTED:
        observed[-2] += observed[-1]
        wanted[-2] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) < 2:
        return 1.0
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))

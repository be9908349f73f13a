"""typical_p against transformers: after the same temperature, top_k and top_p the same tokens are left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from quire_worker.sampling.sampler import sample
from tests.model.sampling.sampling_columns import columns

VOCAB, DRAWS = 40, 3000


@pytest.mark.parametrize("typical_p", [0.2, 0.6, 0.95])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 12, 1.0), (1.4, 20, 0.9)])
def test_the_tokens_that_are_left_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, typical_p: float
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 2.0
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(TypicalLogitsWarper(typical_p))
    nothing: Any = torch.zeros(1, 1, dtype=torch.long)
    left = torch.softmax(warpers(nothing, logits.double()), dim=-1)[0].numpy()
    asked = columns(
        DRAWS, temperature=temperature, top_k=top_k, top_p=top_p, typical_p=typical_p, seed=np.arange(DRAWS)
    )
    counts = np.bincount(sample(logits.expand(DRAWS, -1), asked), minlength=VOCAB)
    assert not counts[left == 0].any()
    assert counts[left > 0.005].all()

"""The one oracle of parity tests: transformers, in float32, with a full forward pass for every judgement.

It says what the logits are, what greedy decoding gives, and whether a divergence is a true tie: one where the oracle's
own two best logits differ by less than TIE_GAP, so that float32 rounding may choose either.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TIE_GAP = 1e-4


@dataclass(frozen=True)
class Divergence:
    """Where a greedy stream leaves the oracle's."""

    index: int
    """Of the output token."""
    got: int
    wanted: int
    gap: float
    """Between the oracle's two best logits at that position."""

    @property
    def is_true_tie(self) -> bool:
        return self.gap < TIE_GAP


class Oracle:
    """transformers' model of a folder, or of a GGUF file. `model_class`: the class of transformers."""

    def __init__(self, path: Path, attention: str = "eager", model_class: str = "AutoModelForCausalLM") -> None:
        with quiet_transformers():
            import transformers

            folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
            model = getattr(transformers, model_class).from_pretrained(
                folder, dtype=torch.float32, attn_implementation=attention, **file
            )
        self._model = model  # from_pretrained leaves it in evaluation mode

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocabulary] float32."""
        with quiet_transformers():
            found: Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found

    def first_divergence(self, prompt: Sequence[int], output: Sequence[int]) -> Divergence | None:
        """Of a greedy output; one pass judges all of it, since up to there the oracle would have drawn the same."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        wanted = logits.argmax(dim=-1).tolist()
        for index, (got, best) in enumerate(zip(output, wanted, strict=True)):
            if got != best:
                first, second = logits[index].topk(2).values.tolist()
                return Divergence(index, got, best, first - second)
        return None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers warns of its own deprecations; they are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

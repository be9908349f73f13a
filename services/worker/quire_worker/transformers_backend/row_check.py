"""`check_rows` tests, at each start, that a loaded model mixes the rows of a step in attention alone, and that it uses
the positions that the step gives.

A step holds rows of many sequences. A model would mix them if it shifts tokens, keeps a state, or scales rotary
embeddings by the longest row of a pass. So the check computes a few rows together and one by one, with an attention in
which each row sees itself alone. The results must agree.

The positions of a step start at 0. Models like RoBERTa start at another position, which they choose if they get no
positions. So a pass with positions and a pass without them must agree too.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from quire_worker.model.arch_spec import TransformersSpec
from quire_worker.transformers_backend.attention import AttentionCall, use_attention
from quire_worker.transformers_backend.find_model import failures_as_unsupported, unsupported_model

_TOKENS: Final = 5
# The weight of queries and keys in the result of IsolatedRows.
_QUERY_KEY_SHARE: Final = 0.1
# Two passes of the same shape sum in the same order, so that they must agree to within this part of the tolerance.
_SAME_SHAPE_FACTOR: Final = 0.3


class Layers(Protocol):
    """Computes hidden rows, as a SplitModel does."""

    def hidden(self, token: Tensor, position: Tensor | None) -> Tensor:
        """token, position [R] int64 -> hidden [R, H]. Without positions, the rows are one sequence from its start."""
        ...


def check_rows(spec: TransformersSpec, model: Layers, device: torch.device) -> None:
    """Compute five rows together and one by one, and some with and without positions. Raises Unsupported if a row's
    result depends on the other rows of the pass, if the model's first position is not 0, or if its code fails."""
    token = torch.arange(1, 1 + _TOKENS, device=device) % spec.vocab_size
    last = spec.max_positions - 1
    position = torch.tensor([0, last // 2, 1 % (last + 1), last, last // 3], device=device)
    start = torch.arange(min(_TOKENS, spec.max_positions), device=device)
    with (
        torch.inference_mode(),
        use_attention(IsolatedRows()),
        failures_as_unsupported("UNSUPPORTED_ATTENTION", spec.architecture),
    ):
        together = model.hidden(token, position)
        alone = torch.cat([model.hidden(token[row : row + 1], position[row : row + 1]) for row in range(_TOKENS)])
        given, counted = (model.hidden(token[: len(start)], each) for each in (start, None))
    if not relative_difference(together, alone) <= tolerance(alone):  # NaN is no agreement either
        raise unsupported_model(
            "UNSUPPORTED_ATTENTION",
            spec.architecture,
            "a row of a step depends on rows of other sequences (a shift of tokens, a state, positions that are "
            "counted by row, or a rotary embedding that depends on the longest sequence)",
        )
    if not relative_difference(given, counted) <= _SAME_SHAPE_FACTOR * tolerance(counted):
        raise unsupported_model(
            "UNSUPPORTED_ATTENTION",
            spec.architecture,
            "its first position is not 0 (models of the RoBERTa kind begin behind `pad_token_id`)",
        )


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number in `wanted`."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def tolerance(hidden: Tensor) -> float:
    """Return the relative difference that another order of summation may cause. bfloat16 also rounds elsewhere."""
    return 1e-3 if hidden.dtype == torch.float32 else 0.1


class IsolatedRows:
    """An attention in which each row sees itself alone. Queries and keys take part, so that rotations have an
    effect."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [1, R, Q, D]: the value of each head, plus a small share of its query and key."""
        each = call.query.shape[1] // call.key.shape[1]
        key, value = (part.repeat_interleave(each, dim=1) for part in (call.key, call.value))
        mixed = value + _QUERY_KEY_SHARE * (call.query + key)
        # Contiguous, as from the attention of transformers, since models call `view` on it.
        return mixed.transpose(1, 2).to(call.query.dtype).contiguous()

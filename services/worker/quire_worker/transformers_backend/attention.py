"""Registers Quire's attention in transformers' AttentionInterface.

transformers calls a registered function with queries, keys and values. The function does not know the step. So
`running` sets the step's attention in a context variable for one forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

from torch import Tensor, nn

STEP_ATTENTION: Final = "quire"
"""Name of the attention of serving steps. transformers makes no masks for it."""
PROBE_ATTENTION: Final = "quire_probe"
"""Name of the attention of the probe. Instead of a mask, a layer gets its MaskRule."""
# Arguments that do not change attention scores. The mask rule has the window.
_IGNORED_ARGUMENTS: Final = frozenset(
    (
        "cache_position", "dropout", "logits_to_keep", "output_attentions", "output_hidden_states",
        "output_router_logits", "position_ids", "return_dict", "sliding_window", "use_cache",
    )
)  # fmt: skip  # a list of names


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The positions up to its own that a row sees. `unknown` names a rule that Quire's kernels do not have."""

    window: int = 0
    chunk: int = 0
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call: query [1, Q, R, D], key and value [1, K, R, D], of the rows of a pass."""

    module: nn.Module
    """The layer's attention."""
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float
    sinks: Tensor | None
    """[Q] scores that take part in the softmax and have no value."""
    mask: object
    is_causal: bool
    unknown: tuple[str, ...]
    """Further arguments, which may change scores."""

    @property
    def layer(self) -> int:
        """The module's own index; -1: it has none."""
        return int(getattr(self.module, "layer_idx", -1))


class RowAttention(Protocol):
    """Computes attention for the rows of a pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [1, R, Q, D]."""
        ...


_current_attention: ContextVar[RowAttention | None] = ContextVar("quire_row_attention", default=None)


@contextlib.contextmanager
def use_attention(attention: RowAttention) -> Iterator[None]:
    """Inside, on this thread, models that have Quire's attention attend by `attention`."""
    token = _current_attention.set(attention)
    try:
        yield
    finally:
        _current_attention.reset(token)


@cache
def register_attention() -> None:
    """Make the names STEP and PROBE known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(STEP_ATTENTION, _attend)
    AttentionInterface.register(PROBE_ATTENTION, _attend)
    AttentionMaskInterface.register(PROBE_ATTENTION, _mask_rule)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **further: object,
) -> tuple[Tensor, None]:
    """The function that models call, as transformers defines it."""
    attention = _current_attention.get()
    if attention is None:
        raise RuntimeError("a model with Quire's attention runs outside of `running`")
    call = AttentionCall(
        module,
        query,
        key,
        value,
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        softcap or 0.0,
        s_aux,
        attention_mask,
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
        tuple(name for name, given in further.items() if given is not None and name not in _IGNORED_ARGUMENTS),
    )
    return attention.attend(call), None


def _mask_rule(*_: object, mask_function: Callable[..., object], local_size: int = 0, **__: object) -> MaskRule:
    """The function that models call for a mask, as transformers defines it. Returns the rule in place of the mask."""
    parts = set(_mask_parts(mask_function))
    if parts == {"causal_mask_function"}:
        return MaskRule()
    if parts == {"causal_mask_function", "sliding_window_overlay"}:
        return MaskRule(window=local_size)
    if parts == {"causal_mask_function", "chunked_overlay"}:
        return MaskRule(chunk=local_size)
    return MaskRule(unknown=", ".join(sorted(parts)))


def _mask_parts(mask_function: Callable[..., object]) -> Iterator[str]:
    """Names of the functions of transformers' masking_utils that a mask is the intersection of. Any other combination
    yields its own name too."""
    name = mask_function.__qualname__.partition(".")[0]
    inner = [cell.cell_contents for cell in mask_function.__closure__ or ()] if name.endswith("_masks") else []
    functions = [each for found in inner if isinstance(found, tuple) for each in found]
    if name != "and_masks":
        yield name
    for each in functions:
        yield from _mask_parts(each)

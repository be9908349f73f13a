"""`register_attention` registers Quire's attention in transformers' AttentionInterface, for all models of the
Transformers backend.

transformers calls a registered function with queries, keys and values. The function does not get the step. So
`use_attention` puts the step's attention into a context variable for one forward pass.
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
"""The name of the attention that serves requests. transformers makes no masks for it."""
PROBE_ATTENTION: Final = "quire_probe"
"""The name of the probe's attention. transformers gives each layer its MaskRule instead of a mask."""
# Arguments that do not change attention scores. The window is in the mask rule.
_IGNORED_ARGUMENTS: Final = frozenset(
    (
        "cache_position", "dropout", "logits_to_keep", "output_attentions", "output_hidden_states",
        "output_router_logits", "position_ids", "return_dict", "sliding_window", "use_cache",
    )
)  # fmt: skip  # a list of names


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The earlier positions to which a row attends: all of them, a sliding window or a chunk. 0: no such limit."""

    window: int = 0
    chunk: int = 0
    unknown: str = ""
    """The name of a rule that Quire's kernels do not have."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments with which one layer calls attention: query [1, Q, R, D], key and value [1, K, R, D], where R is
    the number of rows of the forward pass."""

    module: nn.Module
    """The attention module of the layer."""
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float
    sinks: Tensor | None
    """[Q] attention sinks: scores that take part in the softmax and have no value."""
    mask: object
    is_causal: bool
    unknown: tuple[str, ...]
    """The names of further arguments, which may change attention scores."""

    @property
    def layer(self) -> int:
        """The index of the layer; -1: the module does not say."""
        return int(getattr(self.module, "layer_idx", -1))


class RowAttention(Protocol):
    """Computes attention for the rows of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [1, R, Q, D]."""
        ...


_current_attention: ContextVar[RowAttention | None] = ContextVar("quire_row_attention", default=None)


@contextlib.contextmanager
def use_attention(attention: RowAttention) -> Iterator[None]:
    """In this context, on this thread, models with Quire's attention call `attention`."""
    token = _current_attention.set(attention)
    try:
        yield
    finally:
        _current_attention.reset(token)


@cache
def register_attention() -> None:
    """Register STEP_ATTENTION and PROBE_ATTENTION in transformers, and for the probe the function that returns mask
    rules. Later calls do nothing."""
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
    """Collect the arguments of one layer's attention into an AttentionCall, and return what the context's attention
    makes of it, with None for weights. Models call this function; transformers defines its signature.

    Raises RuntimeError outside of `use_attention`.
    """
    attention = _current_attention.get()
    if attention is None:
        raise RuntimeError("a model with Quire's attention runs outside of `use_attention`")
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
    """Return the rule of a mask: causal, sliding window or chunks of `local_size`. Any other combination becomes
    `unknown`, with its functions' names. Models call this function for a mask; transformers defines its signature."""
    parts = set(_mask_parts(mask_function))
    if parts == {"causal_mask_function"}:
        return MaskRule()
    if parts == {"causal_mask_function", "sliding_window_overlay"}:
        return MaskRule(window=local_size)
    if parts == {"causal_mask_function", "chunked_overlay"}:
        return MaskRule(chunk=local_size)
    return MaskRule(unknown=", ".join(sorted(parts)))


def _mask_parts(mask_function: Callable[..., object]) -> Iterator[str]:
    """Yield the names of the functions in transformers' masking_utils whose intersection (`and_masks`) is the mask. Any
    other combination, such as a union, yields its own name too."""
    name = mask_function.__qualname__.partition(".")[0]
    inner = [cell.cell_contents for cell in mask_function.__closure__ or ()] if name.endswith("_masks") else []
    functions = [each for found in inner if isinstance(found, tuple) for each in found]
    if name != "and_masks":
        yield name
    for each in functions:
        yield from _mask_parts(each)

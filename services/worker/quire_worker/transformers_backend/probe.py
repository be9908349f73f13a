"""`read_spec` reads a model's sizes and the attention of its layers from the model's modules.

This probe runs forward passes of a few rows on the meta device, which computes shapes and no values. It records how
each layer calls attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire_worker.model.arch_spec import Attention, TransformersSpec
from quire_worker.transformers_backend.attention import (
    PROBE_ATTENTION,
    AttentionCall,
    MaskRule,
    register_attention,
    use_attention,
)
from quire_worker.transformers_backend.find_model import FoundModel, failures_as_unsupported, unsupported_model
from quire_worker.transformers_backend.split_model import SplitModel

# No size of a model is this number, so that the probe recognises the rows in a shape.
_ROWS: Final = 7
_UNSUPPORTED_ATTENTION: Final = "UNSUPPORTED_ATTENTION"


def read_spec(found: FoundModel, max_positions: int) -> TransformersSpec:
    """Return the model's sizes and the attention of its layers, from passes of seven rows on the meta device. Raises
    Unsupported if Quire's pages or kernels do not support a layer's attention, if a layer counts the rows of a pass, or
    if the model's code fails."""
    register_attention()
    recorder = _CallRecorder()
    with (
        failures_as_unsupported(_UNSUPPORTED_ATTENTION, found.architecture),
        torch.device("meta"),
        torch.inference_mode(),
    ):
        split = SplitModel(found.build(PROBE_ATTENTION, "batched_mm"))
        rows = torch.zeros(_ROWS, dtype=torch.int64), torch.arange(_ROWS), torch.ones(1, _ROWS, dtype=torch.int64)
        with use_attention(recorder):
            hidden = split.hidden(*rows)
        logits = split.logits(hidden)
        with use_attention(_CallRecorder()), _RowCountDetector(call.module for call in recorder.calls) as counts:
            split.hidden(*rows)
    _check_layers(found, recorder.calls)
    if counts.found:
        reason = "a layer counts the rows of a step, where it should read their positions"
        raise unsupported_model(_UNSUPPORTED_ATTENTION, found.architecture, reason)
    return TransformersSpec(
        found.architecture,
        logits.shape[-1],
        hidden.shape[-1],
        max_positions,
        tuple(_attention_of(found, call, recorder.calls[0]) for call in recorder.calls),
    )


class _CallRecorder:
    """Records the calls of attention in a forward pass."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        """Record a call. Returns a tensor of the right shape, [1, R, Q, D], without values."""
        self.calls.append(call)
        return call.query.new_empty(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])


class _RowCountDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Detects modules that number the rows of a pass by `torch.arange`, where they should read `position_ids`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.found = False
        self._inside = 0
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._step(1))
            module.register_forward_hook(lambda *_: self._step(-1))

    def _step(self, into: int) -> None:
        self._inside += into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside and func.overloadpacket is torch.ops.aten.arange and result.numel() == _ROWS:
            self.found = True
        return result


def _check_layers(found: FoundModel, calls: list[AttentionCall]) -> None:
    """Raise Unsupported unless each layer of the model calls attention once, in order."""
    if not calls:
        reason = "its layers do not use transformers' AttentionInterface"
        raise unsupported_model(_UNSUPPORTED_ATTENTION, found.architecture, reason)
    layers = [call.layer for call in calls]
    wanted = getattr(found.config, "num_hidden_layers", len(calls))
    if layers != list(range(wanted)):
        shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
        reason = f"its {wanted} layers should call attention once each, in order, and layers {shown} called it"
        raise unsupported_model(_UNSUPPORTED_ATTENTION, found.architecture, reason)


def _attention_of(found: FoundModel, call: AttentionCall, first: AttentionCall) -> Attention:
    """Return the attention of one layer, from its call. Raises Unsupported if Quire's pages or kernels do not support
    it, or if its heads have another shape or softcap than those of the `first` layer. The score scale is that of the
    first layer."""
    _, heads, _, head_dim = call.query.shape
    kv_heads, rule = call.key.shape[1], call.mask
    reason = ""
    if call.value.shape != call.key.shape:
        sizes = f"keys of {call.key.shape[-1]} numbers and values of {call.value.shape[-1]}"
        reason = f"its heads have {sizes} (latent attention): pages hold keys and values of one size"
    elif call.key.shape != (1, kv_heads, _ROWS, head_dim) or heads % kv_heads:
        reason = "a layer attends to other rows than those of its tokens"
    elif (call.query.shape, call.key.shape, call.softcap) != (first.query.shape, first.key.shape, first.softcap):
        reason = "its layers have heads of several shapes, where pages have one"
    elif head_dim % 2:
        reason = f"its heads have {head_dim} numbers, which is odd"
    elif not call.is_causal:
        reason = "a layer attends to later positions too"
    elif not isinstance(rule, MaskRule) or rule.unknown:
        kind = f" ({rule.unknown})" if isinstance(rule, MaskRule) else ""
        reason = f"a layer has a mask of another kind than causal, sliding window or chunks{kind}"
    elif call.unknown:
        reason = f"a layer attends with `{call.unknown[0]}`, which Quire's kernels do not know"
    else:
        return Attention(
            heads,
            kv_heads,
            head_dim,
            rope=None,
            window=rule.window,
            chunk=rule.chunk,
            sinks=call.sinks is not None,
            softcap=call.softcap,
            scale=first.scale,
        )
    raise unsupported_model(_UNSUPPORTED_ATTENTION, found.architecture, reason)

"""`fuse_modules` lets Quire's kernels compute parts of a model of the Transformers backend on a GPU.

A modelling file writes an RMS norm as six operations, a gated MLP as five and a rotation of queries and keys as ten. A
decode step of a small model spends most of its time between such operations. A norm, MLP or rotation is replaced
only if it has the form of the kernel's formula, and if both compute the same for random rows. Plain linear layers are
replaced without a comparison. Any other part stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from types import FunctionType
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from quire_worker.model.arch_spec import Activation
from quire_worker.ops.interface import Ops
from quire_worker.ops.triton.rotate import rotate_heads
from quire_worker.ops.weight import DenseWeight
from quire_worker.transformers_backend.split_model import SplitModel

_ROWS: Final = 5
# Two ways to round to bfloat16 differ by so much, relative to the largest number.
_TOLERANCE: Final = 0.02
_ROTATION: Final = "apply_rotary_pos_emb"
"""The name that modelling files give to the function that rotates queries and keys."""
_QKV_PARTS: Final = ("q_proj", "k_proj", "v_proj")
_MLP_PARTS: Final = ("gate_proj", "up_proj", "down_proj")


def fuse_modules(model: SplitModel, ops: Ops[Any]) -> int:
    """Replace the modules of a model on a GPU that Quire's kernels compute: projections of attention, linear layers,
    norms, gated MLPs and rotations. Returns how many they are."""
    with torch.inference_mode():
        replaced = model.replace_children(lambda module: _merged(module, ops))
        replaced += model.replace_modules(lambda module: find_fused(module, ops))
        # Attention modules have parts that may be replaced too, so they come after those.
        return replaced + model.replace_modules(_rotating)


def _merged(module: nn.Module, ops: Ops[Any]) -> dict[str, nn.Module]:
    """Return modules, by name, that compute the query, key and value projections of an attention module by one GEMM.
    Empty unless all three are plain linear layers of one input size, with biases in all or none."""
    parts = [getattr(module, name, None) for name in _QKV_PARTS]
    linears = [part for part in parts if type(part) is nn.Linear]
    biases = [part.bias for part in linears if part.bias is not None]
    if len(linears) < len(parts) or len({part.in_features for part in linears}) > 1 or len(biases) % len(parts):
        return {}
    bias = torch.cat([each.data for each in biases]) if biases else None
    product = _SharedProduct(DenseWeight(torch.cat([part.weight.data for part in linears]), bias), len(parts), ops)
    ends = list(accumulate(part.out_features for part in linears))
    begins = [0, *ends[:-1]]
    return {name: MergedLinear(product, *place) for name, *place in zip(_QKV_PARTS, begins, ends, strict=True)}


def find_fused(module: nn.Module, ops: Ops[Any]) -> nn.Module | None:
    """Return a module that computes the same as `module` by Quire's kernels: a linear layer, an RMS norm or a gated
    MLP. None if there is none, or if the results of a norm or MLP for random rows differ by more than the tolerance; a
    linear layer is not compared."""
    if type(module) is nn.Linear:
        return FusedLinear(module, ops)
    candidates: list[_RowModule] = [*_norms(module, ops), *_mlps(module, ops)]
    if not candidates:
        return None
    # The closest: two forms of GELU differ by less than the tolerance.
    difference, _, closest = min((_difference(module, each), place, each) for place, each in enumerate(candidates))
    return closest if difference <= _TOLERANCE else None


def _rotating(module: nn.Module) -> nn.Module | None:
    """Return a module that runs the attention module's code with the kernel's rotation for `apply_rotary_pos_emb`. None
    unless the code calls that function, the module has parameters, and the function's results for random heads agree
    with the kernel's. Only the two rotations are compared, and never the attention modules."""
    forward: Any = type(module).forward
    theirs = getattr(forward, "__globals__", {}).get(_ROTATION)
    weight = next(module.parameters(), None)
    if theirs is None or weight is None or _ROTATION not in forward.__code__.co_names:
        return None
    if not rotates_the_same(theirs, weight.device, weight.dtype):
        return None
    own_globals = {**forward.__globals__, _ROTATION: rotate_heads}
    rotating = FunctionType(forward.__code__, own_globals, forward.__name__, forward.__defaults__, forward.__closure__)
    return RotatingAttention(module, rotating, forward.__kwdefaults__ or {})


@cache
def rotates_the_same(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a modelling file's rotation gives the kernel's results for random heads, rotated as a whole and, if the
    function can do that, by half. False also for a function with other arguments or other results."""
    generator = torch.Generator(device).manual_seed(1)
    query, key, cos, sin = (
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in ((1, 4, _ROWS, 64), (1, 2, _ROWS, 64), (1, _ROWS, 64), (1, _ROWS, 64))
    )
    for dims in (64, 32):  # all of a head, and its first half
        angles = cos[..., :dims], sin[..., :dims]
        try:
            wanted_query, wanted_key = theirs(query, key, *angles)
        except Exception:
            if dims == query.shape[3]:
                return False  # a function of the same name with other arguments or results
            break  # a function that rotates whole heads alone
        pairs = zip(rotate_heads(query, key, *angles), (wanted_query, wanted_key), strict=True)
        for found, wanted in pairs:
            if not isinstance(wanted, Tensor) or wanted.shape != found.shape or _relative(found, wanted) > _TOLERANCE:
                return False
    return True


def _difference(module: nn.Module, fused: _RowModule) -> float:
    """Return the largest difference between both modules' results for random rows, relative to the largest number;
    infinity if the module takes or returns something else."""
    weight = next(module.parameters())
    generator = torch.Generator(weight.device).manual_seed(1)
    # Their mean is not 0, so that a norm that subtracts the mean computes something else.
    rows = (1 + torch.randn((1, _ROWS, fused.inputs), generator=generator, device=weight.device)).to(weight.dtype)
    try:
        wanted = module(rows)
    except Exception:  # modelling code may end the attempt in any way
        return math.inf
    if not isinstance(wanted, Tensor) or wanted.shape != rows.shape:
        return math.inf
    return _relative(fused(rows), wanted)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


class FusedLinear(nn.Module):
    """A linear layer by the kernel that suits the number of rows."""

    def __init__(self, linear: nn.Linear, ops: Ops[Any]) -> None:
        super().__init__()
        # Modelling code may read the sizes and the weight.
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._dense, self._ops = DenseWeight(linear.weight.data, _bias(linear)), ops

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        product = self._ops.linear(x.reshape(-1, self.in_features), self._dense)
        return product.view(*x.shape[:-1], self.out_features)


class _RowModule(nn.Module):
    """A module whose result has the shape of its input, [..., H]."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        """H."""


class FusedNorm(_RowModule):
    """An RMS norm of the last axis by one kernel."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops[Any]) -> None:
        super().__init__(len(weight))
        self._weight, self._eps, self._ops = weight, eps, ops

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        rows = x.reshape(-1, self.inputs)
        return self._ops.rms_norm(rows, self._weight, self._eps).view(x.shape)


class FusedMlp(_RowModule):
    """A gated MLP: gate and up projections as one product, with the activation, and the down projection."""

    def __init__(self, gate_up: DenseWeight, down: DenseWeight, activation: Activation, ops: Ops[Any]) -> None:
        super().__init__(gate_up.inputs)
        self._gate_up, self._down, self._activation, self._ops = gate_up, down, activation, ops

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        rows = x.reshape(-1, self.inputs)
        inner = self._ops.gated_linear(rows, self._gate_up, self._activation)
        return self._ops.linear(inner, self._down).view(x.shape)


class _SharedProduct:
    """The product of one input with several weights. The modules that share it ask for it one after the other, with the
    same tensor."""

    def __init__(self, weight: DenseWeight, shares: int, ops: Ops[Any]) -> None:
        self.weight = weight
        self._shares, self._ops = shares, ops
        self._input: Tensor | None = None
        self._product = weight.data
        self._left = 0

    def columns(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Return columns `begin` to `end` of the merged linear layer's result for x [..., inputs]. The result is
        computed for the first module that asks, and dropped behind the last."""
        if self._input is not x:
            product = self._ops.linear(x.reshape(-1, self.weight.inputs), self.weight)
            self._input, self._product, self._left = x, product.view(*x.shape[:-1], -1), self._shares
        columns = self._product[..., begin:end]
        self._left -= 1
        if not self._left:
            self._input, self._product = None, self.weight.data
        return columns


class MergedLinear(nn.Module):
    """A linear layer whose product is computed together with that of others."""

    def __init__(self, product: _SharedProduct, begin: int, end: int) -> None:
        super().__init__()
        # Modelling code may read the sizes and the weight.
        self.in_features, self.out_features = product.weight.inputs, end - begin
        self.weight = nn.Parameter(product.weight.data[begin:end], requires_grad=False)
        self._product, self._begin, self._end = product, begin, end

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return self._product.columns(x, self._begin, self._end)


class RotatingAttention(nn.Module):
    """A module of the modelling file whose code calls Quire's rotation. `forward` is its function with that change."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], defaults: dict[str, Any]) -> None:
        super().__init__()
        self._module, self._forward, self._defaults = module, forward, defaults

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """See the modelling file."""
        return self._forward(self._module, *arguments, **{**self._defaults, **named})


def _norms(module: nn.Module, ops: Ops[Any]) -> Iterator[FusedNorm]:
    """Yield the RMS norms that a module may be: its weight scales as it is, or by one more (as Gemma's). There are none
    unless the module has a vector `weight`, a float epsilon, and no other parameters or buffers."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.dim() != 1 or _others(module, "weight"):
        return
    yield FusedNorm(weight.data, eps, ops)
    yield FusedNorm((weight.data.float() + 1).to(weight.dtype), eps, ops)


def _mlps(module: nn.Module, ops: Ops[Any]) -> Iterator[FusedMlp]:
    """Yield the gated MLPs that a module may be, one for each activation function. There are none unless the module
    consists of plain linear layers gate_proj, up_proj and down_proj that fit together."""
    parts = [getattr(module, name, None) for name in _MLP_PARTS]
    if any(type(part) is not nn.Linear for part in parts) or _others(module, *_MLP_PARTS):
        return
    gate, up, down = (DenseWeight(part.weight.data, _bias(part)) for part in parts if isinstance(part, nn.Linear))
    if (gate.bias is None) != (up.bias is None) or gate.inputs != down.outputs:
        return
    bias = None if gate.bias is None or up.bias is None else torch.cat([gate.bias, up.bias])
    gate_up = DenseWeight(torch.cat([gate.data, up.data]), bias)
    for activation in get_args(Activation):
        yield FusedMlp(gate_up, down, activation, ops)


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.data


def _others(module: nn.Module, *known: str) -> bool:
    """Whether a module has parameters or buffers outside of those that are known."""
    named = (*module.named_parameters(), *module.named_buffers())
    return any(name.partition(".")[0] not in known for name, _ in named)

"""Measures the CPU time that steps of a GPU take on the host, without a GPU: launches that start nothing, and packing
of columns.

Run `python -m bench.gpu.host` without TRITON_INTERPRET. Triton binds, specializes and looks up kernels as usual. torch
makes its tensors, and its GEMMs and attention return at once. The driver's part of a launch is missing, so the
benchmark also counts launches, without copies. Figures are thread time, the best of many runs, because a busy machine
disturbs this least.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu.shapes import QWEN3_06B
from quire_worker.cuda.graphs.step_graph import StepGraph
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_columns import StepColumns
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize
from quire_worker.model.arch_spec import Dense, LayerSpec
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import parameter_specs
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton import fresh_attention
from quire_worker.ops.triton.fresh_attention import Fresh
from quire_worker.ops.triton.gemm import GemmConfigs
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch
from quire_worker.weights.parameter_store import ParameterStore

_PIECE, _WORDS, _REPEATS = 8, 1 << 19, 60
_PROGRAMS = 66
"""Shares of keys, of the programs of eight KV heads, that keep an H200 busy."""
_launched: list[None] = []


class Driver:
    """The part of a GPU driver that Triton's launcher uses."""

    def launcher_cls(self, source: object, metadata: object) -> None:
        """What is compiled to launch a kernel: nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """What was compiled."""

    function = packed_metadata = 0

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        _count()


class _Graph:
    def replay(self) -> None:
        _count()


class Recorder:
    """A CUDA graph recorder that captures nothing."""

    def begin(self) -> None:
        return None

    def end(self) -> _Graph:
        return _Graph()

    def abandon(self) -> None:
        return None


def _count() -> None:
    _launched.append(None)


def _compile(self: Any, key: object, _signature: object, device: int, *_: object) -> _Kernel:
    kernel = self.device_caches[device][0][key] = _Kernel()
    return kernel


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _count()
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def _into(*_: object, out: Tensor) -> Tensor:
    _count()
    return out


def _attention(query: Tensor, *_: object, **__: object) -> Tensor:
    _count()
    return torch.empty_like(query)


REPLACED: tuple[tuple[object, str, object], ...] = (
    (JITFunction, "_do_compile", _compile),
    (functional, "linear", _product),
    (functional, "scaled_dot_product_attention", _attention),
    (torch, "mm", _into),
    (torch, "addmm", _into),
)
"""(owner, name, stand-in) of all that a step computes with; what is left to torch are copies, fills and one sum."""


def stand_in() -> None:
    """From here on, let this process compute nothing."""
    driver.set_active(Driver())
    for owner, name, instead in REPLACED:
        setattr(owner, name, instead)
    fresh_attention.PIECE = _PIECE


def small_body(layers: int = len(QWEN3_06B.layers), *, output_gate: bool = False) -> StepBody:
    """Return the small model's layers and launches, with little memory. `output_gate`: a gate on attention's output,
    which that model does not have."""
    attention = dataclasses.replace(QWEN3_06B.attention[0], head_dim=16, output_gate=output_gate)
    layer = LayerSpec(attention, Dense(64))
    spec = dataclasses.replace(QWEN3_06B, vocab_size=64, hidden_size=64, layers=(layer,) * layers)
    store = ParameterStore(parameter_specs(spec), torch.bfloat16)
    ops = TritonOps(HeadShape.of(spec), torch.device("cpu"), GemmConfigs({}))
    ops.pdl = True
    pages = torch.empty(8, spec.kv_heads, layers, 2, 64, spec.head_dim, dtype=torch.bfloat16)
    return StepBody(Decoder(spec, store, ops, 128), pages, _WORDS, 640, 640)


def _best_us(call: Callable[[], object]) -> float:
    took = []
    for _ in range(_REPEATS):
        begin = time.thread_time_ns()
        call()
        took.append((time.thread_time_ns() - begin) / 1000)
    return min(took)


def _show(name: str, call: Callable[[], object]) -> None:
    call()
    _launched.clear()
    call()
    print(json.dumps({"step": name, "launches": len(_launched), "us": round(_best_us(call), 1)}), flush=True)


def _tiling(body: StepBody) -> Tiling:
    """Return the tiling that a GPU would use."""
    return Tiling.of(body.decoder.head_shape, body.pages.device)._replace(programs=_PROGRAMS)


def steps_of(body: StepBody) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the steps to run, eagerly and in captured pieces: prompts that fill a step, and prompts together with
    sequences that decode."""
    tiling = _tiling(body)
    alike = Fresh(0, _PIECE), Fresh(_PIECE, _PIECE)
    unlike = Fresh(0, _PIECE), Fresh(_PIECE, 2 * _PIECE)
    kinds: tuple[tuple[str, StepSize, tuple[Fresh, ...], int], ...] = (
        ("two fresh prompts of one length", StepSize(0, 2 * _PIECE, 2), alike, 2),
        ("two fresh prompts of two lengths", StepSize(0, 3 * _PIECE, 2), unlike, 2),
        ("a fresh prompt, tiles, and 64 decode", StepSize(64, 64, 2), alike[:1], 2),
    )
    for name, size, fresh, chunks in kinds:
        layout = StepLayout.of(size, tiling, fresh=True).leaving(fresh, chunks)
        yield f"{name}, kernel by kernel", partial(body.launch, layout)
        graph = StepGraph(body, StepLayout.of(size, tiling, fresh=True), Recorder())
        yield f"{name}, in pieces", partial(graph.replay, graph.layout_of(fresh, chunks))


def _decoding(rows: int) -> StepBatch:
    one, everyone = np.ones(rows, np.int32), np.ones(rows, np.bool_)
    return StepBatch(
        np.zeros(rows, np.int64), one, 300 * one, np.ones((rows, 8), np.int32), everyone, param_rows(rows), -one,
        slot=np.arange(rows, dtype=np.int32), fed=everyone, last=~everyone, stop_id=np.ones((rows, 1), np.int32),
    )  # fmt: skip  # plain columns


def _columns(body: StepBody) -> None:
    """Measure the packing of columns for steps that decode: all columns, and only the changes if the step before had
    the same sequences."""
    for rows in (1, 256, 512):
        layout = StepLayout.of(StepSize(rows), _tiling(body))
        batch, words = _decoding(rows), np.zeros(_WORDS, np.int32)
        columns = StepColumns(words)
        columns.pack(layout, batch, {})
        whole, next_one = (
            _best_us(partial(layout.pack, batch, words)),
            _best_us(partial(columns.pack, layout, batch, {})),
        )
        print(json.dumps({"packed": rows, "us": round(whole, 1), "next_us": round(next_one, 1)}), flush=True)


def main() -> None:
    stand_in()
    with torch.inference_mode():
        body = small_body()
        for name, step in steps_of(body):
            _show(name, step)
    _columns(body)


if __name__ == "__main__":
    main()

"""Kernels are compiled together, each once, and not run; what fails is left to the launch; nothing stays replaced."""

from __future__ import annotations

import importlib
import json
import pkgutil
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu.host import Driver
from quire_worker.cuda.kernel_compiler import compile_steps, compile_together
from quire_worker.cuda.step_layout import Tiling
from quire_worker.cuda.step_size import StepSize, fine_sizes, graph_sizes, kernel_sizes
from quire_worker.ops.triton import kernels as kernel_package
from quire_worker.ops.triton import triton_ops
from quire_worker.ops.triton.gated_gemm import GatedGemmConfigs
from quire_worker.ops.triton.gemm_configs import gated_configs_of
from tests.kernels.uninterpreted import run_uninterpreted

_FORBIDDEN = 7


def _add(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # a kernel
    pass


class Compiler:
    """Stands for Triton's: what was compiled on which thread, and what ran."""

    def __init__(self) -> None:
        self.compiled: list[tuple[int, str]] = []
        self.ran: list[int] = []
        self.on_disk: set[int] = set()
        self.launchers: list[tuple[Any, Any]] = []
        self.together: threading.Barrier | None = None

    def compile(self, kernel: Any, key: str, _signature: Any, device: int, constants: Any, *_: object) -> Any:
        (block,) = constants.values()
        self.compiled.append((block, threading.current_thread().name.split("_")[0]))
        if self.together is not None and threading.current_thread() is not threading.main_thread():
            self.together.wait(60)
        if knobs.compilation.listener is not None:
            knobs.compilation.listener(cache_hit=block in self.on_disk)
        if block == _FORBIDDEN:
            raise RuntimeError("no such block")
        run = lambda *_: self.ran.append(block)  # noqa: E731  # a line of a stand-in
        made = SimpleNamespace(
            function=0, packed_metadata=0, launch_metadata=lambda *_: None, run=run, src=block, metadata=f"of {block}"
        )
        kernel.device_caches[device][0][key] = made
        return made


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    device = Driver()
    monkeypatch.setattr(device, "launcher_cls", lambda source, metadata: made.launchers.append((source, metadata)))
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *how: made.compile(kernel, *how))  # noqa: PLW0108  # a method is no function
    before = JITFunction.run, JITFunction._do_compile, knobs.compilation.listener
    yield made
    assert before == (JITFunction.run, JITFunction._do_compile, knobs.compilation.listener)


def launch(kernel: Any, *blocks: int) -> None:
    for block in blocks:
        kernel[(1,)](torch.zeros(4), 3, BLOCK=block)


def test_kernels_are_compiled_side_by_side_each_once_and_not_run(compiler: Compiler) -> None:
    kernel = JITFunction(_add)
    compiler.together = threading.Barrier(2)
    tasks = compile_together(lambda: launch(kernel, 8, 16, 32, 16, 32, 8), 2)
    assert sorted(compiler.compiled) == [(8, "MainThread"), (16, "compile"), (32, "compile")]
    assert [task.exception() for task in tasks] == [None] * 3 and not compiler.ran
    assert sorted(compiler.launchers) == [(block, f"of {block}") for block in (8, 16, 32)]
    launch(kernel, 32, 16)
    assert compiler.ran == [32, 16] and len(compiler.compiled) == 3
    assert compile_together(lambda: launch(kernel, 16), 2) == [] and compiler.ran == [32, 16]


def test_what_is_on_disk_is_read_without_other_threads(compiler: Compiler) -> None:
    kernel = JITFunction(_add)
    compiler.on_disk = {16, 32, 64}
    assert len(compile_together(lambda: launch(kernel, 16, 32, 128, 64), 2)) == 4
    where = [("MainThread", block) for block in (16, 32, 128)]
    assert [(thread, block) for block, thread in compiler.compiled] == [*where, ("compile", 64)]
    assert [block for block, _ in compiler.launchers] == [128, 64]  # those of the others are on disk, too


def test_what_cannot_be_compiled_is_compiled_again_where_it_is_launched(compiler: Compiler) -> None:
    for first in ((), (16,)):  # here, and on the pool
        kernel = JITFunction(_add)
        blocks = (*first, _FORBIDDEN, 32)
        *_, bad, good = compile_together(partial(launch, kernel, *blocks), 2)
        assert isinstance(bad.exception(), RuntimeError) and good.exception() is None
        with pytest.raises(RuntimeError, match="no such block"):
            launch(kernel, _FORBIDDEN)
        launch(kernel, 32)
    assert compiler.ran == [32, 32]


def test_launches_of_other_threads_are_as_ever(compiler: Compiler) -> None:
    kernel = JITFunction(_add)

    def launch_elsewhere() -> None:
        launch(kernel, 16)
        other = threading.Thread(target=launch, args=(kernel, 64), name="other")
        other.start()
        other.join()

    assert len(compile_together(launch_elsewhere, 2)) == 1
    assert sorted(compiler.compiled) == [(16, "MainThread"), (64, "other")] and compiler.ran == [64]


def test_a_failure_is_told_and_costs_nothing_but_haste(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    body: Any = SimpleNamespace(decoder=None)
    compile_steps(body, Tiling(1, 1), [StepSize(1)], fresh=False)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["kernels are compiled as they are launched: compiling them together failed"]


_ALL = """
import json
from triton.runtime.jit import JITFunction
from bench.gpu import host as gpu_host
from quire_worker.cuda.kernel_compiler import compile_together, go_through
from quire_worker.cuda.graphs.step_graph import StepGraph
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize, fine_sizes, graph_sizes, kernel_sizes
from quire_worker.ops.triton.fresh_attention import Fresh

gpu_host.stand_in()
body = gpu_host.small_body(layers=3, output_gate=True)
tiling = Tiling.of(body.decoder.head_shape, body.pages.device)
tasks = compile_together(lambda: go_through(body, tiling, kernel_sizes(40, 2048, 6), fresh=True), 2)
late = []

def compile_late(kernel, *how):
    late.append(kernel.__name__)
    return gpu_host._compile(kernel, *how)

JITFunction._do_compile = compile_late
# Whole graphs, and steps without one: as many rows, sequences and splits as there happen to be, multiples of 16 or not.
eager = [StepSize(decodes, rows, 9) for decodes in range(24, 56) for rows in (4500, 4608)]
for size in (*graph_sizes(40, 2048), *fine_sizes(40, 2048), *eager):
    layout = StepLayout.of(size, tiling)
    layout.pack_nobody(body.uploaded)
    body.launch(layout)
for decodes in (0, 16):
    pieced = StepGraph(body, StepLayout.of(StepSize(decodes, 4352, 128, True), tiling, fresh=True), gpu_host.Recorder())
    pieced.replay(pieced.layout_of((Fresh(0, 2048),), 2))
print(json.dumps([len(tasks), late]))
"""


@pytest.mark.parametrize(("sequences", "tokens"), [(960, 8192), (960, 1500), (256, 16384)])
def test_sizes_of_all_kernels_have_those_of_many_rows(sequences: int, tokens: int) -> None:
    table = gated_configs_of("NVIDIA H200")
    products = GatedGemmConfigs(table)

    def kernels(sizes: list[StepSize]) -> set[object]:
        rows = {size.total_rows for size in sizes}
        ways = {(shape, products.config_for(each, *shape)) for each in rows for shape in {known[1:] for known in table}}
        return ways | {each >= triton_ops._MANY_ROWS for each in rows}

    whole = [*graph_sizes(sequences, tokens), *fine_sizes(sequences, tokens)]
    assert kernels(kernel_sizes(sequences, tokens, 32)) == kernels(whole)


def test_what_a_kernel_does_not_specialize_on_are_parameters_of_it() -> None:
    """Triton looks no name up: one that no parameter has leaves that parameter as the others are."""
    kernels: dict[str, Any] = {
        f"{module.name}.{name}": kernel
        for module in pkgutil.iter_modules(kernel_package.__path__, f"{kernel_package.__name__}.")
        for name, kernel in vars(importlib.import_module(module.name)).items()
        if name.endswith("_kernel")
    }
    given = {
        # Interpreted, a kernel keeps what its decorator was given.
        name: kernel.do_not_specialize if isinstance(kernel, JITFunction) else kernel.kwargs["do_not_specialize"]
        for name, kernel in kernels.items()
    }
    assert {name: names for name, names in given.items() if not set(names or ()) <= set(kernels[name].arg_names)} == {}
    assert sum(map(bool, given.values())) > 5


def test_what_is_gone_through_has_the_kernels_of_all_graphs() -> None:
    """In a process of its own: what is replaced stays so, and Triton must not be interpreted."""
    count, late = json.loads(run_uninterpreted("-c", _ALL))
    assert count > 12 and late == []
    assert len(kernel_sizes(40, 2048, 6)) == 12 < len(graph_sizes(40, 2048)) / 3

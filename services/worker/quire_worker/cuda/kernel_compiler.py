"""Compiles kernels, several at a time, before the first step needs them.

Triton compiles a kernel at its first launch, one kernel after the other. With an empty disk cache this takes ten
seconds or more. Here, launches of padded steps only compile, on a few threads. Most of a compilation runs without
Python's lock, though reading from disk does not. The same is true of the launcher, a C module for which the first
launch would wait a quarter of a second.

A later launch finds the compiled kernel in memory or on disk, under the same key. A kernel that failed here is
compiled, or fails, at its launch. This module does not know what the kernels compute.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.step_layout import StepLayout
from quire_worker.cuda.step_size import StepSize
from quire_worker.model.mixers import project
from quire_worker.ops.triton.attention import prefill_attention
from quire_worker.ops.triton.logprobs import packed_logprobs
from quire_worker.ops.triton.sigmoid_gate import sigmoid_gate
from quire_worker.threads.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from quire_worker.cuda.step_body import StepBody
    from quire_worker.cuda.step_layout import Tiling
    from quire_worker.model.mixers import AttentionInput
    from quire_worker.model.step_decoder import StepDecoder
    from quire_worker.ops.interface import AttentionRules
    from quire_worker.ops.triton.attention_plan import TritonPlan
    from quire_worker.ops.weight import Weight

log = get_logger(__name__)
# More would wait for Python's lock, which a compilation holds for a fifth of its time.
_MOST_THREADS = 8
_KEPT_ROWS = 1024


def compile_steps(body: StepBody, tiling: Tiling, sizes: Iterable[StepSize], *, fresh: bool) -> None:
    """Compile, on several threads, the kernels of steps of these sizes and of their logprobs; with `fresh`, also those
    of steps whose prompts cuDNN computes. Runs torch's part of such steps on the current stream, and overwrites the
    body's `uploaded`. Logs the result, and never raises: a kernel that fails to compile here is compiled at its
    launch."""
    begin, threads = time.perf_counter(), min(_MOST_THREADS, usable_cores())
    try:
        tasks = compile_together(lambda: go_through(body, tiling, sizes, fresh=fresh), threads)
    except Exception:
        log.exception("kernels are compiled as they are launched: compiling them together failed")
        return
    failed = [error for task in tasks if (error := task.exception()) is not None]
    if failed:
        log.warning("some kernels could not be compiled ahead", kernels=len(failed), cause=repr(failed[0])[:300])
    took_s = round(time.perf_counter() - begin, 2)
    log.info("kernels are ready", kernels=len(tasks) - len(failed), threads=threads, took_s=took_s)


def compile_together(launch: Callable[[], None], threads: int) -> list[Future[Any]]:
    """Call `launch`; its kernels are compiled on this many threads, and do not run. Returns a task for each kernel that
    was not compiled before. All tasks have ended, with a kernel or an exception. An error of `launch` itself is
    raised."""
    with ThreadPoolExecutor(threads, "compile") as pool, _compiling(pool) as tasks:
        launch()
    return tasks


@contextlib.contextmanager
def _compiling(pool: Executor) -> Iterator[list[Future[Any]]]:
    """In this context, launches of this thread compile kernels and do not run them; launches of other threads are
    unchanged. Yields the list of tasks. Kernels on disk are read at once. From the first missing kernel on,
    compilations go to the pool.

    Triton's `run` compiles without a launch, and its `_do_compile` compiles a kernel that is not in memory. Triton
    accepts a future in place of a kernel.
    """
    owner, tasks, missed = threading.get_ident(), list[Future[Any]](), threading.Event()
    run, do_compile, listener = JITFunction.run, JITFunction._do_compile, knobs.compilation.listener

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        """Replace Triton's `run`: on the owner's thread it compiles without a launch, on other threads nothing
        changes."""
        return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == owner, **more)

    def compile_later(self: Any, key: str, signature: Any, device: int, *how: Any) -> Any:
        """Replace Triton's `_do_compile`: on the owner's thread, note a task for the kernel and return it. The kernel
        is compiled at once as long as kernels are found on disk, later by the pool."""
        if threading.get_ident() != owner:
            return do_compile(self, key, signature, device, *how)
        task, kernels = Future[Any](), self.device_caches[device][0]
        tasks.append(task)

        def fill() -> None:
            """Compile the kernel and, once one was missing on disk, its launcher; end the task with the kernel. After
            an error, forget the task's place and end the task with the error."""
            try:
                kernel = do_compile(self, key, signature, device, *how)  # which puts it in the task's place
                if missed.is_set():
                    driver.active.launcher_cls(kernel.src, kernel.metadata)  # left on disk, where the launch finds it
                task.set_result(kernel)
            except Exception as error:
                kernels.pop(key, None)
                task.set_exception(error)

        if missed.is_set():
            kernels[key] = task
            pool.submit(fill)
        else:
            fill()
        return task

    def listen(**told: Any) -> None:
        """Note when a kernel was not found on disk, then call the listener that was there before."""
        if not told["cache_hit"]:
            missed.set()
        if listener is not None:
            listener(**told)

    JITFunction.run, JITFunction._do_compile = compile_only, compile_later
    knobs.compilation.listener = listen
    try:
        yield tasks
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        knobs.compilation.listener = listener


def go_through(body: StepBody, tiling: Tiling, sizes: Iterable[StepSize], *, fresh: bool) -> None:
    """Launch a step of padding for each size, on a few of the decoder's layers; with `fresh`, one with a prompt for
    cuDNN too, and at the end logprobs. Under `compile_together` this compiles their kernels."""
    few = copy.copy(body)
    few.decoder = body.decoder.few_layers()
    layouts = [StepLayout.of(size, tiling) for size in sizes]
    if fresh:
        layouts.append(StepLayout.of(StepSize(0, _KEPT_ROWS, 1), tiling, fresh=True))
    for layout in layouts:
        layout.pack_nobody(few.uploaded)
        few.launch(layout, attend=None if layout.fresh is None else partial(_attend_by_hand, few.decoder))
    if few.logits is not None:
        nobody = torch.zeros(1, dtype=torch.int32, device=few.logits.device)
        packed_logprobs(few.logits, nobody, nobody, 0)


def _attend_by_hand(
    decoder: StepDecoder[TritonPlan],
    inputs: AttentionInput,
    pages: Tensor,
    layer: int,
    plan: TritonPlan,
    rules: AttentionRules,
    weight: Weight,
    onto: Tensor | None,
) -> Tensor | None:
    """Stand in for a layer's attention in steps with fresh prompts: launch only prefill tiles, the output gate and the
    output projection, as StepGraph does between two pieces. Returns the projection's result; None if that was added to
    `onto`."""
    out = torch.empty_like(inputs.query)
    prefill_attention(inputs.query, pages, layer, plan, decoder.head_shape, rules, out, pdl=False)
    if inputs.gate is not None:
        sigmoid_gate(out, inputs.gate, pdl=False)
    return project(decoder.ops, out, weight, onto)

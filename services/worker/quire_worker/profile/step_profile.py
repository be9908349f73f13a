"""Loads a model as a worker does, and profiles one step of it, repeatedly, kernel by kernel.

The step runs on the worker's own device, with two changes: `Ops` are wrapped, and CUDA graphs are off, so that kernels
can be told apart. The times are the device's times of kernels; gaps between kernels do not count.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from quire_common.errors import Internal, Unsupported
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling
from quire_worker.model.decoder import Decoder
from quire_worker.model_source import load_configured
from quire_worker.profile.floor import PEAKS
from quire_worker.profile.kernel_parts import by_part, costs_behind
from quire_worker.profile.kernel_table import Row, as_records, make_rows
from quire_worker.profile.profiled_batch import attended, profiled_batch
from quire_worker.profile.trace_times import times_by_range
from quire_worker.profile.traced_ops import PREFIX, traced

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.arrays import Int32
    from quire_worker.engine.ports import Device
    from quire_worker.profile.profile_config import ProfileConfig
    from quire_worker.step import StepBatch

_WARM_UP = 3
_STEP_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The results of a profile, and the files with them."""

    device: str
    rows: list[Row]
    trace: Path
    kernels: Path


def profile_step(config: ProfileConfig, progress: Callable[[str, int, int], None] = lambda *_: None) -> StepProfile:
    """Load the configured model, fill the step's pages with random numbers, warm up by three steps, trace one step
    `config.steps` times without CUDA graphs, and write trace.json and kernels.json (the table) to the folder
    `config.out`, which is made. Returns the table's rows and the paths.

    Raises ConfigError or Unsupported for a model that cannot be loaded, does not fit or runs in the Transformers
    backend, and ConfigError for a step without rows or one for which the pages are too few. Raises Internal for a step
    that hangs, or the error of a sequence that failed.
    """
    prefill = max(config.prompt, 1)
    # As little as the step needs beside weights and pages.
    config = dataclasses.replace(
        config, enforce_eager=True, max_num_seqs=max(1, config.batch), max_num_batched_tokens=prefill
    )
    parts: list[tuple[Any, Tensor]] = []
    served = load_configured(config, progress, lambda decoder, pages: parts.append((decoder, pages)))
    ((decoder, pages),) = parts
    if not isinstance(decoder, Decoder):
        raise Unsupported(
            "UNSUPPORTED_ARCHITECTURE",
            f"The parts of {served.info.architecture} are not known: it runs in the Transformers backend.",
            "Profile a model of a family of Quire's own.",
            param="model",
        )
    info = served.info
    batch = profiled_batch(
        config.batch,
        config.context,
        config.prompt,
        info.vocab_size,
        info.pages.page_size,
        served.num_pages,
        _sampling(config),
    )
    _fill(pages, batch.page_table)
    ops = decoder.ops = traced(decoder.ops, attended(batch))
    device = served.make_device(served.engine_spec(config.max_num_seqs + 1), True)
    on_gpu = pages.device.type == "cuda"
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    trace, kernels = folder / "trace.json", folder / "kernels.json"
    try:
        _run(device, batch, _WARM_UP)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        ops.costs.clear()
        with profile(activities=activities) as profiler:
            _run(device, batch, 1)
            costs = ops.costs | costs_behind(batch, info.vocab_size, decoder.final_norm.weight.element_size())
            _run(device, batch, config.steps - 1)
    finally:
        device.close()
    profiler.export_chrome_trace(str(trace))
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    times = by_part(times_by_range(json.loads(trace.read_text()), PREFIX))
    rows = make_rows(times, costs, config.steps, PEAKS.get(name))
    figures = {"device": name, "batch": config.batch, "context": config.context, "prompt": config.prompt}
    kernels.write_text(json.dumps(figures | {"rows": as_records(rows)}, indent=1))
    return StepProfile(name, rows, trace, kernels)


def _sampling(config: ProfileConfig) -> Sampling:
    """Return the sampling parameters of all profiled sequences, from the configuration."""
    controls = LogitControls(frequency_penalty=config.frequency_penalty) if config.frequency_penalty else None
    return Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        logprobs=config.logprobs,
        controls=controls,
    )


def _fill(pages: Tensor, table: Int32) -> None:
    """Write random numbers into the pages of the table, since zeros are computed faster."""
    generator = torch.Generator(pages.device).manual_seed(0)
    for page in sorted(set(table.ravel().tolist()) - {0}):
        pages[page].copy_(torch.randn(pages.shape[1:], generator=generator, device=pages.device))


def _run(device: Device, batch: StepBatch, steps: int) -> None:
    """Run a step this many times on the device, waiting for each. Raises Internal STEP_HUNG after 300 s, or the error
    of a sequence that failed."""
    ended = threading.Event()
    device.wake = ended.set
    for _ in range(steps):
        ended.clear()
        # The device writes into what it is given.
        device.launch(dataclasses.replace(batch, token=batch.token.copy()))
        if not ended.wait(_STEP_LIMIT_S):
            raise Internal("STEP_HUNG", f"A step has not ended after {_STEP_LIMIT_S:g} s.", "See what ran last.")
        (outcome,) = device.take_outcomes()
        for error in outcome.failed.values():
            raise error

"""Estimates a model's speed on a GPU from measurements of a small and a large model on the same GPU.

The time of a step is the sum of its floor and an overhead. The floor follows from the bytes that the step reads and its
operations. The overhead is the time that the measured models took beyond their own floors. Between the two models, the
overhead is interpolated over the logarithm of the size. Above the large model, it grows in proportion to the size;
below the small one, it stays the same. The model does not cover batches above the largest measured one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.capacity.measured import BATCHES, DECODE_CONTEXT, LARGE, SMALL, Gpu, Speeds
from quire.capacity.model_sizes import ModelSizes

_LEAST_MS = 0.05


@dataclass(frozen=True)
class SpeedModel:
    """Speed of one model on one GPU."""

    gpu: Gpu
    model: ModelSizes

    @property
    def measured(self) -> tuple[tuple[Speeds, ModelSizes], ...]:
        """The speeds of the measured models on this GPU, the small one first."""
        return (self.gpu.small, SMALL), (self.gpu.large, LARGE)

    @property
    def basis(self) -> str:
        """Return the origin of the figures. `measured`: a measured model has nearly the same number of GEMM parameters
        (within 2 %) and the same KV bytes. `interpolated`: the number of GEMM parameters is between those of the
        measured models; else `extrapolated`."""
        size = self.model.gemm_parameters
        if any(
            abs(size / each.gemm_parameters - 1) < 0.02 and self.model.kv_bytes == each.kv_bytes
            for _, each in self.measured
        ):
            return "measured"
        return "interpolated" if SMALL.gemm_parameters < size < LARGE.gemm_parameters else "extrapolated"

    def itl_ms(self, batch: int, context: float) -> float:
        """Time between tokens of `batch` sequences with `context` tokens each, without prefill beside them."""
        return max(_LEAST_MS, self._floor_ms(self.model, batch, context) + self._overhead_ms(batch))

    def prefill_tokens_per_s(self) -> float:
        """Return prompt tokens per second in large prefill steps. The share of the GPU's peak FLOPS that the measured
        models reached is interpolated to this model's size."""
        share = self._between(
            lambda speeds, each: speeds.prefill_tokens_per_s * 2 * each.gemm_parameters / self.gpu.flops
        )
        return share * self.gpu.flops / (2 * self.model.gemm_parameters)

    def prompt_ms(self, tokens: float) -> float:
        """Return the time to the first token of one prompt on an idle engine: its tokens at the prefill speed, and the
        overhead that the measured models had."""
        overhead_ms = self._between(lambda speeds, _: speeds.prompt_1024_ms - 1024e3 / speeds.prefill_tokens_per_s)
        return tokens * 1e3 / self.prefill_tokens_per_s() + max(0.0, overhead_ms)

    def requests_per_s(self, prompt: float, output: float, batch: int) -> float:
        """Return requests per second of an engine that is never idle, with `batch` sequences at a time; `prompt` and
        `output` are tokens per request. The estimate is about a tenth below the measured loads, because it ignores that
        prefill steps advance decoding sequences too."""
        step_s = self.itl_ms(batch, prompt + output / 2) / 1e3
        return 1 / (prompt / self.prefill_tokens_per_s() + output * step_s / batch)

    def _floor_ms(self, model: ModelSizes, batch: int, context: float) -> float:
        """Return the least time of a decode step on this GPU, in ms. Weights cost the longer of reading them and their
        operations; reading the KV of `context` tokens per sequence is added."""
        weights_s = max(model.read_bytes / self.gpu.bandwidth, 2 * model.gemm_parameters * batch / self.gpu.flops)
        return 1e3 * (weights_s + batch * context * model.kv_bytes / self.gpu.bandwidth)

    def _overhead_ms(self, batch: int) -> float:
        """Return the ms of a decode step beyond its floor at this batch size: the measured models' own overheads,
        interpolated to this model's size and, above the large model, scaled with the size."""

        def beyond_floor_ms(speeds: Speeds, each: ModelSizes) -> float:
            measured_ms = _interpolated(batch, BATCHES, speeds.itl_ms)
            return max(0.0, measured_ms - self._floor_ms(each, batch, DECODE_CONTEXT))

        return self._between(beyond_floor_ms, proportional=True)

    def _between(self, value_of: Callable[[Speeds, ModelSizes], float], *, proportional: bool = False) -> float:
        """Interpolate a value of the measured models for this model's size. Outside their sizes, return the value of
        the nearer one. Above the large one, scale it with the size if `proportional`."""
        small, large = (value_of(speeds, each) for speeds, each in self.measured)
        size = self.model.gemm_parameters
        share = math.log(size / SMALL.gemm_parameters) / math.log(LARGE.gemm_parameters / SMALL.gemm_parameters)
        if 0 <= share <= 1:
            return small + share * (large - small)
        nearest, value = (SMALL, small) if share < 0 else (LARGE, large)
        return value * (size / nearest.gemm_parameters if proportional and share > 1 else 1.0)


def _interpolated(at: float, places: tuple[int, ...], values: tuple[float, ...]) -> float:
    """Return the value at `at`, interpolated between `values` over the logarithm of `places`, which ascend. Before the
    first or beyond the last place, return the first or last value."""
    for (low, before), (high, after) in itertools.pairwise(zip(places, values, strict=True)):
        if at <= high:
            return before + (after - before) * max(0.0, math.log(at / low) / math.log(high / low))
    return values[-1]

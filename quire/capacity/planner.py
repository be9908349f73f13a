"""Computes replicas and memory for a load with latency limits, from a model's sizes and a GPU's speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter

from quire.capacity.measured import BATCHES, Gpu
from quire.capacity.model_sizes import ModelSizes
from quire.capacity.speed_model import SpeedModel
from quire.errors import FailedPrecondition

MOST_BATCH = BATCHES[-1]
_UTILIZATION = 0.9
"""The worker's default of --gpu-memory-utilization."""
_SPARE = 1
"""Replicas beyond those for the load, so that one may be down."""
_RESERVED_GIB = 4.0
"""Assumed memory of activations, CUDA graphs and fragmentation."""
_BUSIEST, _STEP = 0.8, 0.05
"""The plan uses at most `_BUSIEST` of a replica's capacity, because arrivals are uneven. It searches lower shares in
steps of `_STEP`."""


@dataclass(frozen=True)
class Load:
    """`requests_per_s` is the rate of all replicas together. Numbers of tokens are means. A latency limit of 0 is
    none."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The result. `replicas` are those for the load. `spare` is the number of extra replicas with which the load stays
    within its limits while one replica is down. `batch` is the number of sequences that a replica runs at a time.
    `busy` is the used share of a replica's capacity. `requests_per_s`, the GiB and the tokens are those of one replica.
    `kv_tokens` is the room of its KV cache, and `needed_kv_tokens` the part that `batch` mean requests fill. `basis`:
    see `SpeedModel.basis`."""

    replicas: int
    spare: int
    batch: int
    busy: float
    requests_per_s: float
    ttft_ms: float
    itl_ms: float
    weights_gib: float
    kv_gib: float
    kv_tokens: int
    needed_kv_tokens: int
    basis: str


def plan(gpu: Gpu, model: ModelSizes, load: Load) -> Plan:
    """Return the plan with the fewest replicas: it takes the batch size with which one replica keeps the limits at the
    highest rate. Raises FailedPrecondition if there is none: the model does not fit on the GPU, a request does not fit
    into the context, one request alone exceeds a limit, or no batch size keeps the limits."""
    speed = SpeedModel(gpu, model)
    kv_tokens = _kv_tokens(gpu, model, load)
    _check_alone(speed, load)
    batch, rate = max(((b, _most_requests_per_s(speed, load, b)) for b in _batches(kv_tokens, load)), key=itemgetter(1))
    if rate <= 0:
        raise _impossible(f"no replica keeps {load.ttft_ms:g} ms to the first and {load.itl_ms:g} ms between tokens")
    replicas = max(1, math.ceil(load.requests_per_s / rate))
    capacity = speed.requests_per_s(load.prompt_tokens, load.output_tokens, batch)
    busy = load.requests_per_s / replicas / capacity
    ttft_ms, itl_ms = _latencies(speed, load, batch, busy)
    return Plan(
        replicas=replicas,
        spare=_SPARE,
        batch=batch,
        busy=busy,
        requests_per_s=load.requests_per_s / replicas,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        weights_gib=model.weight_bytes / (1 << 30),
        kv_gib=kv_tokens * model.kv_bytes / (1 << 30),
        kv_tokens=kv_tokens,
        needed_kv_tokens=batch * (load.prompt_tokens + load.output_tokens),
        basis=speed.basis,
    )


def _most_requests_per_s(speed: SpeedModel, load: Load, batch: int) -> float:
    """Return the highest rate, in requests per second, at which one replica keeps the limits with at most `batch`
    sequences at a time. Shares of its capacity from 0.8 down to 0.05 are tried, in steps of 0.05. 0: none keeps the
    limits."""
    capacity = speed.requests_per_s(load.prompt_tokens, load.output_tokens, batch)
    for step in range(round(_BUSIEST / _STEP)):
        busy = _BUSIEST - step * _STEP
        ttft_ms, itl_ms = _latencies(speed, load, batch, busy)
        if (not load.ttft_ms or ttft_ms <= load.ttft_ms) and (not load.itl_ms or itl_ms <= load.itl_ms):
            return busy * capacity
    return 0.0


def _kv_tokens(gpu: Gpu, model: ModelSizes, load: Load) -> int:
    """Return the number of tokens for which the GPU's KV cache has room: nine tenths of the memory, less 4 GiB and the
    weights. Raises FailedPrecondition if one request is longer than that, or than the model's context."""
    length = load.prompt_tokens + load.output_tokens
    if length > model.context:
        raise _impossible(f"a request of {length} tokens is longer than the model's context of {model.context}")
    room = gpu.memory_gib * _UTILIZATION - _RESERVED_GIB - model.weight_bytes / (1 << 30)
    tokens = int(room * (1 << 30) / model.kv_bytes)
    if tokens < length:
        raise _impossible(
            f"{model.weight_bytes / (1 << 30):.1f} GiB of weights leave room for {max(0, tokens)} tokens on an "
            f"{gpu.name} of {gpu.memory_gib:g} GiB; one request has {length}"
        )
    return tokens


def _check_alone(speed: SpeedModel, load: Load) -> None:
    """Raise FailedPrecondition if one request on an idle replica already exceeds a limit."""
    first = speed.prompt_ms(load.prompt_tokens)
    if load.ttft_ms and first > load.ttft_ms:
        raise _impossible(f"one prompt of {load.prompt_tokens} tokens alone takes {first:.0f} ms to its first token")
    alone = speed.itl_ms(1, load.prompt_tokens + load.output_tokens / 2)
    if load.itl_ms and alone > load.itl_ms:
        raise _impossible(f"one sequence alone takes {alone:.1f} ms from token to token")


def _batches(kv_tokens: int, load: Load) -> list[int]:
    """Return the batch sizes to try, in order: all up to 16, then every eighth, and the largest. The largest is what
    fits into the KV cache, at most the largest measured one."""
    most = min(MOST_BATCH, kv_tokens // (load.prompt_tokens + load.output_tokens))
    return sorted({*range(1, min(most, 16) + 1), *range(16, most + 1, 8), most} - {0})


def _latencies(speed: SpeedModel, load: Load, batch: int, busy: float) -> tuple[float, float]:
    """Return the mean time to the first token and the mean time between tokens, in ms. They are for a replica that uses
    the share `busy` of its capacity, with at most `batch` sequences. Prefill slows decoding in proportion. The first
    token takes the wait, the prompt's own time and one step. The waiting time is that of a queue with random arrivals
    and constant service times (M/D/1)."""
    capacity = speed.requests_per_s(load.prompt_tokens, load.output_tokens, batch)
    running = max(1.0, busy * batch)
    step_ms = speed.itl_ms(math.ceil(running), load.prompt_tokens + load.output_tokens / 2)
    prefill = busy * capacity * load.prompt_tokens / speed.prefill_tokens_per_s()
    itl_ms = step_ms / max(0.05, 1 - prefill)
    prompt_ms = speed.prompt_ms(load.prompt_tokens)
    waiting_ms = busy / (2 * (1 - busy)) * max(prompt_ms, 1e3 / capacity)
    return prompt_ms + step_ms + waiting_ms, itl_ms


def _impossible(cause: str) -> FailedPrecondition:
    """Return the error NO_PLAN, with this cause."""
    return FailedPrecondition(
        "NO_PLAN", f"There is no plan: {cause}.", "Relax the limits, or choose a larger GPU or a smaller model."
    )

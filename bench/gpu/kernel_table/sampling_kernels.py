"""The cases of kernels that read a decode step's logits: sampling (greedy, and with limits), controls and logprobs. The
kernel that feeds tokens back is here too. Logits are as warm as the output head leaves them. The floor is the time to
read them once, for any kind of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench.gpu.kernel_table.kernel_case import Bench, KernelCase
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.ops.triton.controls import ControlColumns, change_logits
from quire_worker.ops.triton.feed import feed_tokens
from quire_worker.ops.triton.logprobs import packed_logprobs
from quire_worker.ops.triton.sampling import DeviceSamplingColumns, sample_rows
from quire_worker.profile.cost import Cost, controls_cost, logits_cost
from quire_worker.sampling.param_rows import rows_of
from quire_worker.sampling.state_layout import packed_state

_STOPS = 8
_ALTERNATIVES = 5
_PROMPT = 1024
_SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top_k 50, top_p 0.95": Sampling(temperature=0.8, top_k=50, top_p=0.95),
    "top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "min_p 0.05": Sampling(temperature=0.8, min_p=0.05),
    "typical_p 0.95": Sampling(temperature=0.8, typical_p=0.95),
}
# The draw and its settling; with thresholds the groups' maxima and the search before, and the nucleus between.
_LAUNCHES, _FILTERED = 2, 4


def sampling_cases(bench: Bench, batch: int) -> Iterator[KernelCase]:
    """Yield the cases of a step in which this many sequences decode."""
    vocab, element = bench.spec.vocab_size, bench.dtype.itemsize
    logits, last_token = bench.random(batch, vocab), bench.ids(batch)
    token, finish = (bench.full(batch, 0) for _ in range(2))
    greedy = _columns(bench, batch)
    read = logits_cost(batch, vocab, element)
    yield _feed(bench, batch, greedy, last_token)
    for name, asked in _SAMPLINGS.items():
        columns = replace(
            greedy,
            params=_params(bench, batch, asked),
        )
        filtered = bool(rows_of([asked])["filtered"].any())

        def drawn(_: int, columns: DeviceSamplingColumns = columns, filtered: bool = filtered) -> Tensor:
            sample_rows(logits, columns, last_token, token, finish, filtered=filtered, pdl=False)
            return token

        yield KernelCase(f"sampling, {name}", drawn, read, launches=_LAUNCHES + _FILTERED * filtered)
    yield _controls(bench, batch, logits, greedy, last_token)
    row = torch.arange(batch, dtype=torch.int32, device=bench.device)
    chosen = bench.ids(batch)
    most = min(_ALTERNATIVES, vocab)
    yield KernelCase(
        f"logprobs, {most} alternatives", lambda _: packed_logprobs(logits, chosen, row, most), read, launches=2
    )


def _columns(bench: Bench, batch: int) -> DeviceSamplingColumns:
    """Return columns for greedy sampling without stops."""
    return DeviceSamplingColumns(
        params=_params(bench, batch, Sampling()),
        position=bench.full(batch, _PROMPT),
        blocked=bench.full(batch, 0),
        stop_id=bench.full(batch * _STOPS, -1).view(batch, _STOPS),
        wanted=bench.full(batch, 1),
        last=bench.full(batch, 0),
        slot=torch.arange(batch, dtype=torch.int32, device=bench.device),
    )


def _params(bench: Bench, batch: int, sampling: Sampling) -> Tensor:
    """Return rows with the same parameters, and a seed for each row."""
    rows = rows_of([sampling] * batch)
    rows["seed"] = np.arange(batch)
    return torch.from_numpy(rows.view(np.int32)).to(bench.device)


def _feed(bench: Bench, batch: int, columns: DeviceSamplingColumns, last_token: Tensor) -> KernelCase:
    token, fed, slot = bench.full(batch, 0), bench.full(batch, 1), columns.slot
    # Five columns of int32, of which one is written.
    cost = Cost(1, 5 * 4 * batch)
    return KernelCase("feed tokens", lambda _: feed_tokens(token, fed, slot, slot, last_token), cost)


def _controls(bench: Bench, batch: int, logits: Tensor, drawn: DeviceSamplingColumns, last_token: Tensor) -> KernelCase:
    """Return the case in which every row has a frequency penalty, with its own prompt."""
    vocab, rng = bench.spec.vocab_size, np.random.default_rng(0)
    sampling = Sampling(controls=LogitControls(frequency_penalty=0.5))
    prompts = [rng.integers(0, vocab, _PROMPT).astype(np.int32) for _ in range(batch)]
    states = [
        torch.from_numpy(packed_state(Sequence(prompt, Stop(_PROMPT), sampling), vocab)).to(bench.device)
        for prompt in prompts
    ]
    columns = ControlColumns(
        address=torch.tensor([state.data_ptr() for state in states], dtype=torch.int64, device=bench.device),
        first_row=torch.arange(batch, dtype=torch.int32, device=bench.device),
        fed=bench.full(batch, 1),
        slot=drawn.slot,
        blocked=drawn.blocked,
        stop_id=drawn.stop_id,
    )

    def run(_: int) -> Tensor:
        if len(states) != batch:
            raise RuntimeError("a sheet is gone")
        return change_logits(logits, columns, last_token)

    return KernelCase("sampling, controls", run, controls_cost(batch, vocab, bench.dtype.itemsize))

"""Makes router objects for unit tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire_common.credit.hello import ModelInfo, PageGeometry
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_common.telemetry import tracing
from quire_router.loop_budget import LoopBudget
from quire_router.requests.catalog import ServedModel
from quire_router.requests.generation import Generation
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.job import Caller, GenerateJob, TextOptions, TextPrompt, Wants
from quire_router.sequences.sequence_state import SequenceState

MODEL = ModelInfo("m", "A", 100, 300, (256,), b"", PageGeometry(16, (), b""))


class NoTokenBytes:
    """Tokens are single bytes, of the ids' last ones."""

    async def ensure(self, ids: Any) -> None:
        list(ids)

    def get(self, token_id: int) -> bytes:
        return bytes([token_id % 256])


def make_job(*, n: int = 1, logprobs: int = -1, stop: tuple[str, ...] = (), **wants: bool) -> GenerateJob:
    return GenerateJob(
        model="m",
        prompts=(TextPrompt("pq"),),
        n=n,
        sampling=Sampling(temperature=1.0, logprobs=logprobs),
        text=TextOptions(stop=stop),
        wants=Wants(**{"stream": True, **wants}),
    )


def make_sequence(job: GenerateJob, delta_queue: DeltaQueue[SequenceState], index: int = 0) -> SequenceState:
    spec = Sequence(np.array([112, 113], np.int32), Stop(10), job.sampling)
    return SequenceState(index, 2 + 2 * index, job, spec, RequestContext("r"), delta_queue)


def make_generation(job: GenerateJob, loop_budget: LoopBudget | None = None) -> Generation:
    delta_queue = DeltaQueue[SequenceState]()
    sequences = [make_sequence(job, delta_queue, i) for i in range(job.n)]
    bytes_of: Any = NoTokenBytes()
    span = tracing.start_span("x")
    served = ServedModel("m", MODEL)
    return Generation(
        job,
        Caller("r"),
        served,
        sequences,
        delta_queue,
        bytes_of,
        loop_budget or LoopBudget(),
        0,
        lambda usage: None,
        span,
    )

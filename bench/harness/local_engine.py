"""LocalEngine: a scheduler core and a worker engine in one process, without gRPC, and with the device's thread only.

Benchmarks compare the five services with it, and exactness tests use it. It is free-running with two steps in flight,
as the services are; with `lockstep`, it waits for each step. It knows nothing of text.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from quire_common.credit import Report, WorkerHello
from quire_common.finish import FinishReason
from quire_common.sequence import RequestContext, Sequence
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from quire_worker.engine.engine import DEPTH, Engine
from quire_worker.loading import LoadedModel, LoadOptions, Quantize, load_model
from quire_worker.matcher.matcher_client import MatcherClient
from quire_worker.matcher.matcher_pool import MatcherPool
from quire_worker.model_source import model_info
from quire_worker.replica import ServedModel, from_host, on_host

SESSION = 1
"""Whose all requests are."""


@dataclass
class Served:
    """The result of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    error: str = ""


class LocalEngine:
    """One replica. Call `submit` with requests and their handles, then `run` until all are done."""

    def __init__(
        self,
        model: LoadedModel | ServedModel,
        name: str = "local",
        max_num_seqs: int = 64,
        num_pages: int = 0,
        *,
        lockstep: bool = False,
        matcher: MatcherClient | MatcherPool | None = None,
        **scheduler: object,
    ) -> None:
        pages = min(num_pages, model.num_pages) if num_pages else model.num_pages
        if isinstance(model, ServedModel):
            served = replace(model, num_pages=pages)
        else:
            served = ServedModel(on_host(model.runner), from_host(model.runner.pool), model_info(name, model), pages)
        spec = served.engine_spec(max_num_seqs)
        if matcher is not None:
            spec = replace(spec, masks=matcher.ring)
        device = served.make_device(spec, lockstep)
        self.close = weakref.finalize(self, device.close)
        self._step_ended = threading.Event()
        self._matcher = matcher
        device.wake = self._step_ended.set
        if matcher is not None:
            matcher.wake = self._step_ended.set
        self.engine = Engine(spec, device, depth=1 if lockstep else DEPTH, matcher=matcher)
        hello = WorkerHello(
            self.engine.epoch,
            spec.num_slots,
            max_num_seqs,
            (pages,),
            served.info,
            capabilities=(served.device,),
            max_row_tokens=spec.max_row_tokens,
            max_constrained_row_tokens=spec.max_constrained_row_tokens,
        )
        config = SchedulerConfig(lockstep=lockstep, **scheduler)  # type: ignore[arg-type]  # checked by the dataclass
        self.scheduler = Scheduler(config, hello)
        self.served: dict[int, Served] = {}
        self.reports: Callable[[Report], None] = lambda report: None

    def submit(self, handle: int, sequence: Sequence, tenant: str = "", priority: int = 0) -> None:
        """Queue a request."""
        context = RequestContext(f"r{handle}", tenant=tenant, priority=priority)
        self.scheduler.submit(SESSION, handle, context, sequence, time.time())
        self.served[handle] = Served()

    def abort(self, handle: int) -> None:
        """End a request."""
        self.scheduler.abort(SESSION, handle, time.time())

    def step(self) -> bool:
        """Run one round of grants, launches and reports. If there is nothing to do, wait for a step to end, or for the
        matcher. Returns False if nothing runs either. A round takes the reports of the steps that were in flight at its
        start, and not of steps that end meanwhile. Otherwise short steps would leave no time for grants, submits and
        aborts."""
        now = time.time()
        busy = False
        self._step_ended.clear()
        while (grant := self.scheduler.next_grant(now)) is not None:
            self.engine.apply(grant)
            busy = True
        busy |= self._launch()
        for _ in range(DEPTH):
            if (report := self.engine.collect()) is None:
                break
            busy = True
            self._launch()  # before the scheduler has its turn, so that the device need not wait for it
            self.reports(report)
            self._collect(self.scheduler.on_report(report, time.time()))
        self._collect(self.scheduler.take_outputs())
        if not busy and (self.engine.in_flight or (self._matcher is not None and self._matcher.sequences)):
            self._step_ended.wait()
            return True
        return busy

    def _launch(self) -> bool:
        launched = False
        while self.engine.launch():
            launched = True
        return launched

    def run(self) -> dict[int, Served]:
        """Serve all submitted requests. Raises RuntimeError if the replica makes no progress."""
        while not self.scheduler.idle:
            if not self.step():
                raise RuntimeError("requests are left but nothing can run")
        return self.served

    def check_quiet(self) -> None:
        """Check that all resources are released. Call this when all requests have ended."""
        while self.step():
            pass
        self.scheduler.check_integrity()
        self.engine.check_integrity()
        referenced = self.scheduler.load().referenced_pages
        if referenced:
            raise RuntimeError(f"{referenced} pages are still referenced")

    def _collect(self, outputs: list) -> None:  # type: ignore[type-arg]  # SessionOutputs, of which there is one
        for out in outputs:
            at = 0
            for handle, count, finish in zip(out.handle.tolist(), out.count.tolist(), out.finish.tolist(), strict=True):
                served = self.served[handle]
                served.tokens += out.token[at : at + count].tolist()
                at += count
                if finish:
                    served.finish = FinishReason(finish)
            if out.logprobs is not None:
                owner = out.handle.repeat(out.count)
                for index, value in zip(out.logprobs.token_index.tolist(), out.logprobs.logprob.tolist(), strict=True):
                    self.served[int(owner[index])].logprobs.append(value)
            for note in out.failed:
                self.served[note.handle].error = note.error.code


def load(
    model: str | Path,
    kv_cache_bytes: int = 512 << 20,
    threads: int = 1,
    page_size: int = 16,
    quantize: Quantize = "none",
) -> LoadedModel:
    """Load a model for in-process use."""
    torch.set_num_threads(threads)
    return load_model(model, LoadOptions(kv_cache_bytes=kv_cache_bytes, page_size=page_size, quantize=quantize))


def serve(model: LoadedModel, sequences: Mapping[int, Sequence], **options: object) -> dict[int, Served]:
    """Serve sequences together and check that nothing leaked."""
    local = LocalEngine(model, **options)  # type: ignore[arg-type]  # LocalEngine's own
    for handle, sequence in sequences.items():
        local.submit(handle, sequence)
    served = local.run()
    local.check_quiet()
    return served

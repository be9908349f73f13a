"""PacedReplica: a scheduler core and a worker engine with a made-up model, in one thread and without a clock, so that
runs are repeatable."""

from __future__ import annotations

from quire_common.credit import KvGroup, ModelInfo, PageGeometry, WorkerHello
from quire_common.sequence import RequestContext, Sequence
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from quire_worker.engine.device import InlineDevice
from quire_worker.engine.engine import Engine
from quire_worker.engine.spec import EngineSpec
from quire_worker.paced.facts import PacedFacts
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner

_NOW = 1_000_000.0


class PacedReplica:
    """Serves one request at a time. `cached` and `prefilled` are counts of tokens."""

    def __init__(self, num_pages: int, page_size: int = 16, **scheduler: object) -> None:
        facts = PacedFacts()
        self.facts = facts
        spec = EngineSpec(8, facts.max_model_len, facts.vocab_size, page_size, num_pages, facts.eos_token_ids)
        runner = PacedRunner(PageArray(num_pages, page_size), facts.vocab_size)
        self._engine = Engine(spec, InlineDevice(runner), depth=1)
        group = KvGroup("full", 8 * page_size, "token", "uint64", 1, 1, 1)
        info = ModelInfo(
            "paced",
            "PacedForCausalLM",
            facts.max_model_len,
            facts.vocab_size,
            facts.eos_token_ids,
            facts.digest,
            PageGeometry(page_size, (group,), b"paced"),
        )
        hello = WorkerHello(self._engine.epoch, spec.num_slots, 8, (num_pages,), info, capabilities=("cpu",))
        self.scheduler = Scheduler(SchedulerConfig(**scheduler), hello)  # type: ignore[arg-type]  # checked by the dataclass
        self._handle = 0

    def serve(self, sequence: Sequence) -> tuple[list[int], int]:
        """Serve a request alone. Returns its tokens, and how many of its prompt tokens came from the cache."""
        self._handle += 1
        tokens, cached = list[int](), 0
        self.scheduler.submit(1, self._handle, RequestContext(f"r{self._handle}"), sequence, _NOW)
        while not self.scheduler.idle:
            while (grant := self.scheduler.next_grant(_NOW)) is not None:
                cached += sum(start.cached_len for start in grant.start)
                self._engine.apply(grant)
            self._engine.launch()
            while (report := self._engine.collect()) is not None:
                for out in self.scheduler.on_report(report, _NOW):
                    tokens += out.token.tolist()
        self.scheduler.check_integrity()
        return tokens, cached

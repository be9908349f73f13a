"""An engine on a counting model, and the hand that writes its Grants: what the worker's tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.harness.plain_pages import ids
from quire_common.credit import Budget, Finish, Grant, PageMove, Report, Start
from quire_common.errors import QuireError
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_worker.engine.device import InlineDevice
from quire_worker.engine.engine import Engine
from quire_worker.engine.ports import Device, Observer, Runner
from quire_worker.engine.spec import EngineSpec
from quire_worker.engine.transfer_agent import KvTransferAgent
from tests.fakes.worker.counting_runner import CountingRunner

ROOMY = Budget(tokens_per_step=1000, prefill_tokens_beside_decoders=1000, chunk_cap=1000, partial_prefills=100)
GREEDY = Sampling()
CONTEXT = RequestContext("r")
LOCKSTEP = Budget(1000, 1000, 1000, 100, step_limit=1)


def small_spec(**changes: object) -> EngineSpec:
    sizes: dict[str, object] = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "vocab_size": 97,
        "page_size": 4,
        "num_pages": 64,
        "eos_token_ids": (),
    }
    return EngineSpec(**(sizes | changes))  # type: ignore[arg-type]  # tests name fields of the spec


def a_start(
    slot: int,
    prompt: list[int],
    pages: list[int],
    *,
    output: tuple[int, ...] = (),
    max_tokens: int = 8,
    limit: int = 1000,
    cached: int = 0,
    key: int = 0,
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    ignore_eos: bool = False,
    max_model_len: int = 64,
    sampling: Sampling = GREEDY,
    context: RequestContext = CONTEXT,
) -> Start:
    return Start(
        slot=slot,
        order_key=key,
        sequence=Sequence(ids(*prompt), Stop(max_tokens, min_tokens, stop, ignore_eos), sampling, ids(*output)),
        cached_len=cached,
        pages=(ids(*pages),),
        limit=limit,
        context=context,
        max_model_len=max_model_len,
    )


@dataclass
class Told:
    """Everything that Reports said, by slot."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, Finish] = field(default_factory=dict)
    errors: list[tuple[int, QuireError]] = field(default_factory=list)
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    prefill: dict[int, int] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.reports.append(report)
        first = 0
        for slot, count, finish in zip(
            report.slot.tolist(), report.count.tolist(), report.finish.tolist(), strict=True
        ):
            self.tokens.setdefault(slot, []).extend(report.token[first : first + count].tolist())
            first += count
            if finish:
                self.finish[slot] = Finish(finish)
        self.errors += report.error
        self.prefill.update(zip(report.prefill_slot.tolist(), report.prefill_position.tolist(), strict=True))
        for move, status, pages in zip(report.moved_id, report.moved_status, report.moved_pages, strict=True):
            self.moved[int(move)] = (int(status), int(pages))

    def codes(self) -> list[tuple[int, str]]:
        return [(slot, error.code) for slot, error in self.errors]


class EngineBench:
    """`grant(...)` applies the next Grant; `run()` steps until there is nothing to do; `told` is what came of it."""

    def __init__(
        self,
        spec: EngineSpec | None = None,
        transfer_agent: KvTransferAgent | None = None,
        observer: Observer | None = None,
        poison: int = -1,
        nan: int = -1,
        runner: Runner | None = None,
        depth: int = 1,
        device: Callable[[Runner], Device] = InlineDevice,
    ) -> None:
        self.spec = small_spec() if spec is None else spec
        self.runner = CountingRunner(self.spec.num_pages, self.spec.page_size, self.spec.vocab_size, poison, nan)
        self.device = device(self.runner if runner is None else runner)
        self.engine = Engine(self.spec, self.device, transfer_agent, observer, depth)
        self.seq = 0
        self.told = Told()

    def grant(
        self,
        *start: Start,
        stop: tuple[int, ...] = (),
        limit: dict[int, int] | None = None,
        grow: tuple[tuple[int, int], ...] = (),
        order: tuple[int, ...] = (),
        move: tuple[PageMove, ...] = (),
        budget: Budget | None = None,
    ) -> None:
        self.seq += 1
        limit = limit or {}
        self.engine.apply(
            Grant(
                epoch=self.engine.epoch,
                seq=self.seq,
                stop_slot=ids(*stop),
                stop_keep_pages=ids(*[0] * len(stop)),
                start=list(start),
                limit_slot=ids(*limit),
                limit_position=ids(*limit.values()),
                grow_slot=ids(*[slot for slot, _ in grow]),
                grow_group=ids(*[0] * len(grow)),
                grow_page=ids(*[page for _, page in grow]),
                order_slot=ids(*order),
                move=list(move),
                budget=ROOMY if budget is None and self.seq == 1 else budget,
            )
        )

    def step(self) -> Report | None:
        """Launch what may be launched, and take the next Report."""
        while self.engine.launch():
            pass
        report = self.engine.collect()
        if report is not None:
            self.told.add(report)
        self.engine.check_integrity()
        return report

    def run(self, most: int = 1000) -> Told:
        for _ in range(most):
            if self.step() is None:
                return self.told
        raise AssertionError(f"still busy after {most} steps")

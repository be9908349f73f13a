"""One replica of a pair in virtual time: the real scheduler core and the real engine between two delay lines, without a
kvstore. Its worker may be lost and come back as another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.v1 import worker_pb2
from quire_common.credit import RankAddress, StepTiming, WorkerHello, decode_report, encode_grant
from quire_common.errors import Unavailable
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from quire_worker.engine.engine import Engine
from tests.exactness.clients import LOST
from tests.exactness.subject import engine_spec
from tests.exactness.virtual.virtual_device import VirtualDevice
from tests.exactness.virtual.virtual_matcher import VirtualMatcher
from tests.exactness.virtual.virtual_peers import PeerAgent
from tests.exactness.virtual.virtual_time import DelayLine
from tests.exactness.virtual.virtual_worker import VirtualWorker
from tests.fakes.worker.checked_schedules import check_schedules

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from quire_scheduler.core.outputs import SessionOutputs
    from tests.exactness.prefill_decode.pd_scenario import PdScenario, SideWeather
    from tests.exactness.subject import Subject
    from tests.exactness.virtual.virtual_peers import Peers
    from tests.exactness.virtual.virtual_time import VirtualTime


class Side:
    """`hear` is told what the scheduler says to its one session, a while after it was said."""

    def __init__(
        self,
        name: str,
        subject: Subject,
        scenario: PdScenario,
        weather: SideWeather,
        time: VirtualTime,
        rng: np.random.Generator,
        peers: Peers,
        hear: Callable[[Side, list[SessionOutputs]], None],
    ) -> None:
        self.name = name
        self.peers = peers
        self._subject = subject
        self.weather = weather
        self._time = time
        self._rng = rng
        self._config = SchedulerConfig(
            max_num_batched_tokens=weather.tokens_per_step,
            long_prefill_token_threshold=weather.chunk,
            max_num_partial_prefills=weather.partial,
            enable_prefix_caching=weather.prefix_cache,
            transfer_lease_s=scenario.lease_us / 1e6,
            lockstep=weather.lockstep,
        )
        parts = subject.parts(weather.num_pages, scenario.seed)
        self._device = VirtualDevice(time, rng, parts.runner, parts.memory, weather.step_us, weather.settle)
        self._address = name.encode()
        self._transfer_agent = PeerAgent(time, rng, parts.pages, peers, scenario.peers, self._address)
        forced = scenario.constrained_row_tokens
        spec = engine_spec(subject, weather.rows, weather.num_pages, constrained_row_tokens=forced)
        self._matcher = None
        if scenario.matcher is not None:
            tokens = subject.backend, subject.scale.vocab_size
            self._matcher = VirtualMatcher(time, rng, *tokens, scenario.matcher, peers.events, forced)
        self.engine = Engine(
            spec,
            self._device,
            self._transfer_agent,
            depth=1 if weather.lockstep else weather.depth,
            matcher=None if self._matcher is None else self._matcher.client,
        )
        check_schedules(self.engine)
        self._worker = VirtualWorker(
            time, rng, self.engine, self._device, peers.events, think_us=weather.think_us, coalesce=weather.coalesce
        )
        self._device.wake = self._transfer_agent.wake = self._worker.wake
        if self._matcher is not None:
            self._matcher.client.wake = self._worker.wake
        self._pump_due = False
        self._says: DelayLine[list[SessionOutputs]] = DelayLine(
            time, rng, weather.router_us, lambda outputs: hear(self, outputs)
        )
        self._attach()

    @property
    def role(self) -> str:
        """As it is named for."""
        return self.name.partition("-")[0]

    def lose_worker(self) -> None:
        """Its worker dies: all that ran there is lost, and a new one is there at once."""
        self.collect(self.core.take_outputs())
        self.collect(self.core.worker_lost(Unavailable(LOST, "It is gone.", "Go elsewhere."), self._time.now_s))
        self.core.take_effects()
        self.engine.begin_run()
        self._attach()

    def changed(self) -> None:
        """Make Grants soon: the scheduler's loop, too, may be slow to notice."""
        if not self._pump_due:
            self._pump_due = True
            self._time.after(int(self._rng.integers(0, self.weather.think_us + 1)), self._pump)

    def collect(self, outputs: list[SessionOutputs]) -> None:
        """What is said goes to the router in order, each message a while later."""
        if outputs:
            self._says.send(outputs)

    def assert_at_rest(self) -> None:
        """Nothing is left: no request, no step, no page, no transfer."""
        self.engine.check_integrity()
        self.core.check_integrity()
        assert self.core.quiet, f"{self.name} is not quiet: {self.core.load()}"
        load = self.core.load()
        assert load.free_pages == load.pages and not load.referenced_pages, f"{self.name} keeps pages: {load}"
        assert not load.open_transfers, f"{self.name} keeps transfers"
        assert not self._device.in_flight and not self.engine.residents.table.started(), "a worker still works"
        ready, size = self.engine.residents.states.ready, self.engine.spec.page_size
        for page in self.core.names.pages(0).values():
            assert ready[page] == size, f"page {page} of {self.name} has a name and is not whole"

    def _attach(self) -> None:
        spec, run, weather = self.engine.spec, self.engine.epoch, self.weather
        info = self._subject.info
        if self._matcher is not None:
            info = replace(info, capabilities=(*info.capabilities, STRUCTURED_OUTPUT))
        hello = WorkerHello(
            run,
            spec.num_slots,
            spec.max_num_seqs,
            (spec.num_pages,),
            info,
            capabilities=("cpu",),
            data_address=(RankAddress(0, "tcp", self._address),),
        )
        self.core = Scheduler(self._config, hello, instance=self.name)
        line: DelayLine[bytes] = DelayLine(
            self._time, self._rng, weather.delay_us, lambda frame: self._worker.granted(run, frame)
        )
        reports = DelayLine(self._time, self._rng, weather.delay_us, self._reported)
        self._grants = line
        self._worker.attached(reports.send)

    def _reported(self, frame: bytes) -> None:
        report = decode_report(worker_pb2.Report.FromString(frame))
        report.timing = [StepTiming(0, 0, self.weather.step_us[1], 0, 0)] * report.steps
        self.collect(self.core.on_report(report, self._time.now_s))
        self.changed()

    def _pump(self) -> None:
        self._pump_due = False
        while (grant := self.core.next_grant(self._time.now_s)) is not None:
            self._grants.send(encode_grant(grant).SerializeToString())
        self.core.take_effects()
        self.collect(self.core.take_outputs())
        if self._rng.random() < 0.1:
            self.core.check_integrity()

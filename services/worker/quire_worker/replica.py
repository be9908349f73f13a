"""Replica: a ready worker. It consists of a loaded model with its engine, its model thread and its KV transfer
agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire_common.credit import Epoch, ModelInfo, MoveKind, WorkerHello
from quire_common.errors import ConfigError
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_common.transport import channel_credentials
from quire_worker.engine.device import InlineDevice, ThreadDevice
from quire_worker.engine.engine import DEPTH, Engine
from quire_worker.engine.run.run_loop import RunLoop
from quire_worker.engine.spec import STEP_TIMEOUT_S, EngineSpec
from quire_worker.kv_transfer.agent_process import COPY_BYTES, CUDA_COPY_BYTES, AgentProcess
from quire_worker.kv_transfer.composite_agents import AgentOnDemand, AgentsByKind
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from quire_worker.kv_transfer.setup import STORE_KINDS, AgentSetup
from quire_worker.matcher.matcher_factory import make_matcher
from quire_worker.observer import WorkerObserver

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_worker.config import WorkerConfig
    from quire_worker.engine.ports import Device, Drafter, PageBytes, RowGate, Runner
    from quire_worker.engine.transfer_agent import KvTransferAgent
    from quire_worker.kv_transfer.copier import Copier
    from quire_worker.kv_transfer.ring import Ring
    from quire_worker.matcher.matcher_pool import MatcherPool
    from quire_worker.sampling.logits_processor import LogitsProcessors
    from quire_worker.step_work import StepWork


MakeDevice = Callable[[EngineSpec, bool], "Device"]
"""A device for an engine of these sizes; True: the plain one of lockstep."""


MakeCopier = Callable[["Ring"], "Copier"]
"""What copies pages between the model's pool and the KV transfer agent's ring."""


def on_host(runner: Runner, drafter: Drafter | None = None, gate: RowGate | None = None) -> MakeDevice:
    """Return a function that makes devices for a synchronous runner, and for what drafts and holds its rows: on a
    thread of its own or, in lockstep, inside `launch`."""
    return lambda spec, lockstep: (
        InlineDevice(runner, drafter, gate) if lockstep else ThreadDevice(runner, spec.step_timeout_s, drafter, gate)
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the engine needs it. `num_pages` counts page 0; `device` is cpu or cuda."""

    make_device: MakeDevice
    make_copier: MakeCopier
    info: ModelInfo
    num_pages: int
    device: str = "cpu"
    logits_processors: LogitsProcessors = field(default_factory=dict)
    memory: bytes = b""
    """Descriptor of the pages' memory, which other workers of this host may open; empty: they may not."""
    max_step_tokens: int = 0
    """Most prompt tokens of a step that there is room for; 0: any number."""
    work: StepWork | None = None
    """Work of a step by the model's sizes, for metrics; None: not known."""
    max_row_tokens: int = 1
    """The most tokens that a decode row may sample in one step."""
    max_constrained_row_tokens: int = 1
    """The limit of a row whose sequence has a grammar: its drafts are forced tokens."""
    model_path: str = ""
    """The path from which the matcher reads the model's tokens, if its capabilities have structured output."""

    def engine_spec(self, max_num_seqs: int, num_slots: int = 0, step_timeout_s: float = STEP_TIMEOUT_S) -> EngineSpec:
        """Return the sizes and limits of an engine that runs this model. `num_slots` 0 stands for the default, 2.5
        slots for each of `max_num_seqs`. Raises ConfigError for a positive number that is below `max_num_seqs`."""
        if 0 < num_slots < max_num_seqs:
            raise ConfigError(
                "TOO_FEW_SLOTS",
                f"--num-slots {num_slots} is less than --max-num-seqs {max_num_seqs}.",
                "Every sequence that decodes needs a slot.",
                param="num_slots",
            )
        return EngineSpec(
            max_num_seqs=max_num_seqs,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            page_size=self.info.pages.page_size,
            num_pages=self.num_pages,
            eos_token_ids=self.info.eos_token_ids,
            slots=num_slots,
            logits_processors=self.logits_processors,
            max_row_tokens=self.max_row_tokens,
            max_constrained_row_tokens=self.max_constrained_row_tokens,
            step_timeout_s=step_timeout_s,
        )


def from_host(pages: PageBytes) -> MakeCopier:
    """Return a function that makes copiers between these pages, in main memory, and a ring."""
    return lambda ring: HostCopier(pages, ring)


class Replica:
    """The constructor starts the model thread and, if a kvstore is configured, its transfer agent; `close` ends them.
    The matcher's processes start with the first grammar, and the agent for other workers starts when it is needed.
    `on_fatal` gets the error that ends the model thread."""

    def __init__(self, config: WorkerConfig, loaded: ServedModel, on_fatal: Callable[[QuireError], None]) -> None:
        self.info = loaded.info
        self._loaded = loaded
        self._listeners = PeerListeners(config)
        self._peers = _make_peers(config, loaded, self._listeners)
        self._transfer_agent = _make_transfer_agents(config, loaded, self._listeners, self._peers)
        spec = loaded.engine_spec(config.sequences_on(loaded.device), config.num_slots, config.worker_timeout_s)
        self._matcher = _make_matcher(config, loaded)
        if self._matcher is not None:
            spec = replace(spec, masks=self._matcher.ring)
        self._device = loaded.make_device(spec, config.lockstep)
        observer, depth = WorkerObserver(loaded.work), 1 if config.lockstep else DEPTH
        self.engine = Engine(spec, self._device, self._transfer_agent, observer, depth, self._matcher)
        self.loop = RunLoop(self.engine, self.hello, on_fatal)
        self._device.wake = self.loop.wake
        self._transfer_agent.wake = self.loop.wake
        if self._matcher is not None:
            self._matcher.wake = self.loop.wake
        self.loop.start()

    def hello(self, epoch: Epoch) -> WorkerHello:
        """The hello for a scheduler that attaches: sizes, model, capabilities, and the addresses where other workers
        pull pages."""
        spec = self.engine.spec
        return WorkerHello(
            epoch=epoch,
            num_slots=spec.num_slots,
            max_num_seqs=spec.max_num_seqs,
            num_pages=(spec.num_pages,),
            model=self.info,
            capabilities=(self._loaded.device,),
            data_address=self._listeners.addresses,
            max_step_tokens=self._loaded.max_step_tokens,
            max_row_tokens=spec.max_row_tokens,
            max_constrained_row_tokens=spec.max_constrained_row_tokens,
            host=self._listeners.host,
        )

    def expect_peers(self) -> None:
        """Start the KV transfer agent for pages of other workers on another thread, unless it exists or no such moves
        are possible. From any thread."""
        if self._listeners.kinds:
            self._peers.begin()

    def close(self) -> None:
        """End the model thread, the device, the KV transfer agents and the matcher, and close the peer listeners. If
        one of them raises, the others are closed all the same, and the error is raised at the end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._listeners.close)
            if self._matcher is not None:
                stack.callback(self._matcher.close)
            stack.callback(self._transfer_agent.close)
            stack.callback(self._device.close)
            stack.callback(self.loop.close)


def _make_matcher(config: WorkerConfig, loaded: ServedModel) -> MatcherPool | None:
    """Return the engine's side of the matcher processes; None if the model's capabilities lack structured output.
    Starts no process yet."""
    if STRUCTURED_OUTPUT not in loaded.info.capabilities:
        return None
    row_tokens = loaded.max_constrained_row_tokens
    return make_matcher(config, loaded.model_path, loaded.info, loaded.device, row_tokens)


def _make_peers(config: WorkerConfig, loaded: ServedModel, listeners: PeerListeners) -> AgentOnDemand:
    """Return the KV transfer agent for pages of other workers, whose process starts when it is needed. Advertises the
    pool's GPU memory to workers of this host if it can be shared."""
    shares = listeners.advertise_memory(loaded.memory)
    setup = AgentSetup.of(
        config,
        loaded.info.pages,
        peers=True,
        peer_grpc=listeners.grpc_listen,
        peer_hosts=listeners.peer_hosts,
        shares_memory=shares,
    )
    return AgentOnDemand(lambda: _start(setup, loaded, listeners.inherited_fds))


def _make_transfer_agents(
    config: WorkerConfig, loaded: ServedModel, listeners: PeerListeners, peers: KvTransferAgent
) -> KvTransferAgent:
    """Return one KV transfer agent that passes each move on by its kind. Moves between workers, of the kinds that the
    listeners make possible, go to `peers`. If a kvstore is configured, its agent is started here and gets loads and
    stores. Other moves are refused. With a kvstore, raises ConfigError for bad TLS settings, and the errors of
    `AgentSetup.of`."""
    by_kind: dict[MoveKind, KvTransferAgent] = dict.fromkeys(listeners.kinds, peers)
    if config.kvstore:
        channel_credentials(config)  # what is wrong with them is to end the start, not every move
        by_kind |= dict.fromkeys(STORE_KINDS, _start(AgentSetup.of(config, loaded.info.pages), loaded, {}))
    return AgentsByKind(by_kind)


def _start(setup: AgentSetup, loaded: ServedModel, inherited: dict[str, int]) -> KvTransferAgent:
    """Start a KV transfer agent's process, with a copier for this model's device."""
    copy_bytes = CUDA_COPY_BYTES if loaded.device == "cuda" else COPY_BYTES
    return AgentProcess.start(setup, loaded.make_copier, copy_bytes=copy_bytes, inherited=inherited)

"""One scheduler as the router sees it: its load, its model and its session. The replica renews the session and the load
stream with a backoff when they end.

This module knows nothing of other replicas; placement/ decides which replica gets a request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire_common.errors import QuireError, from_rpc_error
from quire_common.structured.capability import capability_for
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff
from quire_router.placement.load import Load
from quire_router.replicas.scheduler_client import SchedulerClient
from quire_router.replicas.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit.hello import Epoch, ModelInfo
    from quire_common.ticket import Ticket
    from quire_router.config import RouterConfig
    from quire_router.placement.replica_table import ReplicaRow
    from quire_router.replicas.session import MakeDetokenizer
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.watchdog import Watchdog

log = get_logger(__name__)


class Replica:
    """One scheduler. `changed` is called at every change of its load or session, after which it may accept requests or
    accept them no longer. `row` is its row in the placement table. `lost` is called for each sequence that it drops."""

    def __init__(
        self,
        instance: str,
        address: str,
        config: RouterConfig,
        make_detokenizer: MakeDetokenizer,
        router_id: str,
        watchdog: Watchdog,
        lost: Callable[[SequenceState, EngineFailure], None],
        changed: Callable[[Replica], None],
        row: ReplicaRow,
    ) -> None:
        self.instance = instance
        self.address = address
        self.load = Load()
        # The epoch in the last load that had one.
        self.epoch: Epoch | None = None
        # The number of changes of the epoch. It changes when the worker or the scheduler has started again.
        self.restarts = 0
        self.model: ModelInfo | None = None
        self.row = row
        self.client = SchedulerClient(address, config)
        self.session = Session(
            instance,
            address,
            self.client.stub,
            make_detokenizer,
            router_id,
            watchdog,
            config.replica_timeout_s,
            lost,
            row,
        )
        self._role = ""
        self._on_change = changed
        self._serving = asyncio.Event()
        self._session_backoff = Backoff()

    @property
    def accepts(self) -> bool:
        """Whether new requests may be placed here now."""
        return self.load.phase == "ready" and self.model is not None and self.session.open

    @property
    def role(self) -> str:
        """The role that the scheduler has reported last: prefill, decode or both."""
        return self.load.role or self._role or "both"

    @property
    def in_flight(self) -> int:
        """The number of this router's sequences at the replica."""
        return len(self.session.sequences)

    def can_take(self, sequence: SequenceState) -> bool:
        """Whether the sequence could run at this replica now: the replica accepts, has a model of the sequence's name,
        and can apply its constraint. If the sequence is bound to a model, the replica needs instead a model with the
        same digest, under any name, and room for the sequence's greatest length."""
        model = self.model
        if model is None or not self.accepts:
            return False
        constraint = sequence.spec.constraint
        if constraint is not None and capability_for(constraint) not in model.capabilities:
            return False
        if sequence.bound_digest:
            return model.digest == sequence.bound_digest and model.max_model_len >= sequence.max_len
        return model.name == sequence.model

    def submit(self, sequence: SequenceState) -> None:
        """Start a sequence at this replica, and bind it to the replica's model. Call only if `can_take` returned
        True."""
        if self.model is not None:
            sequence.placement.bind_model(self.model.digest)
        self.session.submit(sequence)

    async def ticket(self, transfer_id: bytes, timeout_s: float) -> Ticket:
        """Return the ticket of a transfer that is open at the engine. Raises grpc.RpcError if the call fails, and
        InvalidArgument for a ticket that cannot be read."""
        return await self.client.ticket(transfer_id, timeout_s)

    async def run(self) -> None:
        """Follow the scheduler's load, keep a session with it, and run the session's Detokenize stream, until
        cancelled; then close the channel."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_load())
                tasks.create_task(self._keep_session())
                tasks.create_task(self.session.detokenizer.run())
        finally:
            await self.client.close()

    async def _watch_load(self) -> None:
        """Store each load that the scheduler reports. When the load stream ends or breaks, or a load cannot be read,
        store an empty load of the phase `unreachable`, and open the stream again after a backoff. Runs until
        cancelled."""
        backoff = Backoff()
        while True:
            try:
                async for load in self.client.watch_load():
                    backoff.reset()
                    self._set_load(load)
                reason = "the scheduler ended WatchLoad"
            except grpc.aio.AioRpcError as error:
                reason = from_rpc_error(error).message
            except Exception:
                log.exception("load stream failed", instance=self.instance)
                reason = "internal error"
            log.debug("load unknown", instance=self.instance, reason=reason)
            self._set_load(Load(phase="unreachable", detail="no answer"))
            await backoff.wait()

    async def _keep_session(self) -> None:
        """Whenever the scheduler is ready or drains, read its model and role and run a session. When the session ends
        or cannot begin, log the reason, report that the replica has changed, and begin again after a backoff. Runs
        until cancelled."""
        while True:
            await self._serving.wait()
            try:
                self.model, self._role = await self.client.model()
                await self.session.run(self.model.name, self._opened)
                reason = "the scheduler ended the session"
            except QuireError as error:
                reason = error.message
            except grpc.aio.AioRpcError as error:
                reason = from_rpc_error(error).message
            except Exception:
                log.exception("session failed", instance=self.instance)
                reason = "internal error"
            log.warning("session ended", instance=self.instance, reason=reason)
            self._changed()
            await self._session_backoff.wait()

    def _opened(self) -> None:
        """Reset the backoff and report that the replica may accept now."""
        self._session_backoff.reset()
        log.info("session open", instance=self.instance)
        self._changed()

    def _set_load(self, load: Load) -> None:
        """Store a load, also in the placement table, log a change of phase, and report the change. A new epoch counts
        as a restart of the engine. A ready or draining scheduler gets a session; in other phases no new one begins, but
        one that is open stays."""
        if load.phase != self.load.phase:
            log.info("scheduler phase", instance=self.instance, phase=load.phase, detail=load.detail)
        self.load = load
        self.restarts += None not in (load.epoch, self.epoch) and load.epoch != self.epoch
        self.epoch = load.epoch or self.epoch
        self.row.set_load(load)
        if load.phase in ("ready", "draining"):
            self._serving.set()
        else:
            self._serving.clear()
        self._changed()

    def publish(self) -> None:
        """Bring the replica's row in the placement table up to date."""
        self.row.publish(accepts=self.accepts, model=self.model, role=self.role)

    def _changed(self) -> None:
        self.publish()
        self._on_change(self)

"""The replicas of all schedulers that discovery names, and the models that they run. This module knows which replicas
can take a sequence now; placement/ chooses among them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.errors import Unavailable
from quire_common.structured.capability import structured_outputs_in
from quire_common.telemetry.logs import get_logger
from quire_router.ending_tasks import EndingTasks
from quire_router.placement.replica_table import ReplicaTable
from quire_router.replicas.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.credit.hello import Epoch, ModelInfo
    from quire_common.discovery import Endpoint
    from quire_router.config import RouterConfig
    from quire_router.placement.replica_table import ReplicaRow
    from quire_router.replicas.session import MakeDetokenizer
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.watchdog import Watchdog

_RETRY_AFTER_S = 2.0
log = get_logger(__name__)


class Fleet:
    """All replicas, by instance. All methods run in the event loop. `lost` is called for each sequence that a replica
    has dropped, and `changed` at each change of discovery's list or of a replica."""

    def __init__(
        self,
        config: RouterConfig,
        make_detokenizer: MakeDetokenizer,
        router_id: str,
        watchdog: Watchdog,
        lost: Callable[[SequenceState, EngineFailure], None],
        changed: Callable[[], None],
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.table = ReplicaTable()
        self._config = config
        self._make_detokenizer = make_detokenizer
        self._router_id = router_id
        self._watchdog = watchdog
        self._lost = lost
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = EndingTasks()
        self._models: dict[str, ModelInfo] = {}
        self._by_row: dict[int, Replica] = {}

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Apply the newest list of discovery: connect new schedulers, and drop schedulers that have left or have
        another address. A scheduler with another address is connected anew. Sequences of dropped schedulers move to
        other replicas. A dropped scheduler's model stays known, with the capabilities of its remaining replicas if
        there are any. Reports the change."""
        wanted = {endpoint.instance: endpoint for endpoint in endpoints}
        for instance, replica in list(self.replicas.items()):
            if instance not in wanted or wanted[instance].address != replica.address:
                log.info("scheduler left", instance=instance)
                del self.replicas[instance], self._by_row[replica.row.row]
                replica.row.drop()
                self._ending.drop(self._tasks.pop(instance))
                if replica.model is not None and (same := self._running(replica.model.name)):
                    self._remember(same[-1])
        for instance, endpoint in wanted.items():
            if instance not in self.replicas:
                replica = Replica(
                    instance,
                    endpoint.address,
                    self._config,
                    self._make_detokenizer,
                    self._router_id,
                    self._watchdog,
                    self._lost,
                    self._on_change,
                    self.table.add(instance),
                )
                self.replicas[instance] = self._by_row[replica.row.row] = replica
                self._tasks[instance] = asyncio.create_task(replica.run(), name=f"replica {instance}")
        self._changed()

    def models(self) -> list[ModelInfo]:
        """Return every model that a replica has ever reported, in the order of the first reports; of models with the
        same name, the one that was reported last. A model stays in the list while no replica that runs it is
        healthy."""
        return list(self._models.values())

    def accepting(self, sequence: SequenceState) -> list[Replica]:
        """Replicas that could run the sequence now."""
        return [replica for replica in self.replicas.values() if replica.can_take(sequence)]

    def epoch_of(self, instance: str) -> Epoch | None:
        """Return the last epoch that this replica has reported; None if it is not known. An epoch is one life of the
        replica's worker and scheduler."""
        replica = self.replicas.get(instance)
        return replica.epoch if replica is not None else None

    def still_runs(self, instance: str, epoch: Epoch) -> bool:
        """Whether this replica can be reached and is still in `epoch`. If so, no sequence that ran there has broken
        it."""
        replica = self.replicas.get(instance)
        return replica is not None and replica.session.open and replica.load.epoch == epoch

    def find(self, instance: str) -> Replica | None:
        """The replica of that name, if discovery names it."""
        return self.replicas.get(instance)

    def row_of(self, instance: str) -> ReplicaRow | None:
        """The replica's row in the placement table."""
        replica = self.replicas.get(instance)
        return replica.row if replica is not None else None

    def at(self, row: int) -> Replica:
        """The replica of a row of the table."""
        return self._by_row[row]

    @property
    def backlog(self) -> int:
        """The number of messages with engine steps that wait to be sent to tokenizers."""
        return sum(replica.session.detokenizer.backlog for replica in list(self.replicas.values()))

    @property
    def ready(self) -> bool:
        """Whether any replica accepts requests."""
        return any(replica.accepts for replica in self.replicas.values())

    async def close(self) -> None:
        """Cancel the tasks of all replicas, and wait for their end, also for those of replicas that were dropped."""
        for task in self._tasks.values():
            self._ending.drop(task)
        await self._ending.wait()

    def _on_change(self, replica: Replica) -> None:
        """Remember the model of a replica that has changed, unless the replica was dropped, and report the change."""
        if replica.model is not None and self.replicas.get(replica.instance) is replica:
            self._remember(replica.model)
        self._changed()

    def _remember(self, model: ModelInfo) -> None:
        """Store a model under its name, as a replica has reported it. The capabilities for constraints are those of all
        replicas with this model together, because a request with a constraint goes only to replicas that can apply
        it."""
        together = structured_outputs_in(each for same in self._running(model.name) for each in same.capabilities)
        capabilities = tuple(dict.fromkeys((*model.capabilities, *together)))
        self._models[model.name] = replace(model, capabilities=capabilities)

    def _running(self, name: str) -> list[ModelInfo]:
        """The model of this name as each of its replicas has it."""
        models = (replica.model for replica in self.replicas.values())
        return [model for model in models if model is not None and model.name == name]


def no_replica() -> Unavailable:
    """Make the error (Unavailable, NO_HEALTHY_REPLICA, retry after two seconds) for a request that no engine can
    take."""
    return Unavailable(
        "NO_HEALTHY_REPLICA",
        "No engine is ready to run this request.",
        "Retry after the given time; /readyz shows what each engine is doing.",
        retry_after_s=_RETRY_AFTER_S,
    )

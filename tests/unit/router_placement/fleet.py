"""A table of replicas, a page directory and the policies, without a router."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np

from quire_common.credit.hello import KvGroup, ModelInfo, PageGeometry
from quire_common.pages import chain_hashes
from quire_common.sequence import Sequence, Stop, page_extras
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_keys import page_keys
from quire_router.placement.disaggregation import Disaggregation, SplitOptions
from quire_router.placement.load import Load
from quire_router.placement.load_reservation import LoadReservation
from quire_router.placement.placement_request import PlacementRequest
from quire_router.placement.placer import Placer
from quire_router.placement.prefix_view import PrefixView
from quire_router.placement.registry import PAGE_AWARE, Weights, policies
from quire_router.placement.replica_table import ReplicaRow, ReplicaTable

PAGE = 16
GROUP = KvGroup("full", 1, "l", "f32", 1, 1, 1)


def model(name: str = "m", digest: bytes = b"d", *, groups: int = 1, namespace: bytes = b"n" * 32) -> ModelInfo:
    geometry = PageGeometry(PAGE, (GROUP,) * groups, namespace)
    return ModelInfo(name, "A", 4096, 300, (), digest, geometry)


def sequence(count: int, seed: int = 0, **fields: Any) -> Sequence:
    ids = np.random.default_rng(seed).integers(0, 300, count).astype(np.int32)
    return Sequence(ids, Stop(10), **fields)


class Fleet:
    """`count` replicas of one model, all of which accept."""

    def __init__(
        self,
        policy: str,
        count: int = 3,
        weights: Weights | None = None,
        split: SplitOptions | None = None,
        **geometry: Any,
    ) -> None:
        self.now_s = 0.0
        self.table = ReplicaTable()
        self.directory = PageDirectory(1 << 14, 10.0)
        self.view = PrefixView(self.table, self.directory, lambda: self.now_s)
        named = policies(policy, self.table, self.view, weights or Weights())
        view = self.view if policy in PAGE_AWARE else None
        self.split = Disaggregation(self.table, named, split or SplitOptions(), view)
        self.placer = Placer(self.table, named, view, self.split)
        self.model = model(**geometry)
        self.rows: list[ReplicaRow] = []
        for index in range(count):
            self.add(f"replica-{index}")

    def add(self, instance: str, role: str = "both", of: ModelInfo | None = None) -> ReplicaRow:
        row = self.table.add(instance)
        row.publish(accepts=True, model=of or self.model, role=role)
        row.set_holder(self.directory.open())
        row.set_load(Load("ready", max_num_seqs=10))
        self.rows.append(row)
        return row

    def load(self, index: int, running: int = 0, waiting_tokens: int = 0, rows: int = 10) -> None:
        self.rows[index].set_load(
            Load("ready", running=running, max_num_seqs=rows, waiting_prefill_tokens=waiting_tokens)
        )

    def measured(self, index: int, prefill: float = 0.0, pull: float = 0.0, **load: Any) -> None:
        """A replica says how fast it is: prompt tokens and bytes per second."""
        said = Load("ready", max_num_seqs=10, prefill_tokens_per_s=prefill, pull_bytes_per_s=pull, **load)
        self.rows[index].set_load(said)

    def sides(self, wanted: Sequence) -> tuple[int | None, int]:
        """Who prefills a sequence, if another than who decodes it, and who decodes it; by index."""
        chosen = self.split.choose(PlacementRequest(wanted), self.table.accepting_rows("m", None, 0))
        index = {row.row: at for at, row in enumerate(self.rows)}
        return None if chosen.prefill is None else index[chosen.prefill], index[chosen.decode]

    def hold(self, index: int, held: Sequence, pages: int = 1 << 30) -> None:
        """A replica says that it has the first pages of a sequence."""
        self.tell(int(self.table.holder[self.rows[index].row]), held, pages)

    def store(self, held: Sequence) -> None:
        """A kvstore says that it has a sequence."""
        self.view.stores["kvstore"] = self.directory.open()
        self.tell(self.view.stores["kvstore"], held)

    def follow(self, boot_id: int, *users: int) -> None:
        """All is known of that life of the kvstore; these replicas use it."""
        self.view.lives["kvstore"] = boot_id
        for index in users:
            self.rows[index].set_load(Load("ready", max_num_seqs=10, kvstore_boot_id=boot_id))

    def tell(self, holder: int, held: Sequence, pages: int = 1 << 30) -> None:
        """A holder says so."""
        hashes = chain_hashes(held.prompt_ids, PAGE, page_extras(held))[:pages]
        for group in range(len(self.model.pages.groups)):
            keys = page_keys(self.model.pages.namespace, group, hashes)
            self.directory.add(holder, keys)

    def place(
        self, wanted: Sequence, *, weight: int = 1, session: str = "", among: Sequence_[int] | None = None
    ) -> LoadReservation:
        able = self.table.accepting_rows("m", None, 0)
        rows = able if among is None else np.array([self.rows[index].row for index in among], np.intp)
        return self.placer.place(PlacementRequest(wanted, weight, session), rows)

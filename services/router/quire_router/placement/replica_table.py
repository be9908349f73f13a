"""ReplicaTable: the facts about replicas that placement uses, with a column per fact and a row per replica. So a
thousand replicas are scored at once.

Rows are numbers that are used again. The owner of a replica writes its row through a `ReplicaRow`, and policies read
the columns. This module knows nothing of sessions or streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from quire_common.structured.capability import structured_outputs_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.credit.hello import ModelInfo
    from quire_router.placement.load import Load

    Rows = NDArray[np.intp]
    Figures = NDArray[np.float64]

# What a replica is for, as bits.
PREFILL, DECODE = 1, 2
ROLES = {"prefill": PREFILL, "decode": DECODE, "both": PREFILL | DECODE}
# Prefill is measured in mixed steps, and pulls wait for pages to be computed: the best recent rate is nearest to what a
# replica can do. The rate decays slowly, and never below this share of the best of its kind: the router would not
# choose a replica that it believes to be slow, and so would never measure it again.
_RATE_KEPT = 0.998
_LEAST_OF_BEST = 0.5
# Pulls within a host are thought to be at least so many times as fast as those from others: most of both are measured
# while pages are computed, which hides what the way could do, and who is not asked is not measured.
NEAR_TIMES = 2.0
# Shorter prompts measure what a step costs.
_LEAST_MEASURED_TOKENS = 128


class PagePool(NamedTuple):
    """A pool of KV pages. Replicas of one pool have the same names for the same pages."""

    namespace: bytes
    page_size: int
    groups: int


class ReplicaTable:
    """`size` is the number of rows that were ever used. Columns have at least this length, because they grow by
    doubling. Rows without an owner accept no request."""

    def __init__(self) -> None:
        self.size = 0
        self.pools: list[PagePool] = []
        """By number; see `pool`."""
        self._models: dict[str, int] = {}
        self._digests: dict[bytes, int] = {}
        self._structured_outputs: dict[tuple[str, ...], int] = {}
        self._free: list[int] = []
        self._allocate(16)

    def _allocate(self, capacity: int) -> None:
        """Make all columns anew, with `capacity` rows at their defaults."""
        # Of its name: the same in all routers.
        self.name_hash: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        # What it runs, and whether it takes requests now.
        self.accepts: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self.model: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.digest: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.max_model_len: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # Number of the capabilities by which its worker applies constraints; 0: it does not.
        self.structured_output: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.pool: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.role: NDArray[np.int8] = np.zeros(capacity, np.int8)
        # Number of its worker's host, no more than there are rows, and the host's name, hashed; 0: nobody's neighbour.
        self.host: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.host_hash: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        # KV of a token.
        self.token_bytes: NDArray[np.float64] = np.zeros(capacity, np.float64)
        # What it said last of its load, all routers' requests included.
        self.running: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.waiting: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.batch: NDArray[np.int64] = np.ones(capacity, np.int64)
        self.queued_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # Prompt tokens that it computes and bytes of pages that it pulls per second, from other hosts and from its own;
        # 0: not measured.
        self.prefill_rate: NDArray[np.float64] = np.zeros(capacity, np.float64)
        self.pull_rate: NDArray[np.float64] = np.zeros(capacity, np.float64)
        self.near_rate: NDArray[np.float64] = np.zeros(capacity, np.float64)
        # How often it said so.
        self.reports: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # What this router sent since then: sequences, and prompt tokens that no cache was expected to have.
        self.sent: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.sent_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # Such tokens of this router's requests that have no token of their own yet.
        self.pending_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # Tokens of this router's requests whose pages are computed for it elsewhere, or were, and have not all come:
        # at other hosts, and at its own.
        self.pulling_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.pulling_near_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # The life of its kvstore, where that can be watched; 0: none, or not known.
        self.kvstore: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        # Its number in the page directory; -1: none.
        self.holder: NDArray[np.int64] = np.full(capacity, -1, np.int64)
        # Which life of the row it is.
        self.life: NDArray[np.int64] = np.zeros(capacity, np.int64)

    @property
    def several(self) -> bool:
        """Whether there is more than one replica."""
        return self.size - len(self._free) > 1

    def add(self, instance: str) -> ReplicaRow:
        """Give a new replica a row (a free one, or a new one at the end), and store the hash of its name there. Returns
        the handle by which the replica's owner writes the row."""
        if self._free:
            row = self._free.pop()
        else:
            row, self.size = self.size, self.size + 1
            if row == len(self.accepts):
                self._grow()
        self.name_hash[row] = xxhash.xxh3_64_intdigest(instance.encode())
        return ReplicaRow(self, row)

    def drop(self, row: int) -> None:
        """Reset a row whose replica has left, and free it. Its life ends, so that reservations from before have no
        effect."""
        life = int(self.life[row])
        for name, column in _columns(self):
            column[row] = 1 if name == "batch" else -1 if name == "holder" else 0
        self.life[row] = life + 1
        self._free.append(row)

    def accepting_rows(self, model: str, digest: bytes | None, max_len: int, *, structured_output: str = "") -> Rows:
        """Return the rows that accept a request now. With `digest` None, they must run a model of the name `model`.
        Otherwise they must run the model with this digest, with a context of at least `max_len` tokens.
        `structured_output`: only rows with this capability, which the request's constraint needs; '' means any row."""
        if digest is None:
            same = self.model == self._models.get(model, -1)
        else:
            same = (self.digest == self._digests.get(digest, -1)) & (self.max_model_len >= max_len)
        if structured_output:
            capable = [number for each, number in self._structured_outputs.items() if structured_output in each]
            same = same & np.isin(self.structured_output, capable)
        return np.flatnonzero(self.accepts & same)

    def prefills(self, rows: Rows, *, whole_too: bool) -> Rows:
        """Return the rows whose role is only to prefill; with `whole_too`, also the rows that prefill and decode."""
        role = self.role[rows]
        kept: Rows = rows[(role & PREFILL > 0) if whole_too else (role == PREFILL)]
        return kept

    def decodes(self, rows: Rows) -> Rows:
        """Return the rows whose role is to decode, or to prefill and decode."""
        kept: Rows = rows[self.role[rows] & DECODE > 0]
        return kept

    def rates(self, rows: Rows) -> Figures:
        """Return the prompt tokens per second that each row computes: its own rate, but at least half of the best rate
        of its model. A row without a rate gets the best rate of its model, or 0 if there is none."""
        own, best = self.prefill_rate[rows], self._best(self.prefill_rate, rows)
        return np.where(own > 0.0, np.maximum(own, _LEAST_OF_BEST * best), best)

    def pull_rates(self, rows: Rows) -> tuple[Figures, Figures]:
        """Return the bytes of pages per second that each row pulls from other hosts, and from its own host. A rate that
        was not measured is the best one of its model, or follows from the row's other rate. The rate within a host is
        at least twice the other. Both are 0 if neither is measured for the row or its model."""
        own_far, own_near = self.pull_rate[rows], self.near_rate[rows]
        far = np.where(own_far > 0.0, own_far, self._best(self.pull_rate, rows))
        near = np.where(own_near > 0.0, own_near, self._best(self.near_rate, rows))
        near = np.maximum(near, NEAR_TIMES * far)
        return np.where(far > 0.0, far, near / NEAR_TIMES), near

    def are_near(self, rows: Rows, row: int) -> NDArray[np.bool_]:
        """Return, for each row, whether its worker is on the host of `row`'s worker; False for all if this host is not
        known."""
        host = int(self.host[row])
        near: NDArray[np.bool_] = self.host[rows] == (host or -1)
        return near

    def knows_pages(self, pool: int) -> bool:
        """Whether some replica of this pool has reported its names of pages."""
        return self.pools[pool].page_size > 0 and self.pools[pool].groups > 0

    def load(self, rows: Rows) -> NDArray[np.float64]:
        """Return the load of each row: its running and waiting sequences and those that this router has just sent,
        divided by the size of its largest batch."""
        sequences: NDArray[np.float64] = (self.running[rows] + self.waiting[rows] + self.sent[rows]) / self.batch[rows]
        return sequences

    def queue(self, rows: Rows) -> NDArray[np.int64]:
        """Return the prompt tokens that each replica has yet to compute: the larger of two numbers. The first is the
        number that the replica last reported, plus the tokens that this router has sent since. The second is the number
        of tokens that this router's own requests still need there."""
        queue: NDArray[np.int64] = np.maximum(
            self.queued_tokens[rows] + self.sent_tokens[rows], self.pending_tokens[rows]
        )
        return queue

    def number_of(self, model: ModelInfo) -> tuple[int, int, int]:
        """Return the numbers by which the table names the model's name, its digest and its page pool. A new one gets
        the next number."""
        pool = PagePool(model.pages.namespace, model.pages.page_size, len(model.pages.groups))
        if pool not in self.pools:
            self.pools.append(pool)
        name = self._models.setdefault(model.name, len(self._models))
        return name, self._digests.setdefault(model.digest, len(self._digests)), self.pools.index(pool)

    def structured_output_of(self, model: ModelInfo) -> int:
        """Return the number of the capabilities with which the model's worker applies constraints; 0: it has none."""
        found = structured_outputs_in(model.capabilities)
        return self._structured_outputs.setdefault(found, 1 + len(self._structured_outputs)) if found else 0

    def host_number(self, name_hash: int) -> int:
        """Return the number of the host with this name hash: that of the rows that have this hash already, otherwise
        the lowest free number from 1 on."""
        members = np.flatnonzero(self.host_hash == np.uint64(name_hash))
        return int(self.host[members[0]] if len(members) else np.setdiff1d(np.arange(1, self.size + 2), self.host)[0])

    def _best(self, column: Figures, rows: Rows) -> Figures:
        """Return, for each of `rows`, the largest value of the column among all rows of the table with the same model.
        If the table knows only one model, return an array with a single value, which numpy broadcasts."""
        if len(self._digests) < 2:
            return np.array([column.max()])
        best = np.zeros(len(self._digests))
        np.maximum.at(best, self.digest, column)
        return best[self.digest[rows]]

    def _grow(self) -> None:
        """Grow the columns to twice the number of used rows, and keep their content."""
        old = dict(_columns(self))
        self._allocate(2 * self.size)
        for name, column in _columns(self):
            column[: len(old[name])] = old[name]


class ReplicaRow:
    """The row of one replica. After `drop` it has no effect."""

    def __init__(self, table: ReplicaTable, row: int) -> None:
        self.row = row
        self._table = table
        self._life = int(table.life[row])

    @property
    def _void(self) -> bool:
        """Whether `drop` was called, so that the row may belong to another replica."""
        return bool(self._table.life[self.row] != self._life)

    def publish(self, *, accepts: bool, model: ModelInfo | None, role: str = "both") -> None:
        """Write whether the replica accepts requests now, its model and its role to the table. Without a model it does
        not accept, and the row keeps its former model; an unknown role counts as `both`. Does nothing after `drop`."""
        table, row = self._table, self.row
        if self._void:
            return
        table.accepts[row] = accepts and model is not None
        table.role[row] = ROLES.get(role, PREFILL | DECODE)
        if model is not None:
            table.model[row], table.digest[row], table.pool[row] = table.number_of(model)
            table.max_model_len[row] = model.max_model_len
            table.structured_output[row] = table.structured_output_of(model)
            table.token_bytes[row] = sum(g.page_bytes for g in model.pages.groups) / max(1, model.pages.page_size)

    def set_load(self, load: Load) -> None:
        """Write a reported load to the table. The report includes requests that were sent before, so the counts of sent
        requests begin again at 0, and the report is counted. A rate rises at once, and falls slowly if the reported one
        is lower. Does nothing after `drop`."""
        table, row = self._table, self.row
        if self._void:
            return
        table.running[row], table.waiting[row], table.batch[row] = load.running, load.waiting, load.max_num_seqs
        table.queued_tokens[row] = load.waiting_prefill_tokens
        table.prefill_rate[row] = max(load.prefill_tokens_per_s, table.prefill_rate[row] * _RATE_KEPT)
        table.pull_rate[row] = max(load.pull_bytes_per_s, table.pull_rate[row] * _RATE_KEPT)
        table.near_rate[row] = max(load.near_pull_bytes_per_s, table.near_rate[row] * _RATE_KEPT)
        table.kvstore[row] = load.kvstore_boot_id
        self._set_host(load.host)
        table.sent[row] = table.sent_tokens[row] = 0
        table.reports[row] += 1

    def measure_prefill(self, tokens: int, us: int) -> None:
        """Raise the row's prefill rate if this prompt was computed faster: `tokens` in `us` microseconds. Prompts below
        128 tokens, or with a time of 0, are ignored. Does nothing after `drop`."""
        if not self._void and tokens >= _LEAST_MEASURED_TOKENS and us > 0:
            rate = self._table.prefill_rate
            rate[self.row] = max(rate[self.row], tokens / us * 1e6)

    def measure_pull(self, pages: int, us: int, *, near: bool = False) -> None:
        """Raise the row's pull rate if these pages, pulled in `us` microseconds, came faster (`near`: the rate of pulls
        within its own host). Pulls below 128 tokens, or with a time of 0, are ignored. Does nothing after `drop`."""
        if self._void or us <= 0:
            return
        table, row = self._table, self.row
        tokens = pages * table.pools[table.pool[row]].page_size
        if tokens >= _LEAST_MEASURED_TOKENS:
            rate = table.near_rate if near else table.pull_rate
            rate[row] = max(rate[row], tokens * table.token_bytes[row] / us * 1e6)

    def _set_host(self, host: bytes) -> None:
        """Write the worker's host to the table if the host has changed: the hash of its name, and a small number that
        stands for this hash in the table. Rows with the same number are on one host. An empty name means that the host
        is not known; hash and number are then 0."""
        table, row = self._table, self.row
        name_hash = (xxhash.xxh3_64_intdigest(host) or 1) if host else 0
        if name_hash != table.host_hash[row]:
            table.host_hash[row] = table.host[row] = 0
            table.host[row] = table.host_number(name_hash) if host else 0
            table.host_hash[row] = name_hash

    def set_holder(self, holder: int) -> None:
        """Write the replica's number in the page directory to the table; -1: it has none. Does nothing after `drop`."""
        if not self._void:
            self._table.holder[self.row] = holder

    def drop(self) -> None:
        """Free the row, since the replica has left. Idempotent."""
        if not self._void:
            self._table.drop(self.row)


def _columns(table: ReplicaTable) -> list[tuple[str, NDArray[np.generic]]]:
    return [(name, column) for name, column in vars(table).items() if isinstance(column, np.ndarray)]

"""LoadReservation: the load of a request that was sent to a replica, until the replica's own reports include it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire_router.placement.replica_table import ReplicaTable


class LoadReservation:
    """The reserved load of a request on its way. `tokens`, the uncached tokens of its prompt, count as pending at the
    replica until `release`. `pulled`: tokens whose pages come from another replica; they count from `start_pull` on.
    `near`: that replica is on the same host. `held_tokens`: see `PrefixView.held`."""

    __slots__ = ("_comes", "_life", "_near", "_pulled", "_report", "_table", "_tokens", "held_tokens", "row")

    def __init__(
        self,
        table: ReplicaTable,
        row: int,
        sequences: int,
        tokens: int,
        pulled: int = 0,
        *,
        near: bool = False,
        held_tokens: int | None = None,
    ) -> None:
        self.row = row
        self.held_tokens = held_tokens
        self._table = table
        self._life = int(table.life[row])
        self._report = int(table.reports[row])
        self._tokens = tokens
        self._pulled = pulled
        self._near = near
        self._comes = False
        table.sent[row] += sequences
        table.sent_tokens[row] += tokens
        table.pending_tokens[row] += tokens

    def start_pull(self) -> None:
        """Add the tokens whose pages are pulled to the replica's count of pulls, since their pages are now being
        computed and pulled. Idempotent. Does nothing after `release`, or if the row belongs to another replica by
        now."""
        if self._pulled and not self._comes and self._table.life[self.row] == self._life:
            self._comes = True
            self._pulling[self.row] += self._pulled

    def release(self) -> None:
        """Remove the request's tokens from the replica's counts of pending and pulled tokens. If the replica has not
        reported its load since the reservation, remove them from the tokens sent, too. The count of sequences sent
        stays until the next report. Call when the request has its first token or its pages there, or never will.
        Idempotent. Does nothing if the row belongs to another replica by now."""
        table, row = self._table, self.row
        if (self._tokens or self._comes) and table.life[row] == self._life:
            table.pending_tokens[row] -= self._tokens
            self._pulling[row] -= self._pulled if self._comes else 0
            if table.reports[row] == self._report:
                table.sent_tokens[row] -= self._tokens
        self._tokens = self._pulled = 0

    @property
    def _pulling(self) -> NDArray[np.int64]:
        return self._table.pulling_near_tokens if self._near else self._table.pulling_tokens

"""Replica: all the state of one replica in one epoch of its worker. Each part gets only what it needs of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import require
from quire_scheduler.batching.grant_policy import most_rows
from quire_scheduler.batching.slot_table import SlotTable
from quire_scheduler.core.deadlines import Deadlines
from quire_scheduler.core.expected_wait import ExpectedWait
from quire_scheduler.core.outputs import OutputBuffer
from quire_scheduler.core.pending_queue import PendingQueue
from quire_scheduler.core.queue_policy import POLICIES
from quire_scheduler.core.request_checks import RequestChecks
from quire_scheduler.core.stats import Rates, Stats
from quire_scheduler.disaggregation.handover_records import HandoverRecords
from quire_scheduler.disaggregation.holdings import Holdings
from quire_scheduler.disaggregation.pulls import Pulls
from quire_scheduler.disaggregation.transfers import Transfers
from quire_scheduler.kv.kv_traffic import KvTraffic
from quire_scheduler.kv.page_moves import PageMoves
from quire_scheduler.kv.page_names import PageNames
from quire_scheduler.kv.page_pools import PagePools
from quire_scheduler.kv.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.credit import WorkerHello
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.request import Request


class Replica:
    """Slots, pages, waiting requests, and the outputs for their sessions."""

    def __init__(self, config: SchedulerConfig, hello: WorkerHello, *, kvstore: bool, instance: str) -> None:
        self.config = config
        self.hello = hello
        self.page_size = hello.model.pages.page_size
        self.names = PageNames(len(hello.num_pages), config.page_events_tail)
        self.pools = PagePools(self.page_size, hello.num_pages, self._evicted)
        # Whether sequences' pages are identified by their content.
        self.identifies = config.enable_prefix_caching or kvstore
        self.cache = PrefixCache(
            self.pools, self.names, enabled=config.enable_prefix_caching, identifies=self.identifies
        )
        self.slots = SlotTable(hello.num_slots)
        self.waiting = PendingQueue(POLICIES[config.scheduling_policy]())
        self.stats = Stats()
        self.rates = Rates()
        geometry = hello.model.pages
        self.moves = PageMoves(self.pools, [group.page_bytes for group in geometry.groups])
        self.kv = KvTraffic(
            config, geometry, self.pools, self.names, self.moves, self.cache, self.stats, enabled=kvstore
        )
        self.transfers = Transfers(self.moves, self.stats, hello, instance, config.transfer_lease_s)
        self.outputs = OutputBuffer()
        self.handovers = HandoverRecords()
        self.pulls = Pulls(
            geometry,
            self.pools,
            self.moves,
            self.cache,
            self.kv,
            self.waiting,
            self.outputs,
            self.handovers,
            self.stats,
            host=hello.host,
            elsewhere=kvstore and config.enable_prefix_caching,
        )
        self.holdings = Holdings(self.pools, self.pulls, self.transfers, config.transfer_lease_s)
        rows = most_rows(config, hello)
        self.expected_wait = ExpectedWait(rows, self.slots, self.waiting, self.rates, self.kv.cost)
        self.admission = RequestChecks(config, hello, self.pools, self.waiting, self.expected_wait)
        self.deadlines = Deadlines()
        # By (session, handle): requests that have not ended.
        self.requests: dict[tuple[int, int], Request] = {}
        # Slots that the next Grant must stop.
        self.stops: list[int] = []
        self.next_seq = 1

    def stop_slot(self, slot: int) -> None:
        """Have the next Grant stop the slot."""
        self.stops.append(slot)

    def granted(self) -> None:
        """Note that the next Grant was made and carries all stops."""
        self.stops = []
        self.next_seq += 1
        self.stats.granted()

    def waiting_tokens(self) -> int:
        """Return the number of prompt and output tokens of the waiting requests. Perhaps fewer must be prefilled, since
        cached tokens count too. Requests that await a handover or have a pull are left out, because another engine
        computes their pages."""
        elsewhere = self.handovers.awaited() | self.pulls.pulling()
        return self.waiting.known_tokens - sum(map(self.waiting.tokens_of, elsewhere))

    def check_integrity(self) -> None:
        """Check slots, pending queue, moves, pools, KV traffic, transfers, handovers, pulls and prefix cache, most of
        them against the requests. Then check that the queue has all waiting requests and the right number of tokens,
        that exactly the requests with a slot or in PULLING or PULLED hold pages, and that none has more cached tokens
        than pages for them. Raises AssertionError on a difference. Outputs, deadlines and holdings are not checked."""
        self.slots.check_integrity()
        self.waiting.check_integrity()
        self.moves.check_integrity()
        written, read = self.moves.pages(written=True), self.moves.pages(written=False)
        self.pools.check_integrity(self.requests.values(), written, read)
        self.kv.check_integrity(self.requests.values())
        self.transfers.check_integrity()
        self.handovers.check_integrity(self.requests.values())
        self.pulls.check_integrity(self.requests.values())
        self.cache.check_integrity(self.requests.values(), self.slots.stopping())
        waiting = [request for request in self.requests.values() if request.waits]
        require(len(waiting) == len(self.waiting), "the pending queue was miscounted")
        computed = [r for r in waiting if not self.handovers.is_awaited(r) and not self.pulls.has_pull(r)]
        require(self.waiting_tokens() == sum(r.known_len for r in computed), "waiting tokens were miscounted")
        for request in self.requests.values():
            has_place = request.slot >= 0 or request.holds
            require(has_place == bool(request.tables), "pages without a slot, or a slot without pages")
            for table in request.tables:
                require(len(table) * self.page_size >= request.cached_tokens, "cached past the pages")

    def _evicted(self, group: int, pages: Sequence[int]) -> None:
        """Count those evicted pages that the kvstore lacks (see `offload.evicted`), and remove the names of all of
        them."""
        self.kv.offload.evicted(group, [digest for digest, _ in self.names.of(group, pages)])
        self.names.forget(group, pages)

"""Admission: decides which waiting requests take a slot. Requests start in order, while slots and pages last, and as
far ahead of need as the policy permits.

A request that pulls its pages from another engine has two turns: one for pages, whether slots are free or not, and one
for a slot when the pages have come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Start, start_bytes
from quire_common.logit_controls import control_values
from quire_scheduler.core.outputs import AdmittedNote
from quire_scheduler.core.request import State
from quire_scheduler.kv.prefix_cache import Hit

if TYPE_CHECKING:
    from quire_common.sequence import Sequence
    from quire_scheduler.batching.grant_policy import GrantPolicy
    from quire_scheduler.core.replica import Replica
    from quire_scheduler.core.request import Request

# The number of requests that are looked up before a slot is free for them, so that no slot is idle during a lookup's
# round trip.
_LOOK_AHEAD = 4
# The most bytes of one Grant's starts, except that a single start may be larger. gRPC carries 64 MiB, and megabytes
# delay steps.
MAX_START_BYTES = 8 * 1024 * 1024
# The most values of logit controls in one Grant, except that a single start may have more. The model thread prepares
# this many in some 10 ms.
MAX_START_VALUES = 128 * 1024


class Admission:
    """Decides which requests start with the next Grant. No request overtakes the queue's head. But a head that goes
    back to LOOKUP or is set aside is the head no more, and later requests may start before it. The states of waiting
    requests (LOOKUP, READY, PULLED) are explained in PendingQueue: LOOKUP waits for the kvstore's answer, READY for
    pages and a slot, and PULLED for a slot, since it has pages from another engine. The lead is how many positions a
    sequence should be able to run ahead."""

    def __init__(self, replica: Replica, policy: GrantPolicy) -> None:
        self._replica = replica
        self._policy = policy

    def plan_starts(self, now: float, *, may_start: bool) -> list[Start]:
        """Take requests from the queue policy, then start those at the queue's head for which slots and pages are free;
        a head with a ticket begins to pull instead. All of this takes effect here. Returns the Starts for the next
        Grant. Without `may_start`, requests are taken from the policy and looked up, but none is started and none
        begins to pull. Otherwise, before the starts, requests that were set aside return to the queue if they may pull
        now."""
        if not len(self._replica.waiting):
            return []
        most = self._most_started()
        self._make_ready(most, now)
        if not may_start:
            return []
        self._replica.pulls.recall_set_aside()
        return self._start_requests(most, now)

    def _most_started(self) -> int:
        """Return how many sequences may hold a slot now: as many as the policy permits, given how many reach their last
        position within the lead, but no more than there are slots."""
        slots, policy, ending = self._replica.slots, self._policy, 0
        if slots.num_active:
            active = slots.active_slots()
            left = slots.ceiling[active] + 1 - slots.known_len[active]
            ending = int(np.count_nonzero(left <= policy.lead()))
        return min(policy.most_started(ending), slots.num_slots)

    def _make_ready(self, most: int, now: float) -> None:
        """Take requests from the queue policy, until as many requests wait for a slot as slots are free for them, those
        included that were taken before, but not slow lookups (see `PendingQueue.count_before_slot`). `most` is the
        number of slots that may be held in all. At least one request may wait, and 4 more if there is a kvstore. A
        request whose order key is below those of all READY and PULLED requests, of which there is one at least, is
        taken in any case (see `PendingQueue.next_queued`).

        Each request is looked up in the kvstore, or made READY at once if a lookup is not wanted or would find nothing.
        `now`, in seconds, is the time at which the lookup begins.
        """
        waiting, kv = self._replica.waiting, self._replica.kv
        if not len(waiting.policy):
            return
        ahead = max(most - self._replica.slots.num_active, 1) + (_LOOK_AHEAD if kv.enabled else 0)
        while request := waiting.next_queued(ahead, now):
            local = self._replica.cache.match(request).pages if kv.enabled else 0
            wants = not self._replica.pulls.has_pull(request) and kv.wants_lookup(request, local)
            # The router may not know yet of pages that another replica has computed for a handover.
            spared = wants and kv.is_lookup_needless(request, local) and not self._replica.handovers.had_ticket(request)
            if wants and not spared:
                waiting.look_up(request, now)
                kv.look_up(request, local)
            else:
                if spared:
                    self._replica.stats.lookup_spared()
                waiting.make_ready(request)

    def _start_requests(self, most: int, now: float) -> list[Start]:
        """Start requests from the queue's head until slots, pages, the prompt tokens of standby sequences (see
        `_pages_to_start`), or the bytes and control values of one Grant run out; a single start may exceed the last
        two. `most` is the number of slots that may be held in all. Returns the Starts. If the head has a ticket, it
        takes pages and begins to pull instead; if its pages must be looked up, it goes back to LOOKUP."""
        replica, starts, left_bytes, left_values = self._replica, list[Start](), MAX_START_BYTES, MAX_START_VALUES
        slots, waiting = replica.slots, replica.waiting
        while request := waiting.head():
            if request.state is State.READY and replica.pulls.has_pull(request):
                if not self._begin_pull(request, now):
                    break
                continue
            if slots.num_active >= most or not slots.num_free:
                break
            hit, ceiling = self._pages_at_hand(request), self._ceiling(request)
            count = self._pages_to_start(request, hit, ceiling, now)
            if not count:
                break
            if request.state is State.READY and replica.kv.must_ask(request, hit.pages):
                waiting.look_up(request, now)
                replica.kv.look_up(request, hit.pages)
                continue
            sequence = request.resumed_sequence()
            left_bytes -= start_bytes(sequence, request.context, count * replica.pools.groups)
            controls = request.sequence.sampling.controls
            left_values -= 0 if controls is None else control_values(controls)
            if starts and min(left_bytes, left_values) < 0:
                # The head starts with the next Grant.
                break
            begin = self._take_pulled_pages if request.state is State.PULLED else self._take_pages
            waiting.pop_head()
            begin(request, hit, count)
            starts.append(self._give_slot(request, sequence, ceiling, now))
        return starts

    def _begin_pull(self, request: Request, now: float) -> bool:
        """Let the queue's head, which has a ticket, take its pages and begin to pull. If requests without a slot hold
        too many pages already, the head is set aside instead. Returns False if pages are lacking, and notes this, which
        may take pages back (see `_note_stuck`); then the head and all requests behind it wait."""
        replica = self._replica
        # Promised pages are not shared: their request may never fill them, and the worker does not tell a request
        # without a slot.
        hit, pages = replica.cache.match(request).whole(), replica.pulls.pages_needed(request)
        if not replica.pulls.has_share(pages):
            replica.waiting.set_aside(request)
            return True
        left = self._pages_left(hit.pages, replica.pools.free_beside(hit.tables))
        if pages > left:
            self._note_stuck(pages - left, request, now)
            return False
        replica.pulls.take_pages(request, hit, now)
        replica.holdings.moved_on()
        return True

    def _pages_at_hand(self, request: Request) -> Hit:
        """Return the pages that need not be allocated for the request: those found on the device, or its own that were
        pulled."""
        if request.state is State.PULLED:
            return Hit(request.tables, len(request.tables[0]))
        return self._replica.cache.match(request)

    def _pages_to_start(self, request: Request, hit: Hit, ceiling: int, now: float) -> int:
        """Return how many pages to start the request with, including those of `hit`: as many as its lead and the
        policy's slack need, or fewer if pages are short, but enough for its known tokens. 0: the request cannot start
        now. A request that is started beyond the policy's `rows` needs pages for its whole lead, and the prompt tokens
        of such requests are limited. Notes whether the head lacks pages, unless those prompt tokens keep it back. If
        the head lacks pages while no slot is held, this may take pages back from pulls and transfers (see
        `_note_stuck`)."""
        replica, policy = self._replica, self._policy
        slots, pools = replica.slots, replica.pools
        known, hit_pages, lead = request.known_len, hit.pages, policy.lead()
        if request.sequence.constraint is not None:
            lead += policy.extra_lead()
        least = pools.pages_for(known)
        wanted = pools.pages_for(max(min(known + lead + policy.slack(), ceiling), known))
        if slots.num_active >= policy.rows:
            # A standby sequence, which is started ahead of need, samples its first token with its prompt. If it then
            # lacks pages for its lead, it is taken back at once, and would be started and taken back for ever.
            least = pools.pages_for(max(min(known + lead + 1, ceiling), known))
            waiting_tokens = slots.waiting_tokens()
            computed = min(hit_pages * replica.page_size, known)
            if waiting_tokens and waiting_tokens + known - computed > policy.most_spare_tokens():
                return 0
        held = hit_pages if request.state is State.PULLED else 0
        left = max(self._pages_left(hit_pages, pools.free_beside(hit.tables)), held)
        if least <= left:
            replica.holdings.moved_on()
            replica.expected_wait.note_pages(lacking=False)
            return max(min(wanted, left), held)
        self._note_stuck(least - left, request, now)
        return 0

    def _pages_left(self, held: int, free: int) -> int:
        """Return how many pages a request that holds `held` pages may have in all, while `free` pages are free. Pages
        that running sequences need soon are kept back, and pages for all requests in LOOKUP that were READY before; the
        result may be negative. While no slot is held, nothing is kept back."""
        replica, policy = self._replica, self._policy
        slots = replica.slots
        if not slots.num_active:
            return held + free
        # Pages that running sequences need soon stay free, lest a start cause a preemption at once. A standby sequence
        # also leaves them the pages of their lead.
        spare = slots.num_active >= policy.rows
        kept, extra = replica.page_size, 0
        if spare:
            kept, extra = kept + policy.lead() + policy.slack(), policy.extra_lead()
        active = slots.active_slots()
        missing = slots.missing_pages(active, slots.reach(active, kept, extra), replica.page_size)
        # A start does not take the pages of an earlier request that is looked up again either.
        asking = sum(replica.pools.pages_for(tokens) for tokens in replica.waiting.tokens_of_repeated_lookups())
        return held + free - int(missing.sum()) - asking

    def _note_stuck(self, lacking: int, head: Request, now: float) -> None:
        """Note that the queue's head lacks `lacking` pages. If no slot is held, `holdings` may take pages back from
        pulls and transfers; otherwise the head does not count as stuck, because running sequences will free pages."""
        self._replica.expected_wait.note_pages(lacking=True)
        if self._replica.slots.num_active:
            self._replica.holdings.moved_on()
        else:
            self._replica.holdings.reclaim_if_stuck(lacking, head, now)

    def _take_pages(self, request: Request, hit: Hit, count: int) -> None:
        """Give a READY request its pages: those of `hit`, and newly allocated ones up to `count`. The pages that the
        kvstore has begin to load, and the prefix cache is told."""
        replica, hit_pages = self._replica, hit.pages
        # The pages of the hit are shared first, lest they be evicted for the new ones.
        replica.pools.share(request, hit.tables)
        replica.pools.give(request, count - hit_pages)
        loaded = replica.kv.load_pages(request, hit_pages)
        replica.cache.begin(request, hit, loaded)
        cached = loaded * replica.page_size
        request.took_pages(hit_pages * replica.page_size, cached, cached)

    def _take_pulled_pages(self, request: Request, hit: Hit, count: int) -> None:
        """Give a PULLED request, which holds the pages of `hit`, more pages up to `count`, and end its pull. The tokens
        whose KV was pulled count as cached. In the prefix cache, the pages that were pulled completely count as ready;
        they are not offered to the kvstore."""
        replica, size = self._replica, self._replica.page_size
        replica.pools.give(request, count - hit.pages)
        local, came = replica.pulls.hand_over(request)
        whole = came // size
        replica.kv.load_pages(request, whole)
        replica.cache.begin(request, Hit(tuple(table[:whole] for table in request.tables), whole), whole)
        request.took_pages(local * size, came, whole * size)
        replica.kv.offload.skip(request, whole)

    def _give_slot(self, request: Request, sequence: Sequence, ceiling: int, now: float) -> Start:
        """Give the request a slot and return its Start. `sequence`: `request.resumed_sequence()`. At the request's
        first start, its session gets an AdmittedNote. A prefill-only request begins its transfer, or goes on with it at
        a later start; the note has the transfer's ticket, if there is one."""
        replica = self._replica
        if replica.cache.enabled:
            replica.stats.searched_device(request.known_len, request.local_tokens)
        capacity = len(request.tables[0]) * replica.page_size
        slot = replica.slots.take_slot(request, replica.next_seq, ceiling, capacity)
        request.timing.started(now)
        replica.rates.start(request.known_len, request.cached_tokens)
        ticket = replica.transfers.begin_transfer(request, now) if request.prefill_only else None
        if not request.admitted:
            request.admit()
            note = AdmittedNote(request.handle, request.context.attempt, request.saved_tokens, ticket)
            replica.outputs.admitted(request.session, note)
            replica.stats.admitted(request.prompt_len, request.saved_tokens)
        return Start(
            slot=slot,
            order_key=request.order_key,
            sequence=sequence,
            cached_len=request.cached_tokens,
            pages=tuple(np.array(table, np.int32) for table in request.tables),
            limit=min(capacity, ceiling),
            context=request.context,
            max_model_len=replica.admission.max_len,
        )

    def _ceiling(self, request: Request) -> int:
        """Return the number of positions of the request that may ever be computed here: those of its prompt and
        max_tokens, or of the longest sequence, less the last token, whose KV is never needed. A prefill-only request
        computes only its known tokens."""
        if request.prefill_only:
            return request.known_len
        longest = request.prompt_len + request.sequence.stop.max_tokens
        return min(longest, self._replica.admission.max_len) - 1

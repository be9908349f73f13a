"""SlotTable: which request held which slot under which Grants, and the per-slot columns that every step reads.

A token belongs to the sequence whose start had been applied at the token's step, which is not always the sequence that
holds the slot when the Report arrives. When a Grant stops a slot, the use of the slot is remembered until the worker
has retired the stop, since late tokens may come until then. This module does not know where pages are, and knows
sessions only by their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.errors import Internal, require
from quire_scheduler.batching.token_matrix import TokenMatrix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_scheduler.core.request import Request


FREE = np.iinfo(np.int64).max


class SlotUse(NamedTuple):
    """A request held a slot for the steps that applied Grants start_seq <= seq < stop_seq."""

    request: Request
    start_seq: int
    stop_seq: int


class SlotTable:
    """Columns by slot. In rows of free slots, `active` is False, `holder` is None and `start_seq` is FREE; the other
    columns have no meaning."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.holder: list[Request | None] = [None] * num_slots
        self.active: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        # The Grant that started the sequence; FREE if the slot has none.
        self.start_seq: NDArray[np.int64] = np.full(num_slots, FREE, np.int64)
        self.order_key: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        # Tokens known when the sequence was started.
        self.start_len: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        # Prompt and output tokens that the scheduler has seen.
        self.known_len: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        # Whether the sequence has a grammar.
        self.constrained: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        # Positions that the sequence may ever compute.
        self.ceiling: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        # Positions that its pages cover.
        self.capacity: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        # Positions whose KV is computed or loaded, as far as prefill progress was reported.
        self.computed: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        # Positions whose pages have been named, as far as they are full.
        self.named: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.session: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.handle: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        # Whether no token has come since the start.
        self.prefilling: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        # Known tokens that are not yet in the output of their request.
        self.tokens = TokenMatrix(num_slots)
        self.num_active = 0
        self.num_constrained = 0
        self.num_prefilling = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._former: dict[int, list[SlotUse]] = {}

    @property
    def num_free(self) -> int:
        """The number of slots in which a Grant may start a sequence."""
        return len(self._free)

    def take_slot(self, request: Request, seq: int, ceiling: int, capacity: int) -> int:
        """Give the request a slot from Grant `seq` on, fill the slot's columns, and return the slot's number.
        `ceiling`: the positions that the request may ever compute; `capacity`: those that its pages cover. The caller
        has checked `num_free`."""
        slot, known = self._free.pop(), request.known_len
        self.holder[slot] = request
        self.active[slot] = True
        self.start_seq[slot] = seq
        self.order_key[slot] = request.order_key
        self.start_len[slot] = self.known_len[slot] = known
        self.ceiling[slot] = ceiling
        self.capacity[slot] = capacity
        self.computed[slot] = request.cached_tokens
        self.named[slot] = known
        self.session[slot] = request.session
        self.handle[slot] = request.handle
        self.prefilling[slot] = True
        self.num_active += 1
        self.num_prefilling += 1
        constrained = request.sequence.constraint is not None
        self.constrained[slot] = constrained
        self.num_constrained += constrained
        request.take_slot(slot)
        return slot

    def end_prefill(self, slot: int) -> None:
        """Note that the slot's sequence, which was prefilling, has sampled its first token since its start."""
        self.prefilling[slot] = False
        self.num_prefilling -= 1

    def finish(self, slot: int) -> None:
        """Free a slot whose sequence the worker ended by itself; no row of it follows."""
        self._vacate(slot)

    def stop(self, slot: int, seq: int) -> None:
        """Free a slot that Grant `seq` stops. The use of the slot is remembered until `retire`, since rows of steps
        that applied earlier Grants still belong to its sequence."""
        request = self.held(slot)
        self._former.setdefault(slot, []).append(SlotUse(request, int(self.start_seq[slot]), seq))
        self._vacate(slot)

    def held(self, slot: int) -> Request:
        """Return the request that holds the slot. Raises Internal if the slot is free."""
        request = self.holder[slot]
        if request is None:
            raise Internal("INTEGRITY", f"Slot {slot} has no sequence.", "Report it with the scheduler's log.")
        return request

    def ready_len(self, slot: int) -> int:
        """Return how many positions of the slot's sequence are certainly computed; 0 if no token has come since its
        start."""
        return 0 if self.prefilling[slot] else int(self.known_len[slot]) - 1

    def longest_unnamed(self, least: int) -> int | None:
        """Return the slot with the most computed tokens since its pages were last named, or None if it has fewer than
        `least`. Slots without a token since their start do not count. A page is named when its block hash is recorded,
        so that caches can find it."""
        tokens = np.where(self.active & ~self.prefilling, self.known_len - 1 - self.named, 0)
        slot = int(tokens.argmax())
        return slot if tokens[slot] >= least else None

    def waiting_tokens(self) -> int:
        """Return the number of tokens that are still to be prefilled, in slots without a token since their start."""
        if not self.num_prefilling:
            return 0
        active = np.flatnonzero(self.active & self.prefilling)
        # A late report of a former holder's progress may exceed the tokens of the present one.
        return int(np.maximum(self.known_len[active] - self.computed[active], 0).sum())

    def reach(self, slots: NDArray[np.intp], lead: int, extra: int) -> int | NDArray[np.int32]:
        """Return how many positions past its known ones each of these slots should reach: `lead`, and `extra` more if
        its sequence has a grammar. The result is one number if it is the same for all slots."""
        return lead + np.int32(extra) * self.constrained[slots] if extra and self.num_constrained else lead

    def missing_pages(
        self, slots: NDArray[np.intp], reach: int | NDArray[np.int32], page_size: int
    ) -> NDArray[np.int32]:
        """Return how many pages each slot lacks to compute `reach` positions past its known ones, but not past its
        ceiling. `reach` is one number for all slots, or one for each."""
        wanted = np.minimum(self.known_len[slots] + reach, self.ceiling[slots])
        missing: NDArray[np.int32] = np.maximum(-(-wanted // page_size) - self.capacity[slots] // page_size, 0)
        return missing

    def append_tokens(self, slot: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """Append tokens (rows by step, columns by slot) to the slots, which are distinct and held. If a slot has no
        room, its earlier tokens move to its request's output first."""
        for full in self.tokens.full_slots(slot, len(token)).tolist():
            self.settle_output(full)
        self.tokens.put_tokens(slot, token)
        self.known_len[slot] += len(token)

    def append_rows(self, slot: NDArray[np.int32], count: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """Append to each of the slots, which are distinct and held, its `count` tokens, 0 or more. `token` has the
        tokens of all slots one after the other. If a slot has no room, its earlier tokens move to its request's output
        first. If a slot gets more tokens than the token matrix is wide, all slots' tokens go directly to the
        outputs."""
        full = self.tokens.full_slots(slot, count)
        for each in full.tolist():
            self.settle_output(each)
        if len(full) and int(count.max()) > self.tokens.most:
            ends = count.cumsum().tolist()
            for each, some, end in zip(slot.tolist(), count.tolist(), ends, strict=True):
                self.settle_output(each)
                self.held(each).output.extend(token[end - some : end].tolist())
        else:
            self.tokens.put_rows(slot, count, token)
        self.known_len[slot] += count

    def settle_output(self, slot: int) -> None:
        """Move the slot's tokens to the output of its request."""
        if self.tokens.count[slot]:
            self.held(slot).output.frombytes(self.tokens.take_tokens(slot))

    def held_since(self, slot: NDArray[np.int32], applied: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each row, whether it belongs to its slot's present holder; the array form of `held_at`."""
        return self.start_seq[slot] <= applied

    def may_have_former_rows(self, slot: int) -> bool:
        """Whether a row of the slot may still belong to a former holder."""
        return slot in self._former

    def active_slots(self) -> NDArray[np.intp]:
        """Return the slots that hold a sequence."""
        return self.active.nonzero()[0]

    def held_at(self, slot: int, applied: int) -> Request | None:
        """Return the request to which a row of the slot belongs, given the last Grant that the row's step had applied.
        Returns None if the worker had ended that request's sequence by itself, or the stop is retired."""
        if self.start_seq[slot] <= applied:
            return self.holder[slot]
        for use in self._former.get(slot, ()):
            if use.start_seq <= applied < use.stop_seq:
                return use.request
        return None

    def retire(self, retired: int) -> list[Request]:
        """Forget the former uses of slots whose stop the worker has retired, since no late token can come for them.
        Returns their requests."""
        if not self._former:
            return []
        done = []
        for slot, uses in list(self._former.items()):
            done += [use.request for use in uses if use.stop_seq <= retired]
            if left := [use for use in uses if use.stop_seq > retired]:
                self._former[slot] = left
            else:
                del self._former[slot]
        return done

    def stopping(self) -> list[Request]:
        """Return the requests whose stop has not retired."""
        return [use.request for uses in self._former.values() for use in uses]

    def check_integrity(self) -> None:
        """Raise AssertionError if the active slots, their number, the holders and the free list disagree, if prefilling
        sequences or those with grammars are miscounted, or if the request that holds a slot names another slot, or has
        another session, handle or number of tokens than the slot's columns. The other columns are not checked."""
        held = [slot for slot, request in enumerate(self.holder) if request is not None]
        require(held == self.active_slots().tolist() and len(held) == self.num_active, "active slots were miscounted")
        constrained = int(np.count_nonzero(self.constrained & self.active))
        require(constrained == self.num_constrained, "sequences with grammars were miscounted")
        prefilling = int(np.count_nonzero(self.prefilling & self.active))
        require(prefilling == self.num_prefilling, "prefilling sequences were miscounted")
        require(sorted(self._free) == sorted(set(range(self.num_slots)) - set(held)), "a slot is lost")
        for slot in held:
            request = self.holder[slot]
            if request is not None:
                names = (self.session[slot], self.handle[slot]) == (request.session, request.handle)
                require(request.slot == slot and names, f"slot {slot} names another request than its own")
                known = request.known_len + self.tokens.count[slot]
                require(self.known_len[slot] == known, f"slot {slot} lost count of its tokens")

    def _vacate(self, slot: int) -> None:
        """Move the slot's tokens to its request's output, take the slot from the request, and free it."""
        self.settle_output(slot)
        self.held(slot).leave_slot()
        self.start_seq[slot] = FREE
        self.holder[slot] = None
        self.active[slot] = False
        self.num_active -= 1
        self.num_constrained -= int(self.constrained[slot])
        self.num_prefilling -= int(self.prefilling[slot])
        self._free.append(slot)

"""A small deterministic worker in memory: it counts tokens instead of computing them, but keeps KV pages for real.

A position's "KV" is a hash of all tokens up to it, written to the page that the slot's table names. Before a token is
sampled, every position is read back: a page that was given away too early, shared while written or loaded wrongly makes
the worker raise. A start waits until its cached range is there, and ends with PAGES_LOST where it will not be. The next
token is a function of that hash, so it does not depend on batches, chunks or preemption. With `depth` > 1 steps are
reported late, and their writes happen again at completion, as a late kernel's would; and steps that were launched
before a sequence's end was seen write rubbish past its end, as masked rows may.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from quire_common.credit import (
    Budget,
    Epoch,
    Finish,
    Grant,
    KvGroup,
    LogprobColumns,
    ModelInfo,
    PageGeometry,
    RankAddress,
    Report,
    Start,
    StepTiming,
    WorkerHello,
)
from quire_common.errors import Internal, QuireError
from tests.fakes.worker.counted_answer import EOS, sample
from tests.fakes.worker.counted_answer import undisturbed as undisturbed
from tests.fakes.worker.fake_damage import FakeDamage
from tests.fakes.worker.fake_moves import FakeMoves
from tests.fakes.worker.fake_slots import Launched, Slot
from tests.fakes.worker.page_watermarks import Watermarks


def make_hello(
    *,
    num_pages: int = 65,
    page_size: int = 4,
    max_num_seqs: int = 4,
    num_slots: int = 0,
    max_model_len: int = 256,
    vocab_size: int = 97,
    groups: int = 1,
    run: int = 1,
) -> WorkerHello:
    kv = tuple(KvGroup(f"g{i}", 64, "kv_head.layer.kv.token.dim", "float32", 1, 1, 4) for i in range(groups))
    model = ModelInfo(
        "counting", "CountingModel", max_model_len, vocab_size, (EOS,), b"d" * 32, PageGeometry(page_size, kv, b"ns")
    )
    return WorkerHello(
        Epoch(7, run), num_slots or max_num_seqs * 5 // 2, max_num_seqs, (num_pages,) * groups, model, ("cpu",)
    )


def with_address(hello: WorkerHello, name: bytes) -> WorkerHello:
    """By which other fake workers find it to pull pages."""
    return replace(hello, data_address=(RankAddress(0, "fake", name),))


class FakeWorker:
    """`deliver` Grants, call `step`: applies them, launches at most one step, reports what completed."""

    def __init__(
        self,
        hello: WorkerHello,
        *,
        depth: int = 1,
        coalesce: int = 1,
        store: dict[bytes, list[int]] | None = None,
        rng: np.random.Generator | None = None,
        fail_moves: float = 0.0,
        lose_pages: float = 0.0,
        peers: dict[bytes, FakeWorker] | None = None,
    ) -> None:
        self.hello = hello
        self.store = {} if store is None else store
        self.grants: deque[Grant] = deque()
        self.slots: dict[int, Slot] = {}
        # Boundaries that a move takes, and what the worker says that steps and moves take.
        self.move_turns = (0, 4)
        self.step_us, self.move_us = 0, 100
        self.refuse_moves = False
        # The kvstore never has room for the last page of a store.
        self.crowded_store = False
        # Sequences end by this error where they would draw a token.
        self.draw_error: QuireError | None = None
        self.damage = FakeDamage(self)
        self.max_decoders = 0
        self.max_partial = 0
        self.steps_launched = 0
        self.steps_done = 0
        self.seen: list[Grant] = []
        self._depth, self._coalesce = depth, coalesce
        # What the next Report will tell of.
        self._done: list[Launched] = []
        self._moved: list[tuple[int, int, int]] = []
        self._unacknowledged = False
        self.rng = rng or np.random.default_rng(0)
        self.fail_moves, self._lose_pages = fail_moves, lose_pages
        # Workers whose pages may be pulled, this one among them, by what their addresses say.
        self.peers = {} if peers is None else peers
        self.peers |= {address.descriptor: self for address in hello.data_address}
        self.page_size = hello.model.pages.page_size
        self.kv = [np.full((n, self.page_size), -1, np.int64) for n in hello.num_pages]
        self.marks = [Watermarks(n, self.page_size) for n in hello.num_pages]
        # Slots that were ended because their cached range will not come, by the Grant that was applied then.
        self._lost: list[tuple[int, int]] = []
        self._credit: int | None = 0
        self._budget: Budget | None = None
        self._applied = 0
        self._applied_log: list[tuple[int, int]] = []
        self._flying: deque[Launched] = deque()
        self.moves = FakeMoves(self)
        # Sequences that have ended on the device, by the step that ended them.
        self._ghosts: list[tuple[int, Slot]] = []

    @property
    def moving(self) -> bool:
        """Moves are in flight."""
        return bool(self.moves)

    def deliver(self, grant: Grant) -> None:
        self.grants.append(grant)

    def step(self) -> Report | None:
        """One boundary: apply, launch, complete what is due, report. None where nothing happened, or where up to
        `coalesce` steps are to travel together.
        """
        self._unacknowledged |= bool(self.grants)
        while self.grants:
            self._apply(self.grants.popleft())
        self._moved += self.moves.turn()
        self._admit()
        launched = self._launch()
        if self._flying and (len(self._flying) >= self._depth or not launched):
            self._done.append(self._complete(self._flying.popleft()))
        if not (self._unacknowledged or self._moved or self._done or self._lost):
            return None
        if launched and self._coalesce > 1 and len(self._done) < self._coalesce:
            return None
        done, moved = self._done, self._moved
        self._done, self._moved, self._unacknowledged = [], [], False
        return self._report(done, moved)

    def _apply(self, grant: Grant) -> None:
        assert grant.epoch == self.hello.epoch and grant.seq == self._applied + 1, "Grants out of order"
        self._applied = grant.seq
        self._applied_log.append((grant.seq, self.steps_launched))
        self.seen.append(grant)
        for slot in grant.stop_slot.tolist():
            if (stopped := self.slots.get(slot)) is not None:
                stopped.stopped = True
                self._end(slot)
            # A stopped slot has no rows from here on, not even masked ones.
            self._ghosts = [(ended, ghost) for ended, ghost in self._ghosts if ghost.start.slot != slot]
        granted = [
            (group, page)
            for start in grant.start
            for group, table in enumerate(start.pages)
            for page in table[start.cached_len // self.page_size :].tolist()
        ]
        granted += zip(grant.grow_group, grant.grow_page, strict=True)
        flying = {(group, page) for step in self._flying for group, page, _, _ in step.writes}
        assert not flying.intersection(granted), "a page was granted that a step in flight may still write"
        for start in grant.start:
            self._start(start)
        for slot, position in zip(grant.limit_slot.tolist(), grant.limit_position.tolist(), strict=True):
            if slot in self.slots:
                self.slots[slot].limit = position
        grows = zip(grant.grow_slot.tolist(), grant.grow_group.tolist(), grant.grow_page.tolist(), strict=True)
        for slot, group, page in grows:
            assert page > 0, "page 0 was granted"
            if slot in self.slots:
                self.slots[slot].tables[group].append(page)
                self.marks[group].claim([page], self.slots[slot])
        for move in grant.move:
            self.moves.begin(move)
        self.moves.cancel(grant.cancel_move.tolist())
        if grant.budget is not None:
            self._budget = grant.budget
            if grant.budget.step_limit == 0:
                self._credit = None
            else:
                self._credit = (self._credit or 0) + grant.budget.step_limit

    def _start(self, start: Start) -> None:
        assert start.slot not in self.slots and 0 <= start.slot < self.hello.num_slots, f"slot {start.slot} is taken"
        sequence = start.sequence
        slot = Slot(start, start.cached_len, start.limit, [list(map(int, t)) for t in start.pages])
        for token in [*sequence.prompt_ids.tolist(), *sequence.output_ids.tolist()]:
            slot.append(token)
        assert start.cached_len < sequence.known_len, "the last token must be computed"
        for group, table in enumerate(slot.tables):
            assert min(table) > 0 and len(table) * self.page_size >= start.limit
            assert len(set(table)) == len(table), "a page twice in a table"
            whole, begun = divmod(start.cached_len, self.page_size)
            self.marks[group].claim(table[whole:], slot, begun)
        self.slots[start.slot] = slot

    def _end(self, index: int) -> None:
        slot = self.slots.pop(index)
        for group, table in enumerate(slot.tables):
            self.marks[group].leave(table, slot)

    def _admit(self) -> None:
        """Slots whose cached range is there may run; the highest order key is judged first."""
        waiting = [(index, slot) for index, slot in self.slots.items() if slot.waiting]
        for index, slot in sorted(waiting, key=lambda s: -s[1].start.order_key):
            cached = slot.computed // self.page_size
            verdicts = [
                marks.judge(slot.tables[group][:cached], self._refs(group)) for group, marks in enumerate(self.marks)
            ]
            if "lost" in verdicts:
                self._end(index)
                self._lost.append((self._applied, index))
            elif "wait" not in verdicts:
                ready = min(int(verdict) for verdict in verdicts)
                for group, marks in enumerate(self.marks):
                    marks.claim(slot.tables[group][ready:cached], slot)
                slot.waiting = False
                if ready < cached:
                    slot.computed = ready * self.page_size

    def _refs(self, group: int) -> dict[int, int]:
        refs: dict[int, int] = {}
        for slot in self.slots.values():
            for page in slot.tables[group]:
                refs[page] = refs.get(page, 0) + 1
        return refs

    def _launch(self) -> bool:
        if self._credit == 0 or self._budget is None:
            return False
        budget, step = self._budget, Launched(self._applied)
        live = sorted((s for s in self.slots.items() if not s[1].waiting), key=lambda s: s[1].start.order_key)
        live = [(i, s) for i, s in live if s.computed < self._reach(s)]
        decoders = [(i, s) for i, s in live if s.decodes][: self.hello.max_num_seqs]
        for index, slot in decoders:
            self._compute(step, index, slot, 1)
        tokens = budget.tokens_per_step - len(decoders)
        if decoders:
            tokens = min(tokens, budget.prefill_tokens_beside_decoders)
        # Prefills take no decode row: spares get their first token while all rows are busy, and then wait.
        partial = budget.partial_prefills
        for index, slot in live:
            if slot.decodes or tokens <= 0 or index not in self.slots:
                continue
            left = min(self._reach(slot), len(slot.tokens)) - slot.computed
            chunk = min(left, tokens, budget.chunk_cap)
            if chunk < left:
                if not partial:
                    continue
                partial -= 1
            self._compute(step, index, slot, chunk)
            tokens -= chunk
            step.prefill_tokens += chunk
        if not (step.rows or step.prefill):
            return False
        if self._credit is not None:
            self._credit -= 1
        self._haunt(step)
        self.steps_launched += 1
        self.max_decoders = max(self.max_decoders, len(decoders))
        self.max_partial = max(self.max_partial, budget.partial_prefills - partial)
        self._flying.append(step)
        return True

    def _reach(self, slot: Slot) -> int:
        """Positions that the slot may compute: never past its pages."""
        return min(slot.limit, len(slot.tables[0]) * self.page_size)

    def _compute(self, step: Launched, index: int, slot: Slot, count: int) -> None:
        if self._lose_pages and self.rng.random() < self._lose_pages:
            step.rows.append((index, [], int(Finish.ERROR)))
            step.errors.append((index, Internal("PAGES_LOST", "lost", "none")))
            self._end(index)
            return
        prefill = not slot.decodes
        for position in range(slot.computed, slot.computed + count):
            place, offset = divmod(position, self.page_size)
            value = slot.prefixes[position]
            for group, table in enumerate(slot.tables):
                page = table[place]
                if not offset:
                    self.damage.pages.discard((group, page))
                self.marks[group].check_writer(page, slot)
                self.kv[group][page, offset] = value
                step.filled.append((slot, group, page, offset + 1))
                step.writes.append((group, page, offset, value))
        slot.computed += count
        if prefill:
            step.prefill.append((index, slot.computed))
        if slot.computed < len(slot.tokens):
            return
        error = self.damage.draw_error(slot, count)
        if error is not None:
            step.prefill = [(filled, computed) for filled, computed in step.prefill if filled != index]
            step.rows.append((index, [], int(Finish.ERROR)))
            step.errors.append((index, error))
            self._end(index)
            return
        self._read_back(slot)
        model, start = self.hello.model, slot.start
        longest = min(start.max_model_len, model.max_model_len)
        token, finish = sample(start.sequence, slot.tokens, slot.prefixes[-1], model.vocab_size, longest)
        slot.append(token)
        step.rows.append((index, [token], int(finish)))
        step.logprobs.append(start.sequence.sampling.logprobs >= 0)
        if finish:
            self._end(index)
            self._ghosts.append((self.steps_launched, slot))

    def _haunt(self, step: Launched) -> None:
        self._ghosts = [(ended, slot) for ended, slot in self._ghosts if ended >= self.steps_done]
        for ended, slot in self._ghosts:
            position = len(slot.tokens) - 1
            if ended < self.steps_launched and position < self._reach(slot):
                page, offset = divmod(position, self.page_size)
                step.writes += [(group, table[page], offset, -7) for group, table in enumerate(slot.tables)]

    def _read_back(self, slot: Slot) -> None:
        want = np.frombuffer(slot.prefixes, np.int64)
        for group, table in enumerate(slot.tables):
            got = self.kv[group][table].reshape(-1)[: len(want)]
            if len(got) != len(want) or (got != want).any():
                raise AssertionError(f"KV of slot {slot.start.slot} is not its own: {slot.start.context.request_id}")

    def _complete(self, step: Launched) -> Launched:
        for group, page, offset, value in step.writes:
            self.kv[group][page, offset] = value
        for slot, group, page, upto in step.filled:
            if not slot.stopped:
                self.marks[group].fill(page, upto)
        self.steps_done += 1
        return step

    def _report(self, done: list[Launched], moved: list[tuple[int, int, int]]) -> Report:
        retired = max((seq for seq, launched in self._applied_log if launched <= self.steps_done), default=0)
        self._applied_log = [entry for entry in self._applied_log if entry[0] >= retired]
        rows = [row for step in done for row in step.rows]
        report = Report(
            self.hello.epoch,
            first_step=self.steps_done - len(done) + 1,
            retired=retired,
            in_flight=len(self._flying),
            step_applied=np.array([step.applied for step in done], np.int64),
            step_rows=_ids(len(step.rows) for step in done),
            step_prefill_tokens=_ids(step.prefill_tokens for step in done),
            slot=_ids(row[0] for row in rows),
            count=_ids(len(row[1]) for row in rows),
            token=_ids(token for row in rows for token in row[1]),
            finish=np.array([row[2] for row in rows], np.uint8),
            prefill_slot=_ids(slot for step in done for slot, _ in step.prefill),
            prefill_position=_ids(position for step in done for _, position in step.prefill),
            moved_id=np.array([m[0] for m in moved], np.int64),
            moved_status=np.array([m[1] for m in moved], np.uint8),
            moved_pages=_ids(m[2] for m in moved),
            moved_us=_ids(self.move_us for _ in moved),
            timing=[StepTiming(0, 0, self.step_us, 0, 0) for _ in done] if self.step_us else [],
            running=min(len(self.slots), self.hello.max_num_seqs),
            spare=max(len(self.slots) - self.hello.max_num_seqs, 0),
            stalled_slot=_ids(i for i, s in self.slots.items() if not s.waiting and s.computed >= self._reach(s)),
            error=[error for step in done for error in step.errors],
        )
        due = [slot for applied, slot in self._lost if applied <= retired]
        self._lost = [entry for entry in self._lost if entry[0] > retired]
        report.error += [(slot, Internal("PAGES_LOST", "will not come", "none")) for slot in due]
        asked = [i for i, wants in enumerate(w for step in done for w in step.logprobs) if wants]
        if asked:
            token = report.token[asked]
            report.logprobs = LogprobColumns(
                _ids(asked), -token.astype(np.float32), _ids(1 for _ in asked), _ids(1 for _ in asked), token,
                -token.astype(np.float32),
            )  # fmt: skip
        return report


def _ids(values: Any) -> np.ndarray:
    return np.fromiter(values, np.int32)


def with_epoch(hello: WorkerHello, run: int) -> WorkerHello:
    return replace(hello, epoch=Epoch(hello.epoch.boot_id, run))

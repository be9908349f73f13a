"""Whatever is late, lost, aborted, given up or short of pages: a request that is prefilled here and decoded there ends
with the tokens of the undisturbed run, each transfer ends once, and nothing is left on either side."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import Unavailable
from quire_common.finish import FinishReason
from quire_common.sequence import Sequence
from quire_common.ticket import KvTransfer
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.disaggregation.handover import NO_TRANSFER
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.scheduler.split_rig import DECODE
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed, with_address
from tests.tiers import examples

LEASE_S = 0.05
KEY = tuple[int, int]


@dataclass(frozen=True)
class Ask:
    at: int
    prompt: int
    seed: int
    max_tokens: int
    resumed: int
    ignore_eos: bool
    # Both sides, or one alone; and a lease of the client's own.
    kind: str
    detached: bool
    # Turns that the router takes for an errand, when it gives up waiting, and when the client leaves.
    late: int
    impatient_at: int | None
    abort_at: int | None
    # The router forgets to tell of what was pulled.
    forgetful: bool
    # What the router believes of its pages, rightly or wrongly.
    held: int | None

    def sequence(self) -> Sequence:
        ids = np.random.default_rng(self.seed).integers(2, 97, 64)[: self.prompt]
        whole = a_sequence(ids, self.max_tokens, ignore_eos=self.ignore_eos)
        emitted = undisturbed(whole)[0]
        output = np.array(emitted[: min(self.resumed, len(emitted) - 1)], np.int32)
        return a_sequence(ids, self.max_tokens, ignore_eos=self.ignore_eos, output_ids=output)


asks = st.builds(
    Ask,
    at=st.integers(0, 30),
    prompt=st.integers(1, 30),
    seed=st.integers(0, 5),
    max_tokens=st.sampled_from([1, 4, 16, 50]),
    resumed=st.sampled_from([0, 0, 3]),
    ignore_eos=st.booleans(),
    kind=st.sampled_from(["split", "split", "split", "prefill side", "decode side", "decode side"]),
    detached=st.sampled_from([False, False, True]),
    late=st.integers(0, 6),
    impatient_at=st.one_of(st.none(), st.none(), st.integers(0, 40)),
    abort_at=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 60)),
    forgetful=st.booleans(),
    held=st.sampled_from([None, 0, 0, 20]),
)


@dataclass
class Errand:
    """What the router knows of one request."""

    ask: Ask
    sequence: Sequence
    ticket_at: int = -1
    ticketed: bool = False
    token_at: int = -1
    # The prefill side's part is over: what it drew, if anything, was handed on.
    over: bool = False
    released: bool = False
    ended_there: bool = False
    gave_up: bool = False
    head: list[int] = field(default_factory=list)


class Chaos:
    """A router that is late, impatient and forgetful."""

    def __init__(self, prefill: Rig, decode: Rig) -> None:
        self.prefill, self.decode = prefill, decode
        self.errands: dict[KEY, Errand] = {}
        self.turn = 0
        self.alive = True

    def ask(self, key: KEY, ask: Ask) -> None:
        if not self.alive:
            ask = replace(ask, kind="decode side")
        errand, (session, handle) = Errand(ask, ask.sequence()), key
        if errand.sequence.known_len + 1 >= min(self.prefill.core.max_len, self.decode.core.max_len):
            return
        self.errands[key] = errand
        lease_ms = 20 if ask.detached else 0
        here, there = KvTransfer(prefill_only=True, lease_ms=lease_ms), DECODE
        if ask.kind != "split":
            here = there = NO_TRANSFER
            errand.over = errand.released = True
        if ask.kind != "decode side":
            self.prefill.submit(handle, errand.sequence, session=session, transfer=here, held_tokens=ask.held)
        if ask.kind != "prefill side":
            self.decode.submit(handle, errand.sequence, session=session, transfer=there, held_tokens=ask.held)

    def step(self) -> None:
        self.turn += 1
        now = max(self.prefill.now, self.decode.now)
        for rig in (self.prefill, self.decode) if self.alive else (self.decode,):
            rig.now = now
            rig.step()
            rig.core.check_integrity()
        for key, errand in self.errands.items():
            if errand.ask.abort_at == self.turn:
                self.prefill.core.abort(*key, now)
                self.decode.core.abort(*key, now)
            self._ticket(key, errand)
            self._token(key, errand)

    def _ticket(self, key: KEY, errand: Errand) -> None:
        ticket = self.prefill.tickets.get(key)
        if ticket is None or errand.released or (errand.gave_up and not errand.ticketed):
            return
        if not errand.ticketed:
            errand.ticket_at = self.turn + errand.ask.late if errand.ticket_at < 0 else errand.ticket_at
            if self.turn >= errand.ticket_at:
                errand.ticketed = True
                self._hand_over(key, ticket=ticket)
        elif key in self.decode.pulled and not errand.ask.forgetful:
            errand.released = True
            self.prefill.core.release([ticket.transfer_id])
        elif not self.turn % 7:
            self.prefill.core.renew([ticket.transfer_id], self.prefill.now)

    def _token(self, key: KEY, errand: Errand) -> None:
        if errand.over:
            return
        if key in self.prefill.prefilled:
            errand.token_at = self.turn + errand.ask.late if errand.token_at < 0 else errand.token_at
            if self.turn >= errand.token_at:
                errand.over, errand.head = True, self.prefill.tokens[key]
                errand.gave_up = key not in self.prefill.tickets
                self._hand_over(key, *errand.head, give_up=errand.gave_up)
        elif key in self.prefill.ends:
            errand.over, errand.head, errand.ended_there = True, self.prefill.tokens[key], True
            self.decode.core.abort(*key, self.decode.now)
        elif key in self.prefill.errors or (
            errand.ask.impatient_at is not None and self.turn >= errand.ask.at + errand.ask.impatient_at
        ):
            # Whatever it draws from now on is nobody's.
            errand.over = errand.gave_up = True
            self.prefill.core.abort(*key, self.prefill.now)
            self._hand_over(key, give_up=True)

    def _hand_over(self, key: KEY, *tokens: int, **what: object) -> None:
        self.decode.hand_over(key[1], *tokens, session=key[0], **what)

    @property
    def busy(self) -> bool:
        rigs = (self.prefill, self.decode)
        return any(rig.core._replica.requests for rig in rigs) or not all(e.over for e in self.errands.values())

    def lose(self, peers: dict[bytes, FakeWorker]) -> None:
        """The prefill side's worker is gone, with all that it exported."""
        self.alive = False
        self.prefill.collect(self.prefill.core.worker_lost(Unavailable("WORKER_LOST", "", ""), self.prefill.now))
        self.prefill.core.check_integrity()
        del peers[b"prefill"]

    def settle(self) -> None:
        """Release some, let the leases of the others end, and see that nothing is left."""
        self.decode.run()
        if self.alive:
            self.prefill.core.release([ticket.transfer_id for ticket in list(self.prefill.tickets.values())[::2]])
            self.prefill.now += LEASE_S + 1
            self.prefill.run()
            assert not self.prefill.worker.moves.exporting
        assert sum(self.prefill.core.stats.transfers.values()) == len(self.prefill.tickets), "each ends once"


@examples(60)
@given(
    requests=st.lists(asks, min_size=1, max_size=14),
    num_pages=st.tuples(st.integers(18, 40), st.integers(18, 40)),
    page_size=st.sampled_from([2, 3, 4]),
    groups=st.sampled_from([1, 1, 2]),
    max_num_seqs=st.integers(1, 4),
    batch=st.sampled_from([5, 16, 512]),
    depth=st.integers(1, 3),
    coalesce=st.sampled_from([1, 1, 3]),
    lockstep=st.booleans(),
    cache=st.sampled_from([True, True, False]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    delay=st.integers(0, 6),
    noise=st.integers(0, 99),
    fail=st.sampled_from([0.0, 0.0, 0.4]),
    lose=st.sampled_from([0.0, 0.0, 0.02]),
    lost_at=st.one_of(st.none(), st.none(), st.integers(0, 40)),
    needy_at=st.sets(st.integers(0, 80), max_size=8),
    kvstore=st.booleans(),
)
def test_random_handovers_change_no_tokens_and_leak_nothing(
    requests: list[Ask],
    num_pages: tuple[int, int],
    page_size: int,
    groups: int,
    max_num_seqs: int,
    batch: int,
    depth: int,
    coalesce: int,
    lockstep: bool,
    cache: bool,
    policy: str,
    delay: int,
    noise: int,
    fail: float,
    lose: float,
    lost_at: int | None,
    needy_at: set[int],
    kvstore: bool,
) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=batch,
        lockstep=lockstep,
        enable_prefix_caching=cache,
        scheduling_policy=policy,
        transfer_lease_s=LEASE_S,
    )
    rng = np.random.default_rng(noise)
    peers: dict[bytes, FakeWorker] = {}
    store: dict[bytes, list[int]] = {}
    rigs = []
    for name, pages in zip((b"prefill", b"decode"), num_pages, strict=True):
        hello = make_hello(num_pages=pages, page_size=page_size, max_num_seqs=max_num_seqs, groups=groups)
        worker = FakeWorker(
            with_address(hello, name),
            depth=depth,
            coalesce=coalesce,
            store=store,
            fail_moves=fail,
            lose_pages=lose,
            peers=peers,
        )
        late = (lambda: int(rng.integers(0, delay + 1)),) * 2
        rigs.append(Rig(config, kvstore=kvstore, worker=worker, grant_delay=late[0], report_delay=late[1]))
    chaos = Chaos(*rigs)
    todo = sorted(enumerate(requests), key=lambda item: item[1].at)
    while todo or chaos.busy:
        while todo and todo[0][1].at <= chaos.turn:
            handle, one = todo.pop(0)
            chaos.ask((handle % 2, handle), one)
        if chaos.turn == lost_at:
            chaos.lose(peers)
        if chaos.turn in needy_at:
            # As if somebody who runs lacked pages.
            for rig in rigs:
                rig.core._replica.holdings.reclaim_pages(6)
        chaos.step()
        assert chaos.turn < 8_000, f"stuck: {[rig.core.load() for rig in rigs]}"
    chaos.settle()
    for key, errand in chaos.errands.items():
        check(chaos, key, errand)


def check(chaos: Chaos, key: KEY, errand: Errand) -> None:
    ask, sides = errand.ask, {"prefill side": chaos.prefill, "decode side": chaos.decode}
    side = sides.get(ask.kind, chaos.prefill if errand.ended_there else chaos.decode)
    said = errand.head + chaos.decode.tokens[key] if ask.kind == "split" else side.tokens[key]
    expected = undisturbed(errand.sequence, max_len=side.core.max_len)[0][len(errand.sequence.output_ids) :]
    assert said == expected[: len(said)]
    if key in side.errors:
        assert side.errors[key].code in ("PAGES_LOST", "WORKER_LOST")
    elif side.ends[key] is FinishReason.ABORT:
        assert ask.abort_at is not None
    else:
        assert said == expected
        if errand.ticketed and not errand.ended_there:
            assert key in chaos.decode.pulled, "nobody was told what became of a ticket"

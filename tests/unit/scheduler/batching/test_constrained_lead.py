"""Sequences with grammars may sample several tokens in a step, so that their slots get more credit than others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire_common.credit import Report, WorkerHello
from quire_common.sequence import RequestContext, Sequence, Stop
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_common.structured.constraint import Constraint
from quire_scheduler.batching.credit import Credit
from quire_scheduler.batching.lockstep import Lockstep
from quire_scheduler.batching.run_ahead import MARGIN
from quire_scheduler.batching.slot_table import SlotTable
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.request import Request
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello

PAGE = 16
GRAMMAR = Constraint.of("start: /[A-Z]+/")


def a_hello(row_tokens: int = 1, constrained: int = 8, **sizes: int) -> WorkerHello:
    hello = make_hello(**({"page_size": PAGE, "max_num_seqs": 4, "num_pages": 200, "max_model_len": 180} | sizes))
    model = replace(hello.model, capabilities=(STRUCTURED_OUTPUT,))
    return replace(hello, model=model, max_row_tokens=row_tokens, max_constrained_row_tokens=constrained)


def a_report(*count: int) -> Report:
    return Report(a_hello().epoch, count=np.array(count, np.int32))


def test_slots_with_a_grammar_have_credit_for_rows_of_many_tokens() -> None:
    credit, steps = Credit(SchedulerConfig(), a_hello()), PAGE + MARGIN
    assert (credit.lead(), credit.lead() + credit.extra_lead()) == (steps, 8 * steps + 7), "as many as there may be"
    credit.reported(a_report(1, 3, 1))
    assert (credit.lead(), credit.lead() + credit.extra_lead()) == (steps, 3 * steps + 7), "as many as there were"
    assert credit.slack() == PAGE


@pytest.mark.parametrize(("row_tokens", "constrained"), [(1, 1), (8, 8), (8, 4)])
def test_worker_whose_rows_are_all_alike_needs_no_extra_credit(row_tokens: int, constrained: int) -> None:
    for policy in (
        Credit(SchedulerConfig(), a_hello(row_tokens, constrained)),
        Lockstep(SchedulerConfig(), a_hello(row_tokens, constrained)),
    ):
        assert policy.extra_lead() == 0


def test_rows_of_one_token_need_no_more_credit_than_a_page() -> None:
    credit = Credit(SchedulerConfig(), a_hello(constrained=1))
    credit.reported(a_report(1, 1))
    assert (credit.lead(), credit.slack()) == (PAGE + MARGIN, PAGE)


def test_lockstep_gives_credit_for_one_row() -> None:
    policy = Lockstep(SchedulerConfig(), a_hello(row_tokens=3))
    assert (policy.lead(), policy.lead() + policy.extra_lead()) == (2, 7)


class Reaching(Credit):
    """A Credit whose leads a test sets."""

    reach = extra = 0

    def lead(self) -> int:
        return self.reach

    def extra_lead(self) -> int:
        return self.extra

    def slack(self) -> int:
        return 0


def a_rig(**sizes: int) -> tuple[Rig, Reaching]:
    hello = a_hello(**sizes)
    policy = Reaching(SchedulerConfig(enable_prefix_caching=False), hello)
    return Rig(SchedulerConfig(enable_prefix_caching=False), policy=policy, worker=FakeWorker(hello)), policy


def grown(rig: Rig) -> dict[int, int]:
    """The pages that the next Grant gives to each slot."""
    grant = rig.core.next_grant(rig.now)
    assert grant is not None and not grant.start
    slots, pages = np.unique(grant.grow_slot, return_counts=True)
    return dict(zip(slots.tolist(), pages.tolist(), strict=True))


def two_of_each(rig: Rig) -> tuple[set[int], set[int]]:
    """Start two sequences with a grammar and two without; returns their slots."""
    for handle in range(4):
        rig.submit(handle, a_sequence(12, 100, constraint=GRAMMAR if handle % 2 else None))
    rig.step()
    assert [len(start.pages[0]) for start in rig.worker.seen[0].start] == [1, 1, 1, 1]
    slots = rig.core._replica.slots
    assert slots.num_constrained == 2
    constrained = set(np.flatnonzero(slots.constrained).tolist())
    return constrained, set(range(4)) - constrained


def test_only_slots_with_a_grammar_get_the_extra_lead() -> None:
    rig, policy = a_rig()
    constrained, others = two_of_each(rig)
    policy.reach, policy.extra = 4, 60
    assert grown(rig) == dict.fromkeys(constrained, 5 - 1) | dict.fromkeys(others, 2 - 1)
    rig.core.check_integrity()


def test_scarce_credit_is_shared_in_proportion_to_the_leads() -> None:
    """Each sequence has one page and 13 tokens. A lead of 64 positions needs four more pages, and a lead of 8 needs
    one. Half of the first lead needs two pages, and half of the second lead still needs one."""
    rig, policy = a_rig(num_pages=4 + 6 + 1)
    constrained, others = two_of_each(rig)
    policy.reach, policy.extra = 8, 56
    assert grown(rig) == dict.fromkeys(constrained, 2) | dict.fromkeys(others, 1)


def test_sequence_with_a_grammar_starts_with_pages_for_its_lead() -> None:
    rig, policy = a_rig()
    policy.extra = 64
    rig.submit(0, a_sequence(12, 100))
    rig.submit(1, a_sequence(12, 100, constraint=GRAMMAR))
    rig.step()
    assert [len(start.pages[0]) for start in rig.worker.seen[0].start] == [1, 5]


def test_standby_sequence_leaves_sequences_with_grammars_the_pages_of_their_lead() -> None:
    """Otherwise the standby sequence is started, and then taken back at once. In the end, the first sequence needs all
    four pages."""
    rig, policy = a_rig(max_num_seqs=1, num_pages=5)
    policy.extra = 32
    rig.submit(0, a_sequence(12, 50, constraint=GRAMMAR))
    rig.submit(1, a_sequence(12, 20))
    rig.run()
    assert rig.core.stats.reclaims == 0 and [len(rig.tokens[0, handle]) for handle in (0, 1)] == [50, 20]


def test_slot_table_counts_the_sequences_with_grammars() -> None:
    table = SlotTable(3)
    for uid, constraint in enumerate([None, GRAMMAR, GRAMMAR]):
        sequence = Sequence(np.zeros(4, np.int32), Stop(9), constraint=constraint)
        request = Request.new(uid, 0, uid, RequestContext(f"r{uid}"), sequence, 0.0)
        table.take_slot(request, seq=1, ceiling=9, capacity=4)
    slots = table.active_slots()
    table.check_integrity()
    assert table.reach(slots, 5, 0) == 5
    assert np.asarray(table.reach(slots, 5, 3)).tolist() == [5, 8, 8]
    table.finish(1)
    assert np.asarray(table.reach(table.active_slots(), 5, 3)).tolist() == [5, 8]
    table.stop(2, seq=2)
    table.check_integrity()
    assert table.num_constrained == 0 and table.reach(table.active_slots(), 5, 3) == 5
    table.num_constrained = 1
    with pytest.raises(AssertionError, match="grammars were miscounted"):
        table.check_integrity()

"""Two steps in flight: what Reports say of steps whose sequences have ended, were stopped, or have failed meanwhile."""

from __future__ import annotations

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Budget, Finish, MoveKind, PageMove
from quire_common.sequence import RequestContext
from quire_worker.engine.ports import NullObserver, SlotTrace
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import LOCKSTEP, ROOMY, EngineBench, a_start, small_spec
from tests.fakes.worker.held_device import HeldDevice
from tests.fakes.worker.in_flight_bench import FlightBench as Bench

PROMPT = [5, 6, 7, 8, 9]
PAGES = [1, 2, 3, 4, 5]
OTHER = [50, 51, 52]


def says(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return continuation(prompt, count, 97)


def test_two_steps_are_in_flight_and_the_second_is_fed_by_the_first() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=6))
    assert bench.launch() == 2 and bench.engine.in_flight == 2
    first, second = bench.device.launched
    assert first.count.tolist() == [5] and not first.fed.any()
    assert second.count.tolist() == [1] and second.fed.all() and second.token.tolist() == [0]
    assert bench.quiet()  # a Grant whose step runs is acknowledged by the step
    report = bench.end()
    assert (report.first_step, report.in_flight, report.retired) == (1, 1, 1)
    bench.run_out()
    assert bench.told.tokens == {0: says(6)} and bench.told.finish == {0: Finish.LENGTH}
    assert [report.first_step for report in bench.told.reports] == [1, 2, 3, 4, 5, 6]
    assert bench.told.reports[-1].in_flight == 0


def test_depth_one_never_has_two_in_flight() -> None:
    bench = EngineBench(device=HeldDevice, depth=1)
    bench.grant(a_start(0, PROMPT, PAGES))
    assert bench.engine.launch() and not bench.engine.launch()


def test_length_is_foreseen_and_no_step_is_launched_in_vain() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=2))
    assert bench.launch() == 2
    bench.end()
    assert bench.launch() == 0
    assert bench.end().finish.tolist() == [Finish.LENGTH]
    assert bench.told.tokens[0] == says(2)


def test_a_sequence_near_its_end_is_not_stalled() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=2), a_start(1, OTHER, [6, 7], limit=3))
    bench.launch()
    assert bench.end().stalled_slot.tolist() == [1]


def test_after_a_stop_id_the_row_in_flight_is_void() -> None:
    tokens = says(6)
    bench = Bench(spec=small_spec(eos_token_ids=(tokens[1],)))
    bench.grant(a_start(0, PROMPT, PAGES), a_start(1, OTHER, [6, 7, 8, 9], max_tokens=4, ignore_eos=True))
    bench.launch()
    bench.end()
    bench.launch()
    assert bench.end().finish.tolist() == [Finish.STOP, Finish.NONE]
    void = bench.end()
    assert void.slot.tolist() == [1] and void.step_rows.tolist() == [1]
    bench.run_out()
    assert bench.told.tokens == {0: tokens[:2], 1: says(4, OTHER)}


def test_a_step_of_void_rows_alone_is_still_reported() -> None:
    tokens = says(1)
    bench = Bench(spec=small_spec(eos_token_ids=(tokens[0],)))
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.end()
    void = bench.end()
    assert (void.first_step, void.step_rows.tolist(), void.retired) == (2, [0], 1)


def test_rows_of_a_slot_that_a_grant_stopped_are_reported_late() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.grant(stop=(0,))
    assert not bench.engine.residents.holds(0)
    first = bench.end()
    assert (first.slot.tolist(), first.step_applied.tolist(), first.retired) == ([0], [1], 1)
    assert first.prefill_slot.tolist() == []  # the slot's progress is its next holder's
    second = bench.end()
    assert second.step_applied.tolist() == [1] and second.retired == 2
    assert bench.told.tokens[0] == says(2)


def test_a_late_end_counts_and_what_follows_it_is_void() -> None:
    tokens = says(6)
    bench = Bench(spec=small_spec(eos_token_ids=(tokens[0],)))
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.grant(stop=(0,))
    assert bench.end().finish.tolist() == [Finish.STOP]
    assert bench.end().step_rows.tolist() == [0]
    assert bench.told.tokens[0] == tokens[:1]


def test_a_late_last_token_ends_by_length_and_a_late_prefill_at_its_limit() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=1), a_start(1, OTHER, [6], max_tokens=0, limit=3), budget=LOCKSTEP)
    bench.launch()
    bench.grant(stop=(0, 1))
    report = bench.end()
    assert dict(zip(report.slot.tolist(), report.finish.tolist(), strict=True)) == {0: Finish.LENGTH, 1: Finish.LIMIT}
    assert report.token.tolist() == says(1) and report.count.tolist() == [1, 0]


def test_late_rows_do_not_touch_the_slots_next_holder() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.grant(a_start(0, OTHER, [11, 12, 13, 14], max_tokens=4), stop=(0,))
    table = bench.engine.residents.table
    bench.end()
    assert (table.known_len[0], table.computed[0]) == (3, 0)
    assert bench.launch() == 1
    late = bench.end()
    assert late.step_applied.tolist() == [1] and table.known_len[0] == 3
    bench.launch()
    assert bench.end().step_applied.tolist() == [2]
    bench.run_out()
    assert bench.told.tokens[0] == [*says(2), *says(4, OTHER)]


def test_void_rows_do_not_touch_the_slots_next_holder() -> None:
    tokens = says(2)
    bench = Bench(spec=small_spec(eos_token_ids=(tokens[0],)))
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.end()
    bench.grant(a_start(0, OTHER, [11, 12, 13, 14], max_tokens=4, ignore_eos=True))
    bench.launch()
    assert bench.end().step_rows.tolist() == [0]
    bench.run_out()
    assert bench.told.tokens[0] == [tokens[0], *says(4, OTHER)]


def test_a_late_failure_is_told_with_its_row_and_the_next_row_is_void() -> None:
    bench = Bench(nan=9)
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.grant(a_start(0, OTHER, [11, 12, 13, 14], max_tokens=4), stop=(0,))
    report = bench.end()
    assert [(slot, error.code) for slot, error in report.error] == [(0, "NAN_LOGITS")]
    assert report.finish.tolist() == [Finish.ERROR] and report.step_applied.tolist() == [1]
    bench.launch()
    assert bench.end().step_rows.tolist() == [0]
    bench.run_out()
    assert bench.told.tokens[0] == says(4, OTHER) and len(bench.told.errors) == 1


@pytest.mark.parametrize(("nan", "poison", "code"), [(66, -1, "NAN_LOGITS"), (-1, 66, "STEP_FAILED")])
def test_a_row_that_fails_with_another_step_in_flight_fails_alone_and_once(nan: int, poison: int, code: str) -> None:
    bench = Bench(nan=nan, poison=poison)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=5), a_start(1, [3, 66], [6, 7, 8]))
    assert bench.launch() == 2
    bench.end()
    fed = bench.device.launched[0]
    void = bench.end()
    assert fed.token[fed.slot == 1].tolist() == [0]  # nothing was drawn that could be fed
    assert void.slot.tolist() == [0]
    bench.run_out()
    assert bench.told.codes() == [(1, code)] and bench.told.finish[1] == Finish.ERROR
    assert bench.told.tokens[0] == says(5)


def test_a_device_that_fails_for_all_leaves_nothing_in_flight() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES), a_start(1, OTHER, [6, 7, 8, 9]))
    bench.launch()
    bench.runner.broken = True
    assert len(bench.end().error) == 2
    assert bench.end().step_rows.tolist() == [0] and bench.engine.in_flight == 0
    bench.runner.broken = False
    bench.grant(a_start(0, OTHER, [6, 7, 8, 9], max_tokens=3))
    bench.run_out()
    assert bench.told.tokens[0] == says(3, OTHER)


def test_retired_lags_behind_what_was_applied_while_earlier_steps_run() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.grant()
    bench.grant()
    assert bench.end().retired == 1
    bench.launch()
    assert bench.end().retired == 3  # the step that is left was launched under Grant 3
    bench.grant()
    bench.launch()
    assert bench.end().retired == 4


def test_a_grant_is_acknowledged_without_a_step_only_when_nothing_runs() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES), budget=LOCKSTEP)
    assert bench.launch() == 1
    assert bench.quiet()
    assert bench.end().retired == 1
    bench.grant(limit={0: 5})
    assert bench.launch() == 0
    report = bench.engine.collect()
    assert report is not None and (report.steps, report.retired, report.in_flight) == (0, 2, 0)
    assert bench.quiet()


def test_a_step_limit_of_one_is_one_step_per_grant_whatever_the_depth() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES), budget=LOCKSTEP)
    for seq in range(1, 9):
        assert bench.launch() == 1
        assert bench.end().step_applied.tolist() == [seq]
        bench.grant()
    assert bench.told.tokens[0] == says(8)


def test_an_error_without_a_row_waits_until_its_grant_is_the_one_that_has_retired() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.grant(a_start(0, [999], [6]), stop=(0,))
    bench.grant(a_start(0, OTHER, [11, 12, 13, 14], max_tokens=3))
    assert bench.quiet()
    assert bench.end().error == []
    bench.launch()
    late = bench.end()
    assert (late.error, late.retired) == ([], 2)  # 3 has retired too, but the error of 2 comes first
    report = bench.engine.collect()
    assert report is not None and (report.steps, report.retired) == (0, 2)
    assert [(slot, error.code) for slot, error in report.error] == [(0, "TOKEN_OUT_OF_RANGE")]
    bench.run_out()
    assert bench.told.tokens[0] == [*says(2), *says(3, OTHER)] and bench.told.reports[-1].retired == 3


def test_pages_of_a_stopped_slot_cannot_be_written_before_its_steps_have_ended() -> None:
    bench = Bench(transfer_agent=FakeTransferAgent())
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    load = PageMove(1, MoveKind.LOAD, 0, ids(2), (b"h" * 32,))
    bench.grant(a_start(0, OTHER, [5, 6]), stop=(0,), move=(load,))
    bench.end()
    bench.end()
    bench.grant(a_start(0, OTHER, PAGES, max_tokens=2))
    bench.run_out()
    assert bench.told.codes() == [(0, "PAGE_TAKEN")] and bench.told.moved == {1: (1, 0)}
    assert bench.told.tokens[0] == [*says(2), *says(2, OTHER)]


def test_pages_of_a_finished_sequence_are_free_when_the_steps_in_flight_have_ended() -> None:
    tokens = says(1)
    bench = Bench(spec=small_spec(eos_token_ids=(tokens[0],)))
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    assert (bench.end().first_step, bench.engine.in_flight) == (1, 1)
    bench.grant(a_start(1, OTHER, PAGES))
    bench.end()
    bench.grant(a_start(1, OTHER, PAGES, max_tokens=2, ignore_eos=True))
    bench.run_out()
    assert bench.told.codes() == [(1, "PAGE_TAKEN")] and bench.told.tokens[1] == says(2, OTHER)


def test_pages_become_ready_when_their_step_has_ended() -> None:
    bench = Bench(transfer_agent=FakeTransferAgent())
    bench.grant(a_start(0, PROMPT, PAGES), a_start(1, PROMPT, [1, 11, 12, 13], cached=4, max_tokens=3))
    assert bench.launch() == 2
    assert [batch.slot.tolist() for batch in bench.device.launched] == [[0], [0]]
    store = PageMove(1, MoveKind.STORE, 0, ids(1), (b"h" * 32,))
    bench.grant(move=(store,))
    bench.end()
    bench.launch()
    assert bench.device.launched[-1].slot.tolist() == [0, 1]
    bench.run_out()
    assert bench.told.moved == {1: (1, 0)}  # it was not whole when the store was asked for
    assert bench.told.tokens[1] == says(3)


def test_a_new_run_begins_when_the_steps_of_the_old_have_ended() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    steps = len(bench.runner.batches)
    bench.engine.begin_run()
    assert len(bench.runner.batches) == steps + 2 and bench.quiet()
    bench.seq = 0
    bench.grant(a_start(0, OTHER, PAGES, max_tokens=4))
    bench.run_out()
    assert bench.told.tokens == {0: says(4, OTHER)}
    assert bench.told.reports[0].first_step == 3


def test_outcomes_that_were_not_collected_are_not_the_next_runs() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, PAGES))
    bench.launch()
    bench.device.end(2)
    bench.engine.begin_run()
    assert bench.quiet() and bench.engine.in_flight == 0


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    bench = Bench()
    bench.grant(a_start(0, [7] * 11, PAGES, max_tokens=3), budget=Budget(100, 100, 4, 1))
    assert bench.launch() == 2
    assert [batch.position.tolist() for batch in bench.device.launched] == [[0], [4]]
    bench.run_out()
    assert bench.told.tokens[0] == says(3, [7] * 11) and bench.told.prefill[0] == 11


def test_traces_count_tokens_that_were_reported() -> None:
    class Watcher(NullObserver):
        def __init__(self) -> None:
            self.traces: list[SlotTrace] = []

        def slot_ended(self, trace: SlotTrace) -> None:
            self.traces.append(trace)

    tokens = says(2)
    watcher = Watcher()
    bench = Bench(spec=small_spec(eos_token_ids=(tokens[1],)), observer=watcher)
    bench.grant(a_start(0, PROMPT, PAGES, context=RequestContext("abc")), budget=ROOMY)
    bench.run_out()
    assert [trace.output_tokens for trace in watcher.traces] == [2]


def test_a_slot_that_grows_in_time_never_stalls() -> None:
    bench = Bench()
    bench.grant(a_start(0, PROMPT, [1, 2], max_tokens=8))
    bench.launch()
    bench.grant(grow=((0, 3), (0, 4)))
    bench.run_out()
    assert bench.told.tokens[0] == says(8)
    assert all(not report.stalled_slot.tolist() for report in bench.told.reports)


def test_spares_prefill_beside_the_decoders_and_take_rows_as_they_free_by_their_keys() -> None:
    bench = Bench(spec=small_spec(max_num_seqs=2))
    prompts = {slot: [slot + 1, 2] for slot in range(5)}
    starts = [
        a_start(s, p, [1 + 4 * s, 2 + 4 * s, 3 + 4 * s], max_tokens=4 if s < 2 else 3, key=-s if s > 1 else s - 10)
        for s, p in prompts.items()
    ]
    bench.grant(*starts, budget=Budget(6, 2, 8, 1))
    rows = []
    while bench.launch() or bench.device.launched:
        batch = bench.device.launched[0]
        rows.append((batch.slot[batch.fed].tolist(), batch.slot[~batch.fed].tolist()))
        report = bench.end()
        assert report.stalled_slot.tolist() == [] and report.running + report.spare == bench.started()
    assert rows[:3] == [([], [0, 1, 4]), ([0, 1], [3]), ([0, 1], [2])]
    assert [decoding for decoding, _ in rows[3:]] == [[0, 1], [4, 3], [4, 3], [2], [2]]
    assert (bench.told.reports[0].running, bench.told.reports[0].spare) == (2, 3)
    assert bench.told.tokens == {s: says(4 if s < 2 else 3, p) for s, p in prompts.items()}

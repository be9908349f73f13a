"""The engine, driven in-process on the counting model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire_common.credit import Budget, Epoch, Finish, Grant
from quire_common.errors import FailedPrecondition, InvalidArgument
from quire_common.sequence import RequestContext, Sampling
from quire_worker.engine.ports import NullObserver, SlotTrace
from quire_worker.engine.resident_slots import ResidentSlots
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import LOCKSTEP, ROOMY, EngineBench, a_start, small_spec

PROMPT = [5, 6, 7, 8, 9]


def says(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    return continuation(prompt, count, 97, seed)


def test_one_sequence_runs_to_max_tokens() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=6))
    told = bench.run()
    assert told.tokens == {0: says(PROMPT, 6)}
    assert told.finish == {0: Finish.LENGTH}
    assert told.prefill == {0: 5}
    assert bench.engine.residents.table.started() == 0


def test_batch_composition_chunking_and_order_do_not_change_tokens() -> None:
    prompts = {slot: [slot + 1] * (3 * slot + 2) for slot in range(6)}
    bench = EngineBench()
    starts = [a_start(s, p, list(range(1 + 8 * s, 9 + 8 * s)), max_tokens=7, key=-s) for s, p in prompts.items()]
    bench.grant(*starts, order=(3, 1), budget=Budget(6, 3, 4, 1))
    told = bench.run()
    assert told.tokens == {s: says(p, 7) for s, p in prompts.items()}
    assert max(int(b.count.sum()) for b in bench.runner.batches) <= 6


def test_a_slot_out_of_credit_stalls_alone_and_goes_on_with_more() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], limit=6), a_start(1, PROMPT, [5, 6, 7, 8], max_tokens=6))
    told = bench.run()
    assert told.tokens == {0: says(PROMPT, 2), 1: says(PROMPT, 6)}
    assert told.reports[-1].stalled_slot.tolist() == [0]
    bench.grant(limit={0: 100})
    bench.run()
    assert told.tokens[0] == says(PROMPT, 8)
    assert told.finish[0] == Finish.LENGTH


def test_a_slot_never_passes_its_pages_and_grows() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2], max_tokens=8))
    told = bench.run()
    assert told.tokens[0] == says(PROMPT, 4)  # positions 0..7 are computed: the last gives the fourth token
    assert told.reports[-1].stalled_slot.tolist() == [0]
    bench.grant(grow=((0, 9), (3, 10)))  # slot 3 is idle: ignored
    bench.run()
    assert told.tokens[0] == says(PROMPT, 8)
    assert told.errors == []


def test_pause_by_a_lower_limit() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), budget=LOCKSTEP)
    bench.run()
    bench.grant(limit={0: 2}, budget=ROOMY)
    told = bench.run()
    assert len(told.tokens[0]) == 1


def test_prefill_only_ends_at_its_limit_without_a_token() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2], max_tokens=0, limit=5))
    told = bench.run()
    assert told.tokens == {0: []} and told.finish == {0: Finish.LIMIT} and told.prefill == {0: 5}
    assert bench.runner.pages[1].tolist() == PROMPT[:4]


def test_prefill_only_in_chunks_ends_with_its_last() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2], max_tokens=0, limit=5), budget=Budget(10, 10, 2, 1))
    told = bench.run()
    assert len(bench.runner.batches) == 3 and told.finish == {0: Finish.LIMIT} and told.prefill == {0: 5}


def test_lockstep_runs_one_step_a_grant_and_every_grant_is_acknowledged() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=2), budget=LOCKSTEP)
    first = bench.step()
    assert first is not None and first.steps == 1 and first.retired == 1 and first.first_step == 1
    assert bench.step() is None
    bench.grant()
    second = bench.step()
    assert second is not None and second.step_applied.tolist() == [2] and second.first_step == 2
    bench.grant()
    idle = bench.step()
    assert idle is not None and idle.steps == 0 and idle.retired == 3 and idle.first_step == 3
    assert bench.step() is None


def test_step_limit_of_three() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), budget=dataclasses.replace(ROOMY, step_limit=3))
    assert len(bench.run().tokens[0]) == 3


def test_nothing_runs_before_the_first_budget() -> None:
    bench = EngineBench()
    bench.seq = 0
    bench.engine.apply(Grant(epoch=bench.engine.epoch, seq=1, start=[a_start(0, PROMPT, [1, 2])]))
    report = bench.step()
    assert report is not None and report.steps == 0 and report.retired == 1


def test_spares_prefill_and_wait_for_a_decode_row() -> None:
    bench = EngineBench(small_spec(max_num_seqs=2))
    assert bench.spec.num_slots == 5
    starts = [a_start(s, [s + 1, 2], [1 + 3 * s, 2 + 3 * s, 3 + 3 * s], max_tokens=4, key=s) for s in range(5)]
    bench.grant(*starts)
    bench.step()
    bench.step()
    second = bench.runner.batches[1]
    assert second.count.tolist() == [1, 1] and second.position.tolist() == [2, 2]
    assert (bench.told.reports[0].running, bench.told.reports[0].spare) == (2, 3)
    told = bench.run()
    assert told.tokens == {s: says([s + 1, 2], 4) for s in range(5)}


def test_resumed_output_counts_as_output() -> None:
    bench = EngineBench()
    tokens = says(PROMPT, 6)
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], output=tuple(tokens[:4]), max_tokens=6))
    told = bench.run()
    assert told.tokens[0] == tokens[4:] and told.finish[0] == Finish.LENGTH and told.prefill[0] == 9


def test_eos_stop_ids_and_ignore_eos() -> None:
    tokens = says(PROMPT, 6)
    bench = EngineBench(small_spec(eos_token_ids=(tokens[2],)))
    bench.grant(
        a_start(0, PROMPT, [1, 2, 3], max_tokens=6),
        a_start(1, PROMPT, [4, 5, 6], max_tokens=6, ignore_eos=True),
        a_start(2, PROMPT, [7, 8, 9], max_tokens=6, ignore_eos=True, stop=(1000, tokens[1])),
        a_start(3, PROMPT, [10, 11, 12], max_tokens=3),
    )
    told = bench.run()
    assert told.tokens == {0: tokens[:3], 1: tokens, 2: tokens[:2], 3: tokens[:3]}
    assert told.finish == {0: Finish.STOP, 1: Finish.LENGTH, 2: Finish.STOP, 3: Finish.STOP}


def test_min_tokens_blocks_stop_ids_until_reached() -> None:
    tokens = says(PROMPT, 1)
    bench = EngineBench(small_spec(eos_token_ids=(tokens[0],)))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=8, min_tokens=2))
    told = bench.run()
    assert tokens[0] not in told.tokens[0][:2]
    blocked = [batch.blocked for batch in bench.runner.batches]
    assert [list(b) for b in blocked[:3]] == [[0], [0], []]
    assert blocked[0][0].tolist() == [tokens[0]]


def test_the_context_ends_a_sequence_by_length() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=50, max_model_len=9))
    told = bench.run()
    assert told.tokens[0] == says(PROMPT, 4) and told.finish[0] == Finish.LENGTH


def test_stop_frees_a_slot_and_a_start_may_follow_in_the_same_grant() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), budget=LOCKSTEP)
    bench.run()
    bench.grant(a_start(0, [1, 2, 3], [1, 2, 3, 4], max_tokens=3), stop=(0, 3, 99, -1), budget=ROOMY)
    told = bench.run()
    assert told.tokens[0] == [*says(PROMPT, 1), *says([1, 2, 3], 3)]
    assert told.errors == []


def test_slots_are_cleared_on_reuse() -> None:
    canary, table = 96, EngineBench
    bench = table(small_spec(eos_token_ids=(3,)))
    sampling = Sampling(0.5, 7, 0.5, 0.25, 2**60, 3, 2)
    bench.grant(
        a_start(0, [canary] * 30, list(range(50, 60)), max_tokens=20, stop=(canary,), min_tokens=20, sampling=sampling,
                key=77, context=RequestContext("canary")),
        order=(0,), budget=LOCKSTEP,
    )  # fmt: skip
    bench.run()
    bench.grant(stop=(0,))
    bench.run()
    columns = vars(bench.engine.residents.table)
    fresh = vars(table(small_spec(eos_token_ids=(3,))).engine.residents.table)
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            np.testing.assert_array_equal(column, fresh[name], err_msg=name)
    assert columns["context"] == fresh["context"]


def test_a_start_on_a_busy_slot_ends_both() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), a_start(1, PROMPT, [5, 6, 7, 8]), budget=LOCKSTEP)
    bench.run()
    bench.grant(a_start(0, [1, 2], [9, 10, 11]), budget=ROOMY)
    told = bench.run()
    assert told.codes() == [(0, "SLOT_BUSY")]
    assert told.tokens == {0: says(PROMPT, 1), 1: says(PROMPT, 8)}


@pytest.mark.parametrize(
    ("start", "code"),
    [
        (a_start(99, PROMPT, [1, 2]), "BAD_SLOT"),
        (a_start(-1, PROMPT, [1, 2]), "BAD_SLOT"),
        (a_start(1, [], [1, 2]), "EMPTY_PROMPT"),
        (a_start(1, [1] * 64, list(range(1, 17))), "PROMPT_TOO_LONG"),
        (a_start(1, [5, 97], [1, 2]), "TOKEN_OUT_OF_RANGE"),
        (a_start(1, [5, -1], [1, 2]), "TOKEN_OUT_OF_RANGE"),
        (a_start(1, PROMPT, [0, 2]), "BAD_PAGE"),
        (a_start(1, PROMPT, [2, 64]), "BAD_PAGE"),
        (a_start(1, PROMPT, [2, 2]), "BAD_PAGE"),
        (a_start(1, PROMPT, list(range(1, 19))), "TOO_MANY_PAGES"),
        (a_start(1, PROMPT, [2], cached=5), "CACHED_PAST_PAGES"),
        (a_start(1, PROMPT, [2], output=(1, 2), max_tokens=2), "NOTHING_TO_GENERATE"),
        (a_start(1, PROMPT, [1, 2], stop=tuple(range(1025))), "TOO_MANY_STOP_IDS"),
        (a_start(1, PROMPT, [1, 2], max_model_len=65), "BAD_CONTEXT_LENGTH"),
        (a_start(1, PROMPT, [1, 2], sampling=Sampling(temperature=float("nan"))), "BAD_SAMPLING_PARAMETER"),
        (a_start(1, PROMPT, [1, 2], sampling=Sampling(logprobs=98)), "TOO_MANY_LOGPROBS"),
        (dataclasses.replace(a_start(1, PROMPT, [1]), pages=()), "KV_GROUPS_UNSUPPORTED"),
    ],
)
def test_a_bad_start_fails_its_slot_alone(start: object, code: str) -> None:
    bench = EngineBench()
    bench.grant(start, a_start(0, PROMPT, [20, 21, 22, 23]))  # type: ignore[arg-type]  # parametrised
    told = bench.run()
    assert [c for _, c in told.codes()] == [code]
    assert told.tokens == {0: says(PROMPT, 8)}
    assert not bench.engine.residents.holds(1)


def test_the_greatest_numbers_of_the_wire_are_bounds_like_others() -> None:
    bench = EngineBench()
    most = 2**32 - 1
    bench.grant(a_start(0, PROMPT, list(range(1, 17)), limit=most, max_tokens=most, cached=0, key=-(2**63)))
    bench.grant(a_start(1, PROMPT, [20, 21, 22, 23], limit=most, max_tokens=8, min_tokens=most, stop=(2**31 - 1, 5)))
    told = bench.run()
    assert len(told.tokens[0]) == 64 - 5 and told.errors == []
    assert bench.runner.batches[0].blocked[1].tolist() == [5]


def test_a_bad_grow_ends_its_slot_alone() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2]), a_start(1, PROMPT, [3, 4, 5, 6]), budget=LOCKSTEP)
    bench.run()
    bench.grant(grow=((0, 3),), budget=ROOMY)
    told = bench.run()
    assert told.codes() == [(0, "PAGE_TAKEN")] and told.tokens[1] == says(PROMPT, 8)
    bench.grant(a_start(0, PROMPT, [1, 2]), grow=((0, 64),))
    assert bench.run().codes()[1:] == [(0, "BAD_PAGE")]


@pytest.mark.parametrize("grow", [((2, 30), (0, 31), (2, 32), (3, 33), (1, 34)), ((1, 40), (0, 5), (1, 41), (9, 42))])
def test_growth_of_many_slots_is_that_of_each(
    grow: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def grown() -> tuple[list[object], list[tuple[int, str]]]:
        bench = EngineBench()
        bench.grant(*(a_start(slot, PROMPT, [1 + 3 * slot, 2 + 3 * slot]) for slot in range(3)), budget=LOCKSTEP)
        bench.run()
        bench.grant(grow=grow)  # slots 3 and 9 are idle, page 5 is slot 1's
        residents = bench.engine.residents
        residents.check_integrity()
        table, states = residents.table, residents.states
        columns = (table.page_table, table.num_pages, table.state, states.refs, states.writer, states.ready)
        return [column.tolist() for column in columns], bench.run().codes()

    at_once = grown()
    monkeypatch.setattr(ResidentSlots, "grow_all", lambda *_: False)
    assert grown() == at_once


def test_grants_must_follow_and_be_of_this_run() -> None:
    bench = EngineBench()
    bench.grant()
    epoch = bench.engine.epoch
    for grant, code in (
        (Grant(epoch, 1), "GRANT_OUT_OF_ORDER"),
        (Grant(epoch, 3), "GRANT_OUT_OF_ORDER"),
        (Grant(Epoch(epoch.boot_id, epoch.run + 1), 2), "EPOCH_MISMATCH"),
        (Grant(Epoch(epoch.boot_id ^ 1, epoch.run), 2), "EPOCH_MISMATCH"),
    ):
        with pytest.raises(FailedPrecondition, match=code):
            bench.engine.apply(grant)
    with pytest.raises(InvalidArgument, match="BAD_BUDGET"):
        bench.engine.apply(Grant(epoch, 2, budget=Budget(10, 10, 0, 1)))
    bench.grant()
    assert bench.step() is not None


def test_a_new_run_forgets_everything() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), budget=LOCKSTEP)
    bench.run()
    before = bench.engine.epoch
    assert bench.engine.begin_run() == Epoch(before.boot_id, before.run + 1)
    assert bench.step() is None
    bench.seq, bench.told.tokens = 0, {}
    bench.grant(a_start(0, [9, 9], [1, 2, 3, 4], max_tokens=3))
    assert bench.run().tokens == {0: says([9, 9], 3)}


def test_a_poisoned_row_fails_alone() -> None:
    bench = EngineBench(poison=66)
    bench.grant(
        a_start(0, PROMPT, [1, 2, 3, 4]),
        a_start(1, [3, 66, 4], [5, 6, 7]),
        a_start(2, [8, 8], [9, 10, 11], max_tokens=3),
    )
    told = bench.run()
    assert told.codes() == [(1, "STEP_FAILED")] and told.finish[1] == Finish.ERROR
    assert (told.tokens[0], told.tokens[2]) == (says(PROMPT, 8), says([8, 8], 3))


def test_a_broken_runner_fails_all_rows_and_the_engine_goes_on() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), a_start(1, PROMPT, [5, 6, 7, 8]), budget=LOCKSTEP)
    bench.run()
    bench.runner.broken = True
    bench.grant(budget=ROOMY)
    told = bench.run()
    assert sorted(told.codes()) == [(0, "STEP_FAILED"), (1, "STEP_FAILED")]
    bench.runner.broken = False
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]))
    assert bench.run().tokens[0] == [*says(PROMPT, 1), *says(PROMPT, 8)]


def test_a_row_of_nan_logits_ends_alone_and_logprobs_stay_with_their_tokens() -> None:
    bench = EngineBench(nan=13)
    asked = Sampling(logprobs=1)
    bench.grant(
        a_start(0, [13], [1], key=0, sampling=asked), a_start(1, [4, 4], [2, 3], key=1, sampling=asked, max_tokens=1)
    )
    told = bench.run()
    assert told.codes() == [(0, "NAN_LOGITS")] and told.finish == {0: Finish.ERROR, 1: Finish.LENGTH}
    logprobs, token = told.reports[0].logprobs, says([4, 4], 1)[0]
    assert logprobs is not None and told.tokens[1] == [token]
    assert logprobs.token_index.tolist() == [0] and logprobs.top_id.tolist() == [token]
    assert logprobs.logprob.tolist() == [-float(token)]


def test_seed_and_sampling_columns_reach_the_runner() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3], sampling=Sampling(0.5, 7, 0.25, 0.125, 2**63 + 5, 2, 3), max_tokens=2))
    assert bench.run().tokens[0] == says(PROMPT, 2, seed=2**63 + 5)
    batch = bench.runner.batches[0]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "filtered")
    assert [batch.params[name].tolist() for name in names] == [[0.5], [7], [0.25], [0.125], [2**63 + 5], [2], [1]]
    assert batch.logprobs.tolist() == [3]


def test_the_batch_names_only_pages_that_its_positions_need() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5, 6, 7]), a_start(1, [1], [8, 9]), budget=LOCKSTEP)
    bench.run()
    assert bench.runner.batches[0].page_table.tolist() == [[1, 2], [8, 0]]


def test_observers_see_steps_and_ended_slots() -> None:
    class Watcher(NullObserver):
        def __init__(self) -> None:
            self.traces: list[SlotTrace] = []

        def slot_ended(self, trace: SlotTrace) -> None:
            self.traces.append(trace)

    watcher = Watcher()
    bench = EngineBench(observer=watcher)
    bench.grant(a_start(0, PROMPT, [1, 2, 3], max_tokens=3, context=RequestContext("abc")))
    bench.run()
    (trace,) = watcher.traces
    assert (trace.context.request_id, trace.prompt_tokens, trace.output_tokens) == ("abc", 5, 3)
    assert 0 < trace.started_ns <= trace.first_token_ns <= trace.ended_ns
    assert trace.finish == Finish.LENGTH


def test_limits_of_slots_that_do_not_exist_are_ignored() -> None:
    bench = EngineBench()
    bench.grant(limit={-1: 5, 10**6: 5, 0: 5})
    assert bench.step() is not None

"""Random Grants: a scheduler that is careful with pages and careless with everything else.

Whatever is granted, tokens are those of the model alone, and the engine's state agrees with itself after every step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_common.credit import Budget, Epoch, Grant, MoveKind, PageMove, Report, Start
from quire_common.errors import QuireError
from tests.fakes.counting_runner import continuation
from tests.fakes.engine_bench import EngineBench, a_start, ids, small_spec
from tests.fakes.fake_mover import FakeMover

budgets = st.builds(
    Budget, st.integers(1, 40), st.integers(0, 20), st.integers(1, 20), st.integers(1, 3), st.integers(0, 3)
)


@dataclasses.dataclass
class Expected:
    """What is running, and how far it has come."""

    prompt: list[int]
    max_tokens: int
    pages: list[int]
    got: list[int] = dataclasses.field(default_factory=list)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_tokens_never_depend_on_what_is_granted_when(data: st.DataObject) -> None:
    spec = small_spec(max_num_seqs=3, num_pages=80)
    mover = FakeMover()
    bench = EngineBench(spec, mover=mover)
    free = list(range(1, spec.num_pages))
    held: dict[int, Expected] = {}
    loads: dict[int, tuple[list[int], list[int]]] = {}

    def a_random_start(slot: int) -> tuple[Start, PageMove | None]:
        prompt = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=30))
        count = data.draw(st.integers(-(-len(prompt) // 4), 10))
        pages = [free.pop() for _ in range(min(count, len(free)))]
        expected = held[slot] = Expected(prompt, data.draw(st.integers(1, 8)), pages)
        limit = data.draw(st.integers(0, 60))
        key = data.draw(st.integers(-3, 3))
        whole = min(len(pages), (len(prompt) - 1) // 4)
        move, cached = None, 0
        if whole and data.draw(st.booleans()):
            move_id = 1000 + bench.seq * 10 + slot
            move = PageMove(move_id, MoveKind.LOAD, 0, ids(*pages[:whole]), (b"h" * 32,) * whole)
            cached = 4 * whole
            loads[move_id] = (pages[:whole], prompt)
        start = a_start(slot, prompt, pages, max_tokens=expected.max_tokens, limit=limit, key=key, cached=cached)
        return start, move

    for _ in range(data.draw(st.integers(1, 12))):
        slots = st.integers(0, spec.num_slots - 1)
        stops = tuple(data.draw(st.lists(slots, max_size=2)))
        for slot in stops:
            gone = held.pop(slot, None)
            loading = {
                page for move_id, (pages, _) in loads.items() if move_id not in bench.told.moved for page in pages
            }
            if gone is not None and not loading & set(gone.pages):
                free += gone.pages  # pages of a load that was not reported yet are left out
        wanted = data.draw(st.lists(slots, max_size=4, unique=True))
        new = [a_random_start(slot) for slot in wanted if slot not in held and len(free) > 12]
        grow = []
        for slot in data.draw(st.lists(slots, max_size=3)):
            if free and slot in held and len(held[slot].pages) < spec.table_width:
                held[slot].pages.append(free.pop())
                grow.append((slot, held[slot].pages[-1]))
        bench.grant(
            *[start for start, _ in new],
            stop=stops,
            limit={s: data.draw(st.integers(0, 64)) for s in data.draw(st.lists(slots, max_size=4))},
            grow=tuple(grow),
            order=tuple(data.draw(st.lists(slots, max_size=4, unique=True))),
            move=tuple(move for _, move in new if move is not None),
            budget=data.draw(budgets),
        )
        for _ in range(data.draw(st.integers(0, 4))):
            report = bench.step()
            if report is None:
                break
            check(report, held, free)
        for move_id in data.draw(st.lists(st.sampled_from(sorted(mover.taken)), unique=True)) if mover.taken else []:
            pages, prompt = loads[move_id]
            arrived = data.draw(st.integers(0, len(pages)))
            for place, page in enumerate(pages[:arrived]):
                bench.runner.pages[page] = prompt[4 * place : 4 * place + 4]
            mover.end(move_id, arrived)
    assert bench.told.errors == []


def check(report: Report, held: dict[int, Expected], free: list[int]) -> None:
    for slot, token, finish in zip(report.slot, report.token, report.finish, strict=True):
        expected = held[int(slot)]
        expected.got.append(int(token))
        assert expected.got == continuation(expected.prompt, len(expected.got), 97)
        assert bool(finish) == (len(expected.got) == expected.max_tokens)
        if finish:
            free += held.pop(int(slot)).pages


columns = st.lists(st.integers(-2, 12), max_size=5)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_senseless_grants_never_break_the_engine(data: st.DataObject) -> None:
    spec = small_spec(max_num_seqs=3, num_pages=12, max_model_len=24)
    bench = EngineBench(spec, mover=(mover := FakeMover()))
    for _ in range(data.draw(st.integers(1, 10))):
        starts = data.draw(
            st.lists(
                st.builds(
                    lambda slot, prompt, pages, cached, limit, output, most: a_start(
                        slot, prompt, pages, cached=cached, limit=limit, output=tuple(output), max_tokens=most,
                        max_model_len=24,
                    ),
                    st.integers(-1, 8), st.lists(st.integers(-1, 97), max_size=26), columns, st.integers(0, 30),
                    st.integers(0, 2**31 - 1), st.lists(st.integers(0, 96), max_size=3), st.integers(0, 2**31 - 1),
                ),
                max_size=4,
            )
        )  # fmt: skip
        stop, limit, grow = data.draw(columns), data.draw(columns), data.draw(columns)
        moves = [
            PageMove(data.draw(st.integers(0, 3)), kind, 0, ids(*pages), (b"h" * 32,) * len(pages))
            for kind in data.draw(st.lists(st.sampled_from(MoveKind), max_size=2))
            for pages in [data.draw(columns)]
        ]
        shift = data.draw(st.sampled_from([0, 0, 0, 1]))
        epoch = bench.engine.epoch
        grant = Grant(
            epoch=Epoch(epoch.boot_id, epoch.run + shift),
            seq=bench.seq + 1,
            stop_slot=ids(*stop),
            stop_keep_pages=ids(*stop),
            start=starts,
            limit_slot=ids(*limit),
            limit_position=ids(
                *data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(limit), max_size=len(limit)))
            ),
            grow_slot=ids(*grow),
            grow_group=np.array(
                data.draw(st.lists(st.integers(0, 1), min_size=len(grow), max_size=len(grow))), np.int32
            ),
            grow_page=ids(*reversed(grow)),
            order_slot=ids(*data.draw(columns)),
            move=moves,
            budget=data.draw(budgets),
        )
        try:
            bench.engine.apply(grant)
            bench.seq += 1
        except QuireError as error:
            assert error.code == "EPOCH_MISMATCH" and shift
        for _ in range(3):
            bench.step()
        for move_id in list(mover.taken):
            if data.draw(st.booleans()):
                mover.end(move_id, data.draw(st.integers(0, len(mover.taken[move_id].device_page))))
    bench.engine.begin_run()
    bench.engine.check_integrity()
    assert bench.engine.residents.table.started() == 0

"""Stage 5, first half: thousands of steps with requests that come at random, and hundreds that are aborted."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import NamedTuple

from bench.gpu.record import Recorder
from bench.harness.local_engine import LocalEngine
from quire_common.errors import QuireError
from quire_common.finish import FinishReason
from quire_worker.replica import ServedModel
from quire_worker.runner import ModelRunner
from tests.gpu.answers import is_plain, worst_choice
from tests.gpu.check_model import CheckModel
from tests.gpu.soak_run import STATES, SoakPlan, SoakRun
from tests.gpu.soak_traffic import SoakTraffic
from tests.gpu.step_check import TOLERANCE


class Soak(NamedTuple):
    """One engine's requests. `pages`: what it has of the model's; `most_prompt` and `most_output`: tokens."""

    name: str
    pages: int
    most_prompt: int
    most_output: int
    plan: SoakPlan
    answers: int


SOAKS = (
    Soak(
        "soak",
        64,
        600,
        64,
        SoakPlan(
            steps=10_000,
            requests=3_000,
            arrivals=(0.3, 1.5),
            abort_rate=0.08,
            least_finished=2_000,
            least_aborted=60,
            least_cached=1_000,
        ),
        answers=60,
    ),
    # Whoever starts has a page or two and grows to nine, of fifteen for all.
    Soak(
        "soak of few pages",
        16,
        48,
        512,
        SoakPlan(
            steps=1_000,
            requests=250,
            arrivals=(0.02, 0.08),
            abort_rate=0.01,
            least_finished=100,
            least_aborted=0,
            least_preempted=10,
        ),
        answers=20,
    ),
)
TINY_SOAKS = (
    Soak(
        "soak",
        24,
        24,
        6,
        SoakPlan(
            steps=6, requests=12, arrivals=(2.0, 2.0), abort_rate=0.9, least_finished=2, least_aborted=1, check_every=2
        ),
        answers=1,
    ),
    Soak(
        "soak of few pages",
        4,
        10,
        30,
        SoakPlan(
            steps=4,
            requests=4,
            arrivals=(1.0, 1.0),
            abort_rate=0.0,
            least_finished=2,
            least_aborted=0,
            least_preempted=1,
            check_every=8,
        ),
        answers=1,
    ),
)


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Too few pages for everybody, and steps too small for most prompts; then so few that sequences that run lose
    theirs, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        model = CheckModel(Path(folder), max(soak.pages for soak in SOAKS))
        seqs, tokens = (3, 64) if tiny else (32, 256)
        served = model.served(tokens, eager=tiny)
        for soak in TINY_SOAKS if tiny else SOAKS:
            # What another left behind is in pages that nobody has.
            model.poison([*range(1, model.num_pages)])
            with recorder.attempt(soak.name):
                _run(recorder, soak, model, served, seqs, tokens)


def _run(recorder: Recorder, soak: Soak, model: CheckModel, served: ServedModel, seqs: int, tokens: int) -> None:
    local = LocalEngine(
        served, max_num_seqs=seqs, num_pages=soak.pages, max_waiting=100_000, max_num_batched_tokens=tokens
    )
    traffic = SoakTraffic(model.spec.vocab_size, soak.most_prompt, soak.most_output)
    try:
        check(
            recorder,
            soak.name,
            SoakRun(local, traffic.requests(), soak.plan, model.poison),
            local,
            model.runner,
            TOLERANCE[model.on_gpu],
            soak.answers,
        )
    finally:
        local.close()


def check(
    recorder: Recorder,
    name: str,
    soak: SoakRun,
    local: LocalEngine,
    reference: ModelRunner,
    tolerance: float,
    answers: int,
) -> None:
    """The soak, then so many of its greedy answers against the reference."""
    wrong = list[str]()
    try:
        soak.run()
    except (AssertionError, QuireError, RuntimeError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    else:
        wrong += soak.shortfalls()
    tally = soak.tally
    wrong += [f"{code} of {count} requests" for code, count in tally.errors.items()]
    recorder.check(
        name,
        not wrong,
        steps=local.engine.steps,
        requests=tally.requests,
        **{how.lower(): count for how, count in sorted(tally.finished.items())},
        **{f"aborted_{state}": tally.aborted[state] for state in STATES},
        preempted=local.scheduler.stats.preemptions,
        cached_tokens=local.scheduler.stats.cached_tokens,
        integrity_checks=tally.checks,
        pages_poisoned=tally.poisoned,
        wrong="; ".join(wrong),
    )
    plain = [
        handle
        for handle, sequence in soak.sequences.items()
        if is_plain(sequence) and local.served[handle].finish in (FinishReason.STOP, FinishReason.LENGTH)
    ]
    chosen = _spread(plain, answers)
    off = [worst_choice(reference, soak.sequences[each], local.served[each].tokens) for each in chosen]
    bad = [f"request {each}: {one:.3g}" for each, one in zip(chosen, off, strict=True) if not one <= tolerance]
    worst = max(off, default=float("nan"))
    recorder.check(
        f"{name}: greedy answers", bool(off) and not bad, answers=len(off), worst=worst, wrong="; ".join(bad[:5])
    )


def _spread(handles: Listed[int], count: int) -> list[int]:
    """So many of them, early and late ones."""
    return list(handles[:: max(1, -(-len(handles) // count))])

"""Stage 5, first half: thousands of steps with requests that come at random, and hundreds that are aborted."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Listed
from pathlib import Path

from bench.gpu_checks.answers import is_plain, worst_choice
from bench.gpu_checks.check_model import CheckModel
from bench.gpu_checks.record import Recorder
from bench.gpu_checks.soak_run import STATES, SoakPlan, SoakRun
from bench.gpu_checks.soak_traffic import SoakTraffic
from bench.gpu_checks.step_check import TOLERANCE
from bench.local_engine import LocalEngine
from quire_common.errors import QuireError
from quire_scheduler.outputs import FinishReason
from quire_worker.runner import ModelRunner

_PLAN = SoakPlan(
    steps=10_000,
    requests=3_000,
    arrivals=(0.3, 1.5),
    abort_rate=0.08,
    least_finished=2_000,
    least_aborted=60,
    least_cached=1_000,
)
_TINY_PLAN = SoakPlan(
    steps=6, requests=12, arrivals=(2.0, 2.0), abort_rate=0.9, least_finished=2, least_aborted=1, check_every=2
)
_ANSWERS = 60


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Too few pages for everybody, and steps too small for most prompts. Who is preempted is counted, not asked for:
    one in a thousand steps and more, as the CPU ran it."""
    with tempfile.TemporaryDirectory() as folder:
        model = CheckModel(Path(folder), 24 if tiny else 64)
        seqs, tokens = (3, 64) if tiny else (32, 256)
        served = model.served(tokens, eager=tiny)
        local = LocalEngine(served, max_num_seqs=seqs, max_waiting=100_000, max_num_batched_tokens=tokens)
        traffic = SoakTraffic(model.spec.vocab_size, *((24, 6) if tiny else (600, 64)))
        soak = SoakRun(local, traffic.requests(), _TINY_PLAN if tiny else _PLAN, model.poison)
        try:
            check(recorder, soak, local, model.runner, TOLERANCE[model.on_gpu], 1 if tiny else _ANSWERS)
        finally:
            local.close()


def check(
    recorder: Recorder, soak: SoakRun, local: LocalEngine, reference: ModelRunner, tolerance: float, answers: int
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
        "soak",
        not wrong,
        steps=local.engine.steps,
        requests=tally.requests,
        **{name.lower(): count for name, count in sorted(tally.finished.items())},
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
        "soak: greedy answers", bool(off) and not bad, answers=len(off), worst=worst, wrong="; ".join(bad[:5])
    )


def _spread(handles: Listed[int], count: int) -> list[int]:
    """So many of them, early and late ones."""
    return list(handles[:: max(1, -(-len(handles) // count))])

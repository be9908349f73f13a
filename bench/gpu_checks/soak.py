"""Stage 5, first half: thousands of steps with requests that come and go at random, checked on the way."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from bench.gpu_checks.check_model import CheckModel
from bench.gpu_checks.record import Recorder
from bench.local_engine import LocalEngine
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop

_STEPS, _CHECK_EVERY = 10_000, 50
_TINY_STEPS = 6


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Spare pages hold NaN from the start: a step that reads one ends its request with an error."""
    with tempfile.TemporaryDirectory() as folder:
        # Too few pages for everybody: some are preempted.
        model = CheckModel(Path(folder), 24 if tiny else 160)
        seqs, tokens = (3, 64) if tiny else (32, 1024)
        local = LocalEngine(model.served(tokens, eager=tiny), max_num_seqs=seqs, max_waiting=100_000)
        rng = np.random.default_rng(0)
        wanted, submitted, aborted = _TINY_STEPS if tiny else _STEPS, 0, set[int]()
        integrity = 0
        while local.engine.steps < wanted:
            while rng.random() < 0.3 or local.scheduler.idle:
                local.submit(submitted, _sequence(model, rng, tiny))
                submitted += 1
            if submitted > 4 and rng.random() < 0.02:
                handle = int(rng.integers(0, submitted))
                if not local.served[handle].finish:
                    local.abort(handle)
                    aborted.add(handle)
            local.step()
            if local.engine.steps // _CHECK_EVERY > integrity:
                integrity = local.engine.steps // _CHECK_EVERY
                local.engine.check_integrity()
                local.scheduler.check_integrity()
        local.run()
        local.check_quiet()
        steps = local.engine.steps
        local.close()
    errors = sorted({each.error for each in local.served.values() if each.error})
    unfinished = [handle for handle, each in local.served.items() if not each.finish and handle not in aborted]
    recorder.check(
        "soak",
        not errors and not unfinished and steps >= wanted,
        steps=steps,
        requests=submitted,
        aborted=len(aborted),
        integrity_checks=integrity + 1,
        errors=", ".join(errors),
        unfinished=len(unfinished),
    )


def _sequence(model: CheckModel, rng: np.random.Generator, tiny: bool) -> Sequence:
    most = 24 if tiny else 700
    ids = rng.integers(3, model.spec.vocab_size, int(rng.integers(1, most))).astype(np.int32)
    controls = LogitControls(frequency_penalty=0.5) if rng.random() < 0.2 else None
    sampling = Sampling(
        temperature=float(rng.choice([0.0, 0.8])),
        top_k=int(rng.choice([0, 20])),
        seed=int(rng.integers(0, 2**63)),
        logprobs=int(rng.choice([-1, 2])),
        controls=controls,
    )
    return Sequence(ids, Stop(int(rng.integers(1, 3 if tiny else 200))), sampling)

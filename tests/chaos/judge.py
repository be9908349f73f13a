"""One run of load under faults, and what must be true of it. Options: QUIRE_CHAOS_KILLS scales the number of faults."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

from tests.chaos.faults import Saboteur
from tests.chaos.load import Load
from tests.chaos.rig import Rig
from tests.chaos.scripts import make_scripts, with_constraints

STREAMS = 16
# By reason: absent until something has moved.
MOVES = "quire_router_migrations_total"
_SHOWN = 20

# Until the last of the streams went on: what the design wants of detection, and so much for the way back.
DETECTED_S = 3.0


def faults_wanted(default: int) -> int:
    """QUIRE_CHAOS_KILLS is the number for the paced worker's kills, of which there are 70; others keep their share."""
    return max(1, round(default * int(os.environ.get("QUIRE_CHAOS_KILLS", "70")) / 70))


async def run_chaos(
    rig: Rig, seed: int, lengths: tuple[int, int], sabotage: Callable[[Saboteur], Awaitable[None]], scripts: int = 24
) -> Saboteur:
    """Learn, load, disturb, judge: no error, nothing different, no page kept."""
    load = Load(rig, STREAMS, seed)
    await load.learn(with_constraints(make_scripts(scripts, seed, *lengths)))
    saboteur = Saboteur(rig, load, seed)
    load.start()
    began = time.monotonic()
    await sabotage(saboteur)
    await load.finish()
    seconds = time.monotonic() - began
    print(f"{load.answers} answers and {load.left} left early, {load.tokens} tokens, {seconds:.0f} s")
    print(f"{len(load.failures)} errors or differences")
    print(saboteur.summary())
    metrics = await rig.router_metrics()
    moves, losses = metrics.get(MOVES, 0), metrics["quire_router_loss_detection_seconds_count"]
    mean_s = metrics["quire_router_loss_detection_seconds_sum"] / max(losses, 1)
    print(
        f"router: {moves:.0f} moves; {losses:.0f} losses found, {mean_s:.2f} s after the last sign of life", flush=True
    )
    assert_unharmed(load, saboteur)
    await rig.wait_whole()
    rig.wait_pages_back()
    return saboteur


def assert_detected(saboteur: Saboteur) -> None:
    """The 99th percentile of all pauses is within the bound."""
    pauses = sorted(saboteur.pauses(("scheduler", "worker", "tokenizer")))
    assert pauses[int(len(pauses) * 0.99)] <= DETECTED_S


def assert_unharmed(load: Load, saboteur: Saboteur) -> None:
    """Every answer came, and was the undisturbed one."""
    told = "\n".join(load.failures[:_SHOWN])
    faults = "\n".join(f"{load.at(fault.moment)}: {fault}" for fault in saboteur.faults)
    assert not load.failures, f"{len(load.failures)} of {load.answers}:\n{told}\nfaults:\n{faults}"
    assert load.answers >= len(load.ticks)

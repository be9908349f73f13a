"""The timings of a generation are sums over its sequences."""

from __future__ import annotations

from quire_router.sequences.delta import HopTiming
from tests.unit.router.makers import make_generation, make_job


def test_timings_of_one_phase_and_instance_are_summed() -> None:
    generation = make_generation(make_job(n=3))
    generation.add_timings(HopTiming("router", "parse", 7))
    for sequence, instance in zip(generation.sequences, ("a", "b", "a"), strict=True):
        sequence.engine.complete(0, (HopTiming("worker", "prefill", 10, 2, instance),), None)
        sequence.text.add_answer(1, 1, 1.5)
    migrated = generation.sequences[2].begin_history(1.0)
    migrated.lose_engine("lost")
    migrated.find_engine()
    parse, migrate, total, detokenize, *engines = generation.timings()
    assert parse == HopTiming("router", "parse", 7)
    assert (migrate.phase, migrate.count) == ("migrate", 1) and total.phase == "total"
    assert detokenize == HopTiming("tokenizer", "detokenize", 4, 3)
    assert engines == [HopTiming("worker", "prefill", 20, 4, "a"), HopTiming("worker", "prefill", 10, 2, "b")]


def test_generation_without_migrations_has_no_migrate_timing() -> None:
    assert [each.phase for each in make_generation(make_job()).timings()] == ["total", "detokenize"]

"""Poison-request detection counts only the lost engines on which the request ran."""

from __future__ import annotations

import pytest

from quire_common.credit.hello import Epoch
from quire_common.errors import Internal, QuireError, Unavailable
from quire_router.sequences.engine_failure import EngineFailure, Outage
from quire_router.sequences.poison_detection import PoisonDetector

EPOCH = Epoch(7, 1)
GONE = Unavailable("SCHEDULER_LOST", "m", "f")


class Request:
    """A choice, as far as blame looks at it."""

    def __init__(self) -> None:
        self.output_ids = bytearray()


class Rig:
    """A choice with a limit of 3, and `there`: the epochs in which instances are now."""

    def __init__(self) -> None:
        self.poison = PoisonDetector()
        self.sequence = Request()
        self.there: dict[str, Epoch] = {}

    def lose(
        self,
        instance: str = "a",
        error: QuireError = GONE,
        *,
        kind: str = "why",
        beside: tuple[Request, ...] = (),
        **what: bool,
    ) -> str:
        """The code of what the client is told; '': it goes on. `beside`: who else ran there."""
        failure = EngineFailure(kind, instance, error, outage=Outage(kind, [self.sequence, *beside]), **what)
        told = self.poison.verdict(self.sequence, failure, EPOCH, lambda name, epoch: self.there.get(name) == epoch, 3)
        return told.code if told is not None else ""


def test_third_engine_failure_in_a_row_fails_the_request() -> None:
    rig = Rig()
    assert [rig.lose(name, suspect=True) for name in "aba"] == ["", "", "MIGRATION_LIMIT"]


def test_new_token_resets_the_failure_count() -> None:
    rig = Rig()
    rig.lose(suspect=True), rig.lose(suspect=True)
    rig.poison.clear()
    assert [rig.lose(suspect=True) for _ in range(3)] == ["", "", "MIGRATION_LIMIT"]


def test_repeated_error_of_live_engines_is_returned() -> None:
    rig, error = Rig(), Internal("NAN_LOGITS", "m", "f")
    assert [rig.lose(error=error, suspect=True) for _ in range(3)] == ["", "", "NAN_LOGITS"]


def test_unreachable_engines_that_return_in_the_same_epoch_do_not_count() -> None:
    rig = Rig()
    rig.there = {"a": EPOCH, "b": EPOCH}
    assert {rig.lose(name, suspect=True, unreachable=True) for name in "ab" * 14} == {""}


def test_engine_lost_twice_in_the_same_epoch_does_not_count() -> None:
    rig = Rig()
    assert {rig.lose(name, suspect=True, unreachable=True) for name in "abababab"} == {""}


@pytest.mark.parametrize("back", [Epoch(7, 2), Epoch(8, 1), None])
def test_unreachable_engines_that_restart_or_stay_away_count(back: Epoch | None) -> None:
    rig = Rig()
    if back is not None:
        rig.there = dict.fromkeys("abc", back)
    assert [rig.lose(name, suspect=True, unreachable=True) for name in "abc"] == ["", "", "MIGRATION_LIMIT"]


def test_lost_worker_counts_even_in_the_same_epoch() -> None:
    rig = Rig()
    rig.there = dict.fromkeys("abc", EPOCH)
    assert [rig.lose(name, suspect=True) for name in "abc"] == ["", "", "MIGRATION_LIMIT"]


def test_request_fails_after_31_attempts_of_any_kind() -> None:
    rig = Rig()
    rig.there = {"a": EPOCH}
    mixed = [rig.lose(suspect=True, unreachable=True) if i % 2 else rig.lose(bystander=True) for i in range(31)]
    assert mixed == [*[""] * 30, "MIGRATION_LIMIT"]  # of the last that was not heard it is not known yet


def test_refusals_do_not_count() -> None:
    rig = Rig()
    assert {rig.lose(refused=True) for _ in range(100)} == {""}


def test_failures_of_different_kinds_do_not_count_together() -> None:
    """A worker dies, a scheduler hangs, a message is cut, a second apart."""
    rig = Rig()
    kinds = ["WORKER_LOST", "silent", "session_failed", "WORKER_LOST", "silent"]
    assert [rig.lose(suspect=True, kind=kind) for kind in kinds] == [""] * 5


def test_failures_that_stop_all_requests_do_not_count() -> None:
    """Faults come so fast that none of many requests has a token in between."""
    rig, others = Rig(), tuple(Request() for _ in range(8))
    assert [rig.lose(name, suspect=True, beside=others) for name in "abcabc"] == [""] * 6


def test_failures_count_if_other_requests_make_progress() -> None:
    """The others that ran beside it go on elsewhere each time."""
    rig, told = Rig(), list[str]()
    for name in "abc":
        others = tuple(Request() for _ in range(8))
        told.append(rig.lose(name, suspect=True, beside=others))
        for other in others[:4]:
            other.output_ids += b"\0\0\0\0"
    assert told == ["", "", "MIGRATION_LIMIT"]


def test_nine_unrelated_failures_fail_the_request() -> None:
    rig, others = Rig(), (Request(), Request())
    told = [rig.lose(suspect=True, beside=others) for _ in range(9)]
    assert told == [*[""] * 8, "MIGRATION_LIMIT"]

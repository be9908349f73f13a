"""A short run of each target of `make fuzz`, by chance alone; and what must be noticed: a bug, a panic, a hang."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire_common.errors import InvalidArgument
from tests.fuzz.run_target import Recorder, run_random
from tests.fuzz.target import LEAST_READABLE, Outcome, Target, check_error
from tests.fuzz.targets import TARGETS
from tests.fuzz.watch import Watch

INPUTS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_target(name: str, tmp_path: Path) -> None:
    own, kind = tmp_path / "own", TARGETS[name].load()
    own.mkdir()
    with kind(own) as target:
        recorder = Recorder(target, tmp_path, Watch(INPUTS, watchdog=False), 7)
        run_random(recorder, target, INPUTS, 7)
    assert not recorder.findings, "\n".join(recorder.findings.values())
    readable = recorder.outcomes[Outcome.REFUSED.value] + recorder.outcomes[Outcome.ACCEPTED.value]
    assert recorder.outcomes[Outcome.ACCEPTED.value] > 0 and readable >= LEAST_READABLE * INPUTS


class BrokenTarget(Target):
    """Fails by what an input says."""

    covers = ("common/quire_common/errors.py",)

    def seeds(self) -> list[bytes]:
        return [b"good"]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return data

    def run(self, data: bytes) -> Outcome:
        if data == b"crash":
            raise KeyError("a bug")
        if data == b"panic":
            raise BaseException("a panic of Rust")
        if data == b"hang":
            sum(range(int(1e8)))
        if data == b"silent":
            check_error(InvalidArgument("CODE", "A cause.", ""))
        return Outcome.ACCEPTED if data == b"good" else Outcome.UNREADABLE


@pytest.mark.deep
@pytest.mark.parametrize(
    ("data", "finding"),
    [(b"crash", "KeyError"), (b"panic", "BaseException"), (b"silent", "Finding"), (b"hang", "Finding")],
)
def test_a_broken_target_is_noticed(data: bytes, finding: str, tmp_path: Path) -> None:
    recorder = Recorder(BrokenTarget(tmp_path), tmp_path, Watch(2, watchdog=False), 0)
    recorder.run(b"good")
    recorder.run(data)
    assert [name.split()[0] for name in recorder.findings] == [finding]
    assert (tmp_path / "input-0").read_bytes() == data

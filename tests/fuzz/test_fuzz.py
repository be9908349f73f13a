"""A short run of each target of `make fuzz`, by chance alone; and what must be noticed: a bug, a panic, a hang."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from quire_common.errors import InvalidArgument
from tests.fuzz import __main__ as command
from tests.fuzz.run_target import CORPUS, Recorder, run_random
from tests.fuzz.target import LEAST_READABLE, Outcome, Target, check_error
from tests.fuzz.targets import TARGETS
from tests.fuzz.watch import MOST_GROWTH_MIB, Watch

INPUTS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_target(name: str, tmp_path: Path) -> None:
    own, kind = tmp_path / "own", TARGETS[name].load()
    own.mkdir()
    with kind(own) as target:
        recorder = Recorder(target, tmp_path, Watch(INPUTS, watchdog=False), 7)
        run_random(recorder, target, tmp_path / CORPUS, INPUTS, 7)
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


@pytest.mark.parametrize("without_atheris_mib", [1.0, MOST_GROWTH_MIB + 1])
def test_growth_counts_only_without_atheris(
    without_atheris_mib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(name: str, folder: Path, inputs: int, seed: int, engine: str) -> subprocess.CompletedProcess[str]:
        if engine == "lines":
            (folder / "lines.json").write_text("[1, 2]")
        else:
            if engine == "atheris":
                (folder / CORPUS).mkdir()
                (folder / CORPUS / "kept").write_bytes(b"kept")
            else:
                assert (folder / CORPUS / "kept").read_bytes() == b"kept"
            growth_mib = MOST_GROWTH_MIB + 2 if engine == "atheris" else without_atheris_mib
            figures = {"inputs": inputs, "seconds": 1, "outcomes": {"accepted": inputs}, "slowest_s": 0.1}
            (folder / "figures.json").write_text(json.dumps({**figures, "growth_mib": growth_mib, "findings": {}}))
        return subprocess.CompletedProcess([], 0, "")

    monkeypatch.setattr(command, "_process", process)
    run = command.run_target("a target", tmp_path / "run", 100, 0, "atheris")
    assert run.growth_mib == without_atheris_mib
    assert [finding for finding in command.failures(run) if "grew" in finding] == (
        [f"a target: the process grew by {without_atheris_mib:.0f} MiB in the second half of the run"]
        if without_atheris_mib > MOST_GROWTH_MIB
        else []
    )

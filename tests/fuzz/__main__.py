"""`python -m tests.fuzz`: all targets, each in a process of its own, and a table of what became of their inputs.

FUZZ_INPUTS (20,000) are the inputs of all targets together, FUZZ_SEED (0) repeats a run by chance, FUZZ_TARGETS is a
regular expression of names, FUZZ_JOBS (1) targets run at a time. With atheris (`make fuzz` fetches it), inputs follow
what they reach; without, chance.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.output.terminal import table
from tests.fuzz.run_target import CORPUS
from tests.fuzz.target import LEAST_READABLE
from tests.fuzz.targets import TARGETS
from tests.fuzz.watch import MOST_GROWTH_MIB

ROOT = Path(__file__).resolve().parents[2]
_LEAST_INPUTS = 100


@dataclass(frozen=True)
class TargetRun:
    """The report of one target's process. `findings` are texts for people; `died` is one where it told nothing."""

    name: str
    inputs: int = 0
    seconds: float = 0.0
    unreadable: int = 0
    refused: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    growth_mib: float = 0.0
    lines: tuple[int, int] = (0, 0)
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> float:
        """The share of inputs that the first parser passed."""
        return (self.refused + self.accepted) / max(1, self.inputs)


def run_target(name: str, folder: Path, inputs: int, seed: int, engine: str, *, count_lines: bool = True) -> TargetRun:
    """Run one target to its end; then count the lines that its inputs reach."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = _process(name, folder, inputs, seed, engine)
    figures_file = folder / "figures.json"
    if not figures_file.exists():
        return TargetRun(name, findings=(f"{name}: the process ended with {ended.returncode}: {ended.stdout[-3000:]}",))
    told = json.loads(figures_file.read_text())
    found = [*told["findings"].values()]
    growth_mib = told["growth_mib"]
    if engine == "atheris" and growth_mib > MOST_GROWTH_MIB:
        # Code that atheris instruments keeps each array of numpy that a comparison gives; the product's own growth is
        # that of a process without it.
        again = _again_without_atheris(name, folder, inputs, seed)
        growth_mib = again["growth_mib"]
        found += again["findings"].values()
    if growth_mib > MOST_GROWTH_MIB:
        found.append(f"{name}: the process grew by {growth_mib:.0f} MiB in the second half of the run")
    lines_file = folder / "lines.json"
    traced = _process(name, folder, inputs, seed, "lines")
    if not lines_file.exists():
        found.append(f"{name}: lines were not counted: {traced.stdout[-3000:]}")
    outcomes = told["outcomes"]
    return TargetRun(
        name,
        told["inputs"],
        told["seconds"],
        outcomes.get("unreadable", 0),
        outcomes.get("refused", 0),
        outcomes.get("accepted", 0),
        told["slowest_s"],
        growth_mib,
        tuple(json.loads(lines_file.read_text())) if lines_file.exists() else (0, 0),
        tuple(found),
    )


def _again_without_atheris(name: str, folder: Path, inputs: int, seed: int) -> dict[str, Any]:
    """Change the inputs that atheris kept by chance, as many times, and return the figures of that process."""
    own = folder / "without-atheris"
    shutil.copytree(folder / CORPUS, own / CORPUS)
    ended = _process(name, own, inputs, seed, "random")
    figures_file = own / "figures.json"
    if not figures_file.exists():
        cause = f"{name} without atheris: the process ended with {ended.returncode}: {ended.stdout[-3000:]}"
        return {"growth_mib": 0.0, "findings": {"ended": cause}}
    figures: dict[str, Any] = json.loads(figures_file.read_text())
    return figures


def failures(run: TargetRun) -> list[str]:
    """Faults of a run, for people."""
    found = list(run.findings)
    if run.inputs and run.passed < LEAST_READABLE:
        found.append(f"{run.name}: the first parser passed {run.passed:.0%} of the inputs; that tests little behind it")
    return found


def show(runs: list[TargetRun]) -> str:
    """The table."""
    rows = [
        [
            run.name,
            f"{run.inputs:,}",
            f"{run.passed:.0%}",
            f"{run.accepted:,}",
            f"{run.lines[0] / max(1, run.lines[1]):.0%} of {run.lines[1]:,}",
            f"{run.inputs / max(1e-9, run.seconds):,.0f}",
            f"{run.slowest_s * 1e3:.0f}",
            f"{run.growth_mib:.1f}",
            str(len(run.findings)),
        ]
        for run in runs
    ]
    total = sum(run.inputs for run in runs)
    passed = sum(run.refused + run.accepted for run in runs)
    rows.append(
        [
            "all",
            f"{total:,}",
            f"{passed / max(1, total):.0%}",
            f"{sum(run.accepted for run in runs):,}",
            "",
            "",
            "",
            "",
            str(sum(len(run.findings) for run in runs)),
        ]
    )
    header = [
        "target",
        "inputs",
        "readable",
        "accepted",
        "lines reached",
        "inputs/s",
        "slowest ms",
        "growth MiB",
        "findings",
    ]
    return table(header, rows, right=(1, 2, 3, 4, 5, 6, 7, 8))


def main() -> int:
    inputs, seed = int(os.environ.get("FUZZ_INPUTS", "20000")), int(os.environ.get("FUZZ_SEED", "0"))
    wanted = re.compile(os.environ.get("FUZZ_TARGETS", ""))
    engine = "atheris" if importlib.util.find_spec("atheris") else "random"
    chosen = {name: target for name, target in TARGETS.items() if wanted.search(name)}
    shares = sum(target.share for target in chosen.values())
    print(f"{inputs:,} inputs for {len(chosen)} targets, engine {engine}, seed {seed}", flush=True)

    def run_one(name: str) -> TargetRun:
        mine = max(_LEAST_INPUTS, inputs * chosen[name].share // shares)
        run = run_target(name, ROOT / "build" / "fuzz" / name, mine, seed, engine)
        print(f"{name}: {run.inputs:,} inputs in {run.seconds:.0f} s, {len(failures(run))} findings", flush=True)
        return run

    with ThreadPoolExecutor(int(os.environ.get("FUZZ_JOBS", "1"))) as jobs:
        runs = [*jobs.map(run_one, chosen)]
    found = [finding for run in runs for finding in failures(run)]
    print(show(runs))
    print("\n\n".join(found))
    return 1 if found else 0


def _process(name: str, folder: Path, inputs: int, seed: int, engine: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.run_target", name, str(folder), str(inputs), str(seed), engine]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )


if __name__ == "__main__":
    sys.exit(main())

"""Which index torch is installed from: decided without a network, on made-up machines."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.install_torch import CONSTRAINTS, CPU_INDEX, DRIVER, chosen_index, install

OTHER = "https://wheels.example/cpu"


def _yes(_index: str) -> bool:
    return True


def _no(_index: str) -> bool:
    return False


def _never(_index: str) -> bool:
    raise AssertionError("the index was asked")


@pytest.fixture(autouse=True)
def _no_nvidia_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


class Pip:
    """Runs nothing: keeps the commands, and fails those that name an index in `broken`."""

    def __init__(self, *broken: str) -> None:
        self.commands: list[Sequence[str]] = []
        self._broken = broken

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(command)
        return int(any(index in command for index in self._broken))


def test_a_machine_without_gpu_takes_the_cpu_build(tmp_path: Path) -> None:
    assert chosen_index({}, "linux", tmp_path, _yes) == CPU_INDEX


def test_an_index_that_does_not_answer_is_left_alone(tmp_path: Path) -> None:
    assert chosen_index({}, "linux", tmp_path, _no) is None


@pytest.mark.parametrize("sign", DRIVER)
def test_a_machine_with_a_gpu_takes_what_the_package_index_has(tmp_path: Path, sign: str) -> None:
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    assert chosen_index({}, "linux", tmp_path, _never) is None


def test_other_systems_take_what_the_package_index_has(tmp_path: Path) -> None:
    assert chosen_index({}, "darwin", tmp_path, _never) is None


def test_the_variable_overrides_and_empty_turns_it_off(tmp_path: Path) -> None:
    assert chosen_index({"TORCH_INDEX": OTHER}, "linux", tmp_path, _never) == OTHER
    assert chosen_index({"TORCH_INDEX": ""}, "linux", tmp_path, _never) is None


def test_dependencies_come_from_the_package_index(tmp_path: Path) -> None:
    pip = Pip()
    assert install({}, "linux", tmp_path, _yes, pip) == 0
    (command,) = pip.commands
    assert "--no-deps" in command
    assert command[command.index("--index-url") + 1] == CPU_INDEX
    assert Path(command[command.index("--constraint") + 1]).is_file()


def test_an_index_without_our_torch_is_passed_over(tmp_path: Path) -> None:
    pip = Pip(CPU_INDEX)
    assert install({}, "linux", tmp_path, _yes, pip) == 0
    assert ["--index-url" in command for command in pip.commands] == [True, False]


def test_an_index_that_was_asked_for_is_not_passed_over(tmp_path: Path) -> None:
    pip = Pip(OTHER)
    assert install({"TORCH_INDEX": OTHER}, "linux", tmp_path, _never, pip) == 1
    assert len(pip.commands) == 1


def test_triton_may_be_3_6_or_what_torch_brings() -> None:
    """torch 2.13 of the package index requires triton 3.7.1: a pin of any other ends in ResolutionImpossible."""
    constraints = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    project = tomllib.loads((CONSTRAINTS.parent / "services/worker/pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["gpu"])
    ranges = [each.specifier for each in (*constraints, *extra) if each.name == "triton"]
    assert len(ranges) == 2
    assert all(each.contains(version) for each in ranges for version in ("3.6.0", "3.7.1"))

"""The wheels of `make wheels`: all that a user needs, nothing else, and never a stranger's package beside them."""

from __future__ import annotations

import configparser
import email
import email.message
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.build_wheels import PROJECTS, ROOT, build_wheels

FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "constraints.txt", ".gitignore")
FOLDERS = ("proto", "quire", "services")
LIMIT_S = 120
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def project_of(folder: str) -> dict[str, object]:
    return dict(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"])


def package_of(folder: str) -> str:
    return str(project_of(folder)["name"]).replace("-", "_")


def copy_sources(target: Path) -> Path:
    """A copy, since the build writes stubs into the sources, which other tests import meanwhile. All contents of the
    copy are newer than the sources, and a wheel must not show it."""
    target.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"), symlinks=True
        )
    return target


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each folder of PROJECTS."""
    home = tmp_path_factory.mktemp("wheels")
    sources = copy_sources(home / "sources")
    # What a working checkout has besides its sources.
    for litter in ("quire/__pycache__/x.pyc", "quire/notes.log", "services/worker/quire_worker.egg-info/PKG-INFO"):
        (sources / litter).parent.mkdir(parents=True, exist_ok=True)
        (sources / litter).write_text("")
    (home / "dist").mkdir()
    (home / "dist" / "quire_worker-0.0.1-py3-none-any.whl").write_text("of an earlier build")
    built = build_wheels(sources, home / "dist")
    assert set((home / "dist").iterdir()) == {*built, home / "dist" / "constraints.txt"}
    assert (home / "dist" / "constraints.txt").read_bytes() == (ROOT / "constraints.txt").read_bytes()
    return dict(zip(PROJECTS, built, strict=True))


def metadata_of(wheel: Path) -> Metadata:
    return Metadata.from_email(read_info(wheel, "METADATA"), validate=False)


def read_info(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}"))
        return archive.read(path)


@pytest.mark.parametrize("folder", PROJECTS)
def test_a_wheel_has_its_package_and_nothing_else(folder: str, wheels: dict[str, Path]) -> None:
    package = package_of(folder)
    files = (path for path in (ROOT / folder / package).rglob("*") if path.is_file() and path.suffix != ".pyc")
    wanted = {path.relative_to(ROOT / folder).as_posix() for path in files if "_pb2" not in path.name}
    if folder == ".":
        contracts = (ROOT / "proto" / "quire" / "v1").glob("*.proto")
        wanted |= {f"quire/v1/{contract.stem}{ending}" for contract in contracts for ending in STUBS}
    assert f"{package}/py.typed" in wanted
    info = f"{package}-{project_of(folder)['version']}.dist-info"
    wanted |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    wanted |= {f"{info}/entry_points.txt"} if folder == "." else set()
    with zipfile.ZipFile(wheels[folder]) as archive:
        assert set(archive.namelist()) == wanted
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", PROJECTS)
def test_metadata_says_what_the_project_says(folder: str, wheels: dict[str, Path]) -> None:
    project, metadata = project_of(folder), metadata_of(wheels[folder])
    assert (metadata.name, str(metadata.version)) == (project["name"], project["version"])
    assert str(metadata.requires_python) == project["requires-python"]
    assert (metadata.license_expression, metadata.license_files) == ("Apache-2.0", ["LICENSE"])
    extras = project.get("optional-dependencies", {})
    assert isinstance(extras, dict)
    assert set(metadata.provides_extra or ()) == set(extras)
    for extra in ("", *extras):
        assert dependencies_of(metadata, extra) == dependencies_of_project(project, extra)


def dependencies_of(metadata: Metadata, extra: str) -> set[tuple[str, str]]:
    """Name and versions of what is required for the extra alone; for "", of what is always required."""
    found = metadata.requires_dist or []
    always = {pin(requirement) for requirement in found if requirement.marker is None}
    of_extra = {pin(r) for r in found if r.marker is not None and r.marker.evaluate({"extra": extra})}
    return of_extra if extra else always


def dependencies_of_project(project: dict[str, object], extra: str) -> set[tuple[str, str]]:
    extras = project.get("optional-dependencies", {})
    listed = extras[extra] if extra else project["dependencies"]  # type: ignore[index]  # a table of lists
    assert isinstance(listed, list)
    found: set[tuple[str, str]] = set()
    for requirement in map(Requirement, listed):
        own = requirement.name == project["name"]  # an extra that includes others of the distribution
        inner = [dependencies_of_project(project, name) for name in requirement.extras] if own else [{pin(requirement)}]
        found = found.union(*inner)
    return found


def pin(requirement: Requirement) -> tuple[str, str]:
    return canonicalize_name(requirement.name), ",".join(sorted(map(str, requirement.specifier)))


def test_all_versions_are_one_and_pinned(wheels: dict[str, Path]) -> None:
    """A release is one set: no distribution accepts another release's."""
    versions = {str(metadata_of(wheel).version) for wheel in wheels.values()}
    (version,) = versions
    names = {metadata_of(wheel).name for wheel in wheels.values()}
    for wheel in wheels.values():
        for requirement in metadata_of(wheel).requires_dist or []:
            assert not requirement.name.startswith("quire") or requirement.name in names
            assert requirement.name not in names or str(requirement.specifier) == f"=={version}"


def test_all_is_every_distribution(wheels: dict[str, Path]) -> None:
    names = {metadata_of(wheel).name for wheel in wheels.values()}
    required = {name for name, _ in dependencies_of(metadata_of(wheels["."]), "all")}
    assert names - required == {"quire"}


def test_the_command_is_an_entry_point(wheels: dict[str, Path]) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read_info(wheels["."], "entry_points.txt").decode())
    assert dict(parser["console_scripts"]) == {"quire": "quire.__main__:main"}


def test_equal_sources_give_equal_bytes(
    wheels: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, later, with other permissions of files and another order of hashes."""
    sources = copy_sources(tmp_path / "other")
    for path in sources.rglob("*.py"):
        path.chmod(0o600)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    old = os.umask(0o077)
    try:
        again = build_wheels(sources, tmp_path / "dist")
    finally:
        os.umask(old)
    assert [digest(wheel) for wheel in again] == [digest(wheel) for wheel in wheels.values()]


def digest(path: Path) -> tuple[str, str]:
    return path.name, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def hostile_index(wheels: dict[str, Path], tmp_path: Path) -> Path:
    """A folder that pip prefers: for each name of ours a higher version and one that ranks above the equal one, and
    everything else that our distributions require."""
    folder = tmp_path / "index"
    folder.mkdir()
    for wheel in wheels.values():
        metadata = metadata_of(wheel)
        empty_wheel(folder, metadata.name, str(metadata.version), build="9")
        empty_wheel(folder, metadata.name, "99.0")
    for name, version in pinned_versions().items():
        empty_wheel(folder, name, version)
    return folder


def pinned_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def empty_wheel(folder: Path, name: str, version: str, requires: Iterable[str] = (), build: str = "") -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    info = email.message.Message()
    info["Metadata-Version"], info["Name"], info["Version"] = "2.1", name, version
    for requirement in requires:
        info["Requires-Dist"] = requirement
    with zipfile.ZipFile(folder / f"{stem}{'-' + build if build else ''}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", info.as_bytes())
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


def chosen(index: Path, what: Sequence[str]) -> dict[str, str]:
    """Where pip takes each distribution from; it installs nothing and reaches no network."""
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--disable-pip-version-check", "--no-index", "--find-links", str(index), "--report", "-", *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=index)
    assert done.returncode == 0, done.stderr
    return {each["metadata"]["name"]: each["download_info"]["url"] for each in json.loads(done.stdout)["install"]}


def test_a_strangers_package_of_the_name_is_never_taken(wheels: dict[str, Path], hostile_index: Path) -> None:
    """An index may have packages of any of our names. PyPI has another project called quire."""
    found = chosen(hostile_index, [*map(str, wheels.values()), "--constraint", str(ROOT / "constraints.txt")])
    assert {wheel.as_uri() for wheel in wheels.values()} == {url for name, url in found.items() if "quire" in name}
    assert "torch" in found
    # By name it would have been taken.
    assert "99.0" in chosen(hostile_index, ["quire", "--find-links", str(wheels["."].parent)])["quire"]

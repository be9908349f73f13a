"""The recipe of the images: its packages are those that Quire is tested with."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire_worker.transformers_backend.find_model import SUPPORTED_RELEASES
from tools.images import recipe
from tools.images.lock import LOCK, entries_for_linux, locked_versions, of_distributions, of_torch
from tools.images.recipe import CONTAINERFILE, TARGETS
from tools.images.run import HARDENED

ROOT = Path(__file__).resolve().parents[3]
FOLDER = CONTAINERFILE.parent


def pins_of_constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_the_pins_of_images_are_those_of_the_tests() -> None:
    locked, pinned = locked_versions(), pins_of_constraints()
    assert len(locked) > 40
    assert {name: pinned.get(name) for name in locked} == locked
    assert "torch" not in locked and "torch" in pinned


def test_the_lock_has_all_that_the_distributions_require() -> None:
    """Direct requirements, of which the lock is made."""
    names = {canonicalize_name(each.name) for each in of_distributions()} - {"torch"}
    assert names <= {*locked_versions()}


def test_images_of_workers_have_the_transformers_backend() -> None:
    """With the release that the backend was written for."""
    stages = re.findall(r"^FROM service AS (\S+)\n(.*?)(?=^FROM|\Z)", CONTAINERFILE.read_text(), re.M | re.S)
    extras = {name: re.findall(r"quire_worker(?:\[([a-z,]+)\])?", body.partition("USER")[0]) for name, body in stages}
    assert {name for name, found in extras.items() if found} == {"worker-cpu", "worker-gpu", "all-in-one"}
    assert all("transformers" in each.split(",") for found in extras.values() for each in found)
    assert locked_versions()["transformers"] in Requirement(SUPPORTED_RELEASES).specifier
    required = [Requirement(each).name for each in requires("transformers") or () if "extra" not in each]
    assert {canonicalize_name(name) for name in required} <= {*locked_versions()}


def test_each_package_of_the_lock_has_hashes() -> None:
    entries = re.findall(r"^[a-z].*\n(?: +--hash.*\n)*", LOCK.read_text(), re.MULTILINE)
    assert len(entries) == len(locked_versions())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)


def test_what_other_systems_need_is_left_out_of_the_lock() -> None:
    lock = 'a==1 \\\n    --hash=sha256:0\nb==2 ; sys_platform == "win32" \\\n    --hash=sha256:1\n'
    lock += 'c==3 ; python_full_version < "3.11.3" \\\n    --hash=sha256:2\n'
    assert [entry[0] for entry in entries_for_linux(lock)] == ["a", "c"]


def test_torch_brings_only_what_the_recipe_installs_before_it() -> None:
    """Into the GPU image, whose pip then takes torch and CUDA alone from an index."""
    (line,) = re.findall(r"^ +into_environment \$verified (f.+)$", (FOLDER / "install.sh").read_text(), re.MULTILINE)
    required = {canonicalize_name(re.split(r"[<>=!~; \[]", each)[0]) for each in of_torch()}
    assert required == {canonicalize_name(name) for name in line.split()}


def test_every_target_is_hardened_alike() -> None:
    text = CONTAINERFILE.read_text()
    stages = dict(re.findall(r"^FROM service AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S))
    assert {*stages} == {*TARGETS}
    for name, body in stages.items():
        assert body.index("USER 65532:65532") > body.rindex("RUN "), name
        assert f"install.sh environment {name}" in body
        assert "\nENTRYPOINT [" in body and "\nHEALTHCHECK " in body
        assert name == "all-in-one" or '"liveness"]' in body
    assert {"--read-only", "--cap-drop=all", "65532:65532"} <= {*HARDENED}


def test_the_stack_of_compose_takes_these_images() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"].values()
    images = {str(service["image"]) for service in services}
    found = {re.sub(r".*/([a-z-]+):\$.*", r"\1", image) for image in images if "QUIRE_VERSION" in image}
    assert found == {*TARGETS} - {"all-in-one"}


def test_the_hash_of_images_parts_follows_wheels_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder beside the files, such as Python's cache, does not count."""
    scripts, dist = tmp_path / "deploy" / "images", tmp_path / "dist"
    for folder in (scripts, dist, scripts / "__pycache__"):
        folder.mkdir(parents=True)
    files = [tmp_path / "constraints.txt", dist / "quire-1-py3-none-any.whl", scripts / "install.sh"]
    for path in files:
        path.write_text("before")
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    monkeypatch.setattr(recipe, "CONTAINERFILE", scripts / "Containerfile")
    found = {recipe.parts_hash()}
    for path in files:
        path.write_text("after")
        found.add(recipe.parts_hash())
    assert len(found) == 1 + len(files)
    (scripts / "__pycache__" / "sbom.pyc").write_text("")
    assert recipe.parts_hash() in found

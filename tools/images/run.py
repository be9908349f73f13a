"""Runs the images of `make images`, hardened, and measures them. The services find each other on their own network, so
each of them becomes ready as in production: the scheduler with a worker, the router with all others."""

from __future__ import annotations

import json
import subprocess
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.images.podman import address_of, inspect, podman, process_of, remove_containers
from tools.images.recipe import ROOT, image_name

HARDENED: Final = (
    *("--user", "65532:65532", "--read-only", "--cap-drop=all", "--security-opt", "no-new-privileges"),
    *("--tmpfs", "/tmp:size=64m,mode=1777", "--pids-limit", "512", "--memory", "3g"),
)
NETWORK: Final = "quire-images"
READY_LIMIT_S: Final = 300.0
_COMPILE_LIMIT_S: Final = 600.0
MODEL: Final = "/models/demo"
MODELS: Final = ("--volume", f"{ROOT / 'models'}:/models:ro")
# Compiles kernels for Hopper, which needs no GPU.
_KERNELS: Final = ROOT / "tests" / "kernels" / "ops" / "compiled.py"
# gRPC port, options of podman, and flags of the service.
SERVICES: Final[Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...]]]] = {
    "kvstore": (50054, (), ()),
    "worker-cpu": (50053, MODELS, ("--model", MODEL, "--served-model-name", "demo", "--kvstore", "kvstore:50054")),
    "tokenizer": (50051, MODELS, ("--model", MODEL)),
    "scheduler": (50052, (), ("--worker", "worker-cpu:50053", "--kvstore", "kvstore:50054")),
    "router": (
        50050,
        (),
        ("--host", "0.0.0.0", "--schedulers", "scheduler:50052", "--tokenizers", "tokenizer:50051"),
    ),
    # A machine without a GPU checks the image's parts, but none of its kernels.
    "worker-gpu": (
        50053,
        (*MODELS, "--volume", f"{_KERNELS}:/probe/compiled.py:ro"),
        ("--model", MODEL, "--device", "cpu", "--kvstore", "kvstore:50054"),
    ),
}
# On a GPU, Triton compiles a C file for its driver and one for each kernel, and loads them from its cache. Here the C
# compiler of the image makes a library of Triton's driver, which links to the library of NVIDIA's driver only on a host
# with a GPU, and one that is loaded.
_COMPILE: Final = """
import ctypes, os, pathlib, subprocess, sysconfig
import torch, triton
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"]); folder.mkdir(parents=True, exist_ok=True)
nvidia = pathlib.Path(triton.__file__).parent / "backends" / "nvidia"
include = ["-I", sysconfig.get_paths()["include"], "-I", nvidia / "include"]
source, library = folder / "probe.c", folder / "probe.so"
source.write_text("#include <Python.h>\\nint answer(void) { return PY_MAJOR_VERSION; }")
for each, made in ((source, library), (nvidia / "driver.c", folder / "driver.so")):
    subprocess.run([os.environ["CC"], "-shared", "-fPIC", "-O3", *include, each, "-o", made], check=True)
if ctypes.CDLL(str(library)).answer() != 3 or not torch.version.cuda:
    raise SystemExit("the compiled library gives a wrong answer, or torch has no CUDA")
print(f"torch {torch.__version__} with CUDA {torch.version.cuda}, triton {triton.__version__}")
"""


@dataclass(frozen=True)
class Report:
    """The result of a run. `error` is empty if the image became ready and answered."""

    target: str
    ready_s: float = 0.0
    memory_bytes: int = 0
    note: str = ""
    error: str = ""


class Runs:
    """The containers of one check. All are removed at its end."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def __enter__(self) -> Self:
        if podman("network", "exists", NETWORK, check=False).returncode:
            podman("network", "create", NETWORK)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        remove_containers(self._names)
        podman("network", "rm", "--force", NETWORK, check=False)

    def run(self, target: str) -> Report:
        """Run one image, together with the images that ran before."""
        try:
            return self._run_all_in_one() if target == "all-in-one" else self._run_service(target)
        except TimeoutError as error:
            return Report(target, error=str(error))
        except subprocess.CalledProcessError as error:
            return Report(target, error=f"{error}: {' '.join(error.__notes__)}")

    def _run_service(self, target: str) -> Report:
        port, options, flags = SERVICES[target]
        began = time.monotonic()
        name = self._start(target, *options, image_name(target), "--insecure", "--listen", f"0.0.0.0:{port}", *flags)
        self._wait(name, lambda: is_ready(f"{address_of(name)}:{port}"))
        ready_s, memory = time.monotonic() - began, memory_of(name)
        note = " ".join(flags) or "no flags"
        if target == "router":
            note += f"; answered {answer_of(f'http://{address_of(name)}:8000')!r}"
        if target == "worker-gpu":
            note += f"; {compiled_in(name)}; NOT RUN ON A GPU"
        return Report(target, ready_s, memory, note)

    def _run_all_in_one(self) -> Report:
        began = time.monotonic()
        name = self._start(
            "all-in-one", image_name("all-in-one"), "--model", "models/demo", "--served-model-name", "demo"
        )
        url = f"http://{address_of(name)}:8000"
        self._wait(name, lambda: _is_ok(f"{url}/health"))
        ready_s, memory = time.monotonic() - began, memory_of(name)
        return Report("all-in-one", ready_s, memory, f"--model models/demo; answered {answer_of(url)!r}")

    def _start(self, target: str, *arguments: str) -> str:
        name = f"{NETWORK}-{target}"
        remove_containers([name])
        podman(
            *("run", "--detach", "--name", name, "--network", NETWORK, "--network-alias", target, *HARDENED, *arguments)
        )
        self._names.append(name)
        return name

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Raise TimeoutError, with the end of the container's log, for a container that ends or does not become
        ready."""
        deadline = time.monotonic() + READY_LIMIT_S
        while not ready():
            ended = not process_of(name)
            if ended or time.monotonic() > deadline:
                log = podman("logs", "--tail", "15", name, check=False)
                what = (
                    f"ended with {inspect(name)['State']['ExitCode']}" if ended else f"not ready in {READY_LIMIT_S} s"
                )
                raise TimeoutError(f"{what}: {log.stdout[-2000:]}{log.stderr[-2000:]}")
            time.sleep(0.2)


def compiled_in(worker: str) -> str:
    """Compile C files and the kernels of GPUs in a worker's container. Returns the versions and the number of
    kernels, in words. Raises CalledProcessError."""
    versions = podman("exec", worker, "python", "-c", _COMPILE, timeout_s=_COMPILE_LIMIT_S).stdout.strip()
    kernels = podman("exec", worker, "python", "/probe/compiled.py", timeout_s=_COMPILE_LIMIT_S).stdout.splitlines()
    made = "a C library made and loaded in TRITON_CACHE_DIR"
    return f"{versions}; {made}; {len(kernels) - 1} kernels compiled for Hopper"


def is_ready(address: str) -> bool:
    """Whether the gRPC service at the address says that it is ready."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service="readiness")
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def answer_of(url: str) -> str:
    """Return the stack's answer to a prompt."""
    body = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return str(found["choices"][0]["text"])


def memory_of(name: str) -> int:
    """Return the bytes of memory of the container's processes. Shared memory is divided among the processes that share
    it."""
    first = psutil.Process(process_of(name))
    return sum(int(process.memory_full_info().pss) for process in (first, *first.children(recursive=True)))

"""The five services of any checkout, in a process of their own, so that a benchmark can compare two versions.

This file is also the program of that process. The process has the other checkout on its path, so this file imports
nothing from `bench`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

SOURCE_FOLDERS = ("common", "router", "tokenizer", "scheduler", "worker", "kvstore")


class CheckoutServices(NamedTuple):
    """Running services."""

    http: str
    """The URL of the router."""
    grpc: str
    """The address of the router's gRPC."""
    pid: int
    """The process whose children the services are."""


@contextlib.contextmanager
def start_services(checkout: Path, name: str, model: Path, **spec: Any) -> Iterator[CheckoutServices]:
    """Start the services of a checkout, whose stubs are generated, and end them with the context. `spec`: further
    fields of StackSpec. Raises RuntimeError if they do not start."""
    folders = [checkout, *(checkout / "services" / service for service in SOURCE_FOLDERS)]
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), inherited]))}
    given = {"name": name, "model": str(model), "keep_directory": False, **spec}
    command = [sys.executable, "-P", __file__, json.dumps(given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        if holder.stdout is None or not (addresses := holder.stdout.readline().split()):
            raise RuntimeError(f"the services of {checkout} did not start")
        http, grpc = addresses
        yield CheckoutServices(http, grpc, holder.pid)


def hold_services(spec: dict[str, Any]) -> None:
    """Start the services of the checkout that is on the path, and print their addresses. End the services when standard
    input closes."""
    with contextlib.closing(LocalStack(StackSpec(**{**spec, "name": f"{spec['name']}-{os.getpid()}"}))) as stack:
        print(stack.ready.http, stack.grpc, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    hold_services(json.loads(sys.argv[1]))

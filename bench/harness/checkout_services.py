"""The five services of any checkout, in a process of their own, so that a benchmark can compare two versions.

This file is also the program of that process. It runs with the other checkout's folders on the path, so it imports
nothing of this folder.
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

SERVICES = ("common", "router", "tokenizer", "scheduler", "worker", "kvstore")


class CheckoutServices(NamedTuple):
    """Running services: the address of the router's HTTP and of its gRPC, and the process that holds them."""

    http: str
    grpc: str
    holder: int


@contextlib.contextmanager
def serving(checkout: Path, name: str, model: Path, **spec: Any) -> Iterator[CheckoutServices]:
    """Start the services of a checkout, whose stubs are generated, and end them with the context. `spec`: further
    fields of StackSpec. Raises RuntimeError if they do not start."""
    folders = [checkout, *(checkout / "services" / service for service in SERVICES)]
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), inherited])}
    given = {"name": name, "model": str(model), "keep_directory": False, **spec}
    command = [sys.executable, "-P", __file__, json.dumps(given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        if holder.stdout is None or not (addresses := holder.stdout.readline().split()):
            raise RuntimeError(f"the services of {checkout} did not start")
        http, grpc = addresses
        yield CheckoutServices(http, grpc, holder.pid)


def hold(spec: dict[str, Any]) -> None:
    """Start the services of the checkout that is on the path, and print their addresses. End them when the caller does
    not need them any more."""
    with contextlib.closing(LocalStack(StackSpec(**{**spec, "name": f"{spec['name']}-{os.getpid()}"}))) as stack:
        print(stack.ready.http, stack.grpc, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))

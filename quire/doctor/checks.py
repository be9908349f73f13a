"""All checks, in the order in which they are shown. A check reports a problem as a finding, and changes nothing.
nvidia-smi has 20 s to answer, and Redis 3 s for each piece of its answer; a look-up of a name has no limit."""

from __future__ import annotations

from collections.abc import Iterator

from quire.doctor.finding import Finding
from quire.doctor.machine import check_clock, check_cores, check_disk, check_files, check_memory, check_shared_memory
from quire.doctor.network import check_port, check_redis
from quire.doctor.software import check_gpu, check_grammars, check_model, check_python, check_services


def check_all(host: str, port: int, redis: str | None, model: str | None, device: str) -> list[Finding]:
    """Run all checks, and return their findings in the order in which they are shown. `redis` and `model` are checked
    only if they are named; `device` cuda makes a missing GPU a failure."""
    return list(_all(host, port, redis, model, device))


def _all(host: str, port: int, redis: str | None, model: str | None, device: str) -> Iterator[Finding]:
    """Run the checks one by one, and yield each finding. The checks of Redis and of a model run only if one is named. A
    GPU is needed only for the device cuda."""
    yield check_python()
    yield check_services()
    yield check_grammars()
    yield check_port(host, port)
    if redis:
        yield check_redis(redis)
    yield check_gpu(needed=device == "cuda")
    if model:
        yield check_model(model)
    yield check_cores()
    yield check_memory()
    yield check_shared_memory()
    yield check_disk()
    yield check_files()
    yield check_clock()

"""A router in front of schedulers with roles, and what its tests ask of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from quire.v1 import common_pb2
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_faults import nothing_left, until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.pd_scheduler import PdScheduler


def sides(decoders: int = 1, **options: Any) -> list[PdScheduler]:
    """A prefill side, then decode sides."""
    return [PdScheduler(role="prefill", **options), *(PdScheduler(role="decode", **options) for _ in range(decoders))]


@contextlib.asynccontextmanager
async def pd_rig(
    fakes: Sequence[PdScheduler], tokenizers: Sequence[FakeTokenizer] | None = None, **config: Any
) -> AsyncIterator[RouterRig]:
    """Whatever can be prefilled elsewhere is, and everybody is there."""
    async with router_rig(fakes, tokenizers, **{"pd_least_tokens": 1, "pd_threshold_tokens": 1, **config}) as rig:
        await until(lambda: all(replica.accepts for replica in rig.router.fleet.replicas.values()))
        yield rig


def all_free(rig: RouterRig, fakes: Sequence[PdScheduler]) -> bool:
    """Nothing runs, waits, or is lent anywhere."""
    reserved = any(r.session.reservations for r in rig.router.fleet.replicas.values())
    return nothing_left(rig) and not reserved and not any(fake.kept or fake.transfers for fake in fakes)


def refusal(code: str, grpc_code: grpc.StatusCode) -> common_pb2.RequestError:
    return common_pb2.RequestError(code=code, message="m", fix="f", grpc_code=grpc_code.value[0])

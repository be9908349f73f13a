"""Certificates of a running stack live for seconds and are renewed all the time, and no request fails.

Services keep connections, so handshakes are made to happen: each request dials anew, and services are killed, whose
successors and peers must connect with the certificates of that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quire import AsyncClient, SamplingParams
from quire.local.service_tls import sync_channel
from quire.local.spec import SERVICES, StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_common.identity.callers import OPERATOR
from tests.certificates import Authority
from tests.pipeline.leftovers import assert_nothing_left

pytestmark = pytest.mark.slow
LIFE_S = 20.0
RENEWED_EVERY_S = 4.0
LOAD_S = 70.0
# One member is killed at each of these times; the other of its kind goes on.
KILLED = {20.0: "scheduler-2", 35.0: "worker-1", 50.0: "tokenizer-2"}
STREAMS = 4
TOKENS = 40


class Certificates:
    """The folder of a stack whose certificates live for LIFE_S."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority, self._public = Authority(folder, "ca"), Authority(folder, "public-ca")
        self.renewed = 0
        self.renew((*SERVICES, OPERATOR))

    def renew(self, identities: tuple[str, ...] = (*SERVICES,)) -> None:
        for identity in identities:
            self._authority.files(identity, identity, life_s=LIFE_S)
        self._public.files("public", dns=("localhost",), life_s=LIFE_S)
        self.renewed += 1


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Certificates(folder)


@pytest.fixture
def stack(certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    spec = StackSpec(
        "rotation",
        str(find_model(None)),
        replicas=2,
        tokenizers=2,
        drain_timeout_s=5.0,
        tls_folder=str(certificates.folder),
        flags={"worker": {"paced": "5", "max-num-seqs": "16"}},
    )
    running = LocalStack(spec)
    state = running.directory.read()
    assert state is not None
    yield running
    running.close()
    assert_nothing_left(state)


async def ask_forever(stack: LocalStack, ca: str, number: int, until_s: float) -> list[str]:
    """One request after another, each on a connection of its own; returns the answers."""
    answers = list[str]()
    while time.monotonic() < until_s:
        async with AsyncClient(stack.grpc, tls_ca=ca) as client:
            done = await client.complete(
                f"ROMEO {number}:", SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            )
        answers.append(done.outputs[0].text)
    return answers


async def change_certificates(certificates: Certificates, until_s: float) -> None:
    while time.monotonic() < until_s:
        await asyncio.to_thread(certificates.renew)
        await asyncio.sleep(RENEWED_EVERY_S)


async def kill_members(stack: LocalStack, began_s: float) -> None:
    for at_s, member in KILLED.items():
        await asyncio.sleep(began_s + at_s - time.monotonic())
        state = stack.directory.read()
        assert state is not None
        assert state.services[member].process.signal(signal.SIGKILL)


def call_scheduler_as_operator(stack: LocalStack, certificates: Certificates) -> None:
    state = stack.directory.read()
    assert state is not None
    address = f"127.0.0.1:{state.services['scheduler-1'].port}"
    with contextlib.closing(sync_channel(address, "scheduler", str(certificates.folder))) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=20)


async def test_no_request_fails_while_certificates_change_and_expire(
    stack: LocalStack, certificates: Certificates
) -> None:
    call_scheduler_as_operator(stack, certificates)
    began_s = time.monotonic()
    until_s, ca = began_s + LOAD_S, str(certificates.folder / "public-ca.pem")
    asking = [ask_forever(stack, ca, number, until_s) for number in range(STREAMS)]
    changing = asyncio.gather(change_certificates(certificates, until_s), kill_members(stack, began_s))
    answers = await asyncio.gather(*asking)
    await changing

    assert all(len(each) >= 5 and len(set(each)) == 1 for each in answers), "the same answer each time"
    assert certificates.renewed >= LOAD_S / LIFE_S, "certificates have expired several times"
    assert len(stack.deaths) == len(KILLED)
    # The operator's certificate was not renewed and has expired, so its caller is a stranger now.
    with pytest.raises(grpc.RpcError) as caught:
        call_scheduler_as_operator(stack, certificates)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    certificates.renew((OPERATOR,))
    call_scheduler_as_operator(stack, certificates)

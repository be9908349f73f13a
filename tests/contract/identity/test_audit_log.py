"""The audit log tells who called what of administration, and how that ended; it has no secret."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2 as cb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from quire_common.channel import sync_channel
from quire_common.identity.callers import ADMIN_RPCS, CALLERS, OPERATOR, PUBLIC, ROUTER
from quire_common.telemetry.audit import LOGGER
from quire_router.api_keys import ApiKeys, audited
from tests.certificates import Authority
from tests.contract.common.identity.test_callers import ask, config_of, sync_server
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

Line = tuple[str, str, str, str]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Line]]:
    """Returns the lines of the audit log since the last call, as action, outcome, identity and key name."""
    caplog.set_level(logging.INFO, logger=LOGGER)

    def take() -> list[Line]:
        found = [record.fields for record in caplog.records if record.name == LOGGER]  # type: ignore[attr-defined]  # set by quire_common.telemetry.logs
        caplog.clear()
        assert all(set(line) == {"action", "outcome", "identity", "api_key_name", "subject", "peer"} for line in found)
        return [(line["action"], line["outcome"], line["identity"], line["api_key_name"]) for line in found]

    return take


def test_calls_of_the_operator_and_refused_callers_are_audited(tmp_path: Path, lines: Callable[[], list[Line]]) -> None:
    authority = Authority(tmp_path)
    drain, session = "quire.v1.Scheduler/Drain", "quire.v1.Scheduler/Session"
    with sync_server("scheduler", config_of(authority.files("server", "scheduler"))) as (_, address):
        for caller in ("operator", "router", "worker", ""):
            with contextlib.closing(
                sync_channel(address, config_of(authority.files("caller", caller)), "scheduler")
            ) as channel:
                for rpc in (drain, session):
                    with contextlib.suppress(grpc.RpcError):
                        ask(channel, rpc, b"a secret")
    refused = "CALLER_NOT_ALLOWED"
    assert lines() == [
        (drain, "allowed", "operator", ""),
        (session, refused, "operator", ""),
        (drain, "allowed", "router", ""),  # for the console
        (drain, refused, "worker", ""),
        (session, refused, "worker", ""),
        (drain, refused, "", ""),
        (session, refused, "", ""),
    ]


def test_whatever_changes_a_service_is_the_operators_and_audited() -> None:
    for rows in CALLERS.values():
        for rpc, callers in rows.items():
            assert rpc not in ADMIN_RPCS or callers in ({OPERATOR}, {OPERATOR, ROUTER}, PUBLIC), rpc
            if rpc.rpartition("/")[2] in ("Drain", "SetRole", "SubscribeKvEvents"):
                assert rpc in ADMIN_RPCS


def key_file(tmp_path: Path, *named: tuple[str, str, str]) -> str:
    file = tmp_path / "keys.yaml"
    entries = (
        f"- {{name: {name}, sha256: {hashlib.sha256(key.encode()).hexdigest()}, scopes: [{scope}]}}\n"
        for name, key, scope in named
    )
    file.write_text("keys:\n" + "".join(entries))
    return str(file)


async def test_requests_of_the_port_of_administration_are_audited_with_the_name_of_the_key(
    tmp_path: Path, lines: Callable[[], list[Line]], caplog: pytest.LogCaptureFixture
) -> None:
    file = key_file(tmp_path, ("root", "key-of-root", "admin"), ("alice", "key-of-alice", "inference"))
    async with router_rig(api_key_file=file, metrics_listen="127.0.0.1:0") as rig:
        assert rig.router.admin.http is not None
        async with httpx.AsyncClient(base_url=f"http://{rig.router.admin.http.address}", trust_env=False) as admin:
            for key, path in (
                ("key-of-root", "/pause"),
                ("key-of-root", "/resume"),
                ("key-of-root", "/sleep"),
                ("key-of-root", "/no/such/path"),
                ("key-of-root", "/readyz"),
                ("key-of-alice", "/drain"),
                ("key-of-nobody", "/pause"),
            ):
                await admin.post(path, headers={"Authorization": f"Bearer {key}"})
            await admin.get("/readyz", headers={"Authorization": "Bearer key-of-root"})
            assert "key-of" not in caplog.text
        rig.http.headers["Authorization"] = "Bearer key-of-alice"
        await rig.complete("a", max_tokens=1)
    assert lines() == [
        ("POST /pause", "allowed", "", "root"),
        ("POST /resume", "allowed", "", "root"),
        ("POST /sleep", "ADMIN_UNSUPPORTED", "", "root"),
        ("POST unknown path", "NO_SUCH_PATH", "", "root"),
        ("POST /readyz", "METHOD_NOT_ALLOWED", "", "root"),
        ("POST /drain", "SCOPE_MISSING", "", "alice"),
        ("POST /pause", "INVALID_API_KEY", "", ""),
    ]


def test_a_request_of_administration_that_is_cancelled_is_audited_as_such(lines: Callable[[], list[Line]]) -> None:
    with contextlib.suppress(asyncio.CancelledError), audited(ApiKeys([]), "", "POST /drain"):
        raise asyncio.CancelledError
    assert lines() == [("POST /drain", "CANCELLED", "", "")]


async def test_subscribing_to_all_tenants_pages_is_audited_when_it_begins_and_when_it_ends(
    tmp_path: Path, lines: Callable[[], list[Line]]
) -> None:
    action = "vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
    file = key_file(tmp_path, ("root", "key-of-root", "admin"), ("alice", "key-of-alice", "inference"))
    async with (
        router_rig([FakeScheduler()], api_key_file=file, vllm_grpc=True) as rig,
        grpc.aio.insecure_channel(rig.grpc_address) as channel,
    ):
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for key, noted in (("alice", "SCOPE_MISSING"), ("root", "begun")):
            call = stub.SubscribeKvEvents(
                cb.SubscribeKvEventsRequest(load_records_before_first_batch=True),
                metadata=(("authorization", f"Bearer key-of-{key}"),),
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
            assert lines() == [(action, noted, "", key)], "noted while the subscription lasts"
        call.cancel()
    assert lines() == [(action, "CANCELLED", "", "root")]

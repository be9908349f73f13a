"""Callers by RPC: the table has every RPC there is, and servers under mutual TLS keep to it before they read."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

import quire.v1
from quire_common.channel import aio_channel, sync_channel
from quire_common.config import ServiceConfig
from quire_common.errors import PermissionDenied, from_rpc_error
from quire_common.identity.callers import CALLERS, IDENTITIES, PEER, PUBLIC, WORKER, identity_of, identity_uri
from quire_common.telemetry.interceptors import aio_server_interceptors, sync_server_interceptors
from quire_common.transport import callers_of, server_credentials, tls_files
from tests.certificates import Authority, TlsFiles

STRANGER = "stranger"
# Which server has which service of our contracts.
SERVED_BY = {
    "quire.v1.Inference": "router",
    "quire.v1.Tokenizer": "tokenizer",
    "quire.v1.Scheduler": "scheduler",
    "quire.v1.Worker": "worker",
    "quire.v1.Peer": PEER,
    "quire.v1.KvStore": "kvstore",
}


def rpcs_of(service: ServiceDescriptor) -> set[str]:
    return {f"{service.full_name}/{method.name}" for method in service.methods}


def contracts() -> list[ServiceDescriptor]:
    """Every service of every proto of ours."""
    folder = Path(quire.v1.__path__[0])
    modules = [importlib.import_module(f"quire.v1.{path.stem}") for path in sorted(folder.glob("*_pb2.py"))]
    return [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]


def expected_rows() -> dict[str, set[str]]:
    """What each server serves, by the descriptors."""
    common = rpcs_of(health_pb2.DESCRIPTOR.services_by_name["Health"])
    common |= rpcs_of(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
    rows = {server: set(common) for server in SERVED_BY.values() if server != PEER}
    rows[PEER] = set()
    for service in contracts():
        rows[SERVED_BY[service.full_name]] |= rpcs_of(service)
    rows["router"] |= rpcs_of(vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"])
    return rows


class AnyMethod(grpc.GenericRpcHandler):
    """Serves every method as one of one request and one response, and keeps the messages that were read."""

    def __init__(self, aio: bool) -> None:
        self.read: list[bytes] = []
        self._behaviour = self._answer_aio if aio else self._answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._behaviour, request_deserializer=self._keep)

    def _keep(self, data: bytes) -> bytes:
        self.read.append(data)
        return data

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"done"

    async def _answer_aio(self, request: bytes, context: Any) -> bytes:
        return b"done"


def config_of(files: TlsFiles) -> ServiceConfig:
    return ServiceConfig(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)


@contextlib.contextmanager
def sync_server(server: str, config: ServiceConfig) -> Iterator[tuple[AnyMethod, str]]:
    handler, credentials = AnyMethod(aio=False), server_credentials(tls_files(config))
    assert credentials is not None
    interceptors = sync_server_interceptors(callers=callers_of(config, server))
    with futures.ThreadPoolExecutor(2) as pool:
        running = grpc.server(pool, [handler], interceptors)
        address = f"127.0.0.1:{running.add_secure_port('127.0.0.1:0', credentials)}"
        running.start()
        yield handler, address
        running.stop(0).wait()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def certificate_of(server: str) -> str:
    return WORKER if server == PEER else server


def ask(channel: grpc.Channel, rpc: str, message: bytes) -> bytes:
    """One call of any RPC, of bytes."""
    call: Any = channel.unary_unary(f"/{rpc}")
    return bytes(call(message, timeout=20))


def right_of(server: str, rpc: str, caller: str) -> bool:
    return CALLERS[server][rpc] == PUBLIC or caller in CALLERS[server][rpc]


def test_every_rpc_of_every_server_has_a_row_and_every_row_an_rpc() -> None:
    assert {server: set(rows) for server, rows in CALLERS.items()} == expected_rows()
    for rows in CALLERS.values():
        for rpc, callers in rows.items():
            assert callers and (callers == PUBLIC or callers <= set(IDENTITIES)), rpc


def test_only_the_router_has_public_rpcs_and_only_health_has_all_callers() -> None:
    for server, rows in CALLERS.items():
        for rpc, callers in rows.items():
            assert (callers == PUBLIC) is (server == "router"), rpc
            assert (callers == set(IDENTITIES)) is (server != "router" and rpc.startswith("grpc.health.")), rpc


def test_every_identity_gets_its_own_rpcs_and_no_other_of_threaded_servers(authority: Authority) -> None:
    clients = {name: config_of(authority.files(name, name)) for name in IDENTITIES}
    clients[STRANGER] = config_of(authority.files(STRANGER))
    for server, rows in CALLERS.items():
        name = certificate_of(server)
        with sync_server(server, config_of(authority.files("server", name))) as (handler, address):
            for caller, config in clients.items():
                with contextlib.closing(sync_channel(address, config, name)) as channel:
                    for rpc in (*rows, "quire.v1.New/Rpc"):
                        handler.read.clear()
                        refused = None
                        try:
                            ask(channel, rpc, b"message")
                        except grpc.RpcError as error:
                            refused = from_rpc_error(error)
                        right = rpc in rows and right_of(server, rpc, caller)
                        assert right is (refused is None), (server, caller, rpc, refused)
                        assert handler.read == ([b"message"] if right else []), "a refused message is not read"
                        if refused is not None:
                            assert isinstance(refused, PermissionDenied) and refused.code == "CALLER_NOT_ALLOWED"
                            assert rpc in refused.message
                            assert (identity_uri(caller) in refused.message) is (caller != STRANGER)


async def test_every_identity_gets_its_own_rpcs_and_no_other_of_asyncio_servers(authority: Authority) -> None:
    clients = {name: config_of(authority.files(name, name)) for name in IDENTITIES}
    clients[STRANGER] = config_of(authority.files(STRANGER))
    for server, rows in CALLERS.items():
        name = certificate_of(server)
        config = config_of(authority.files("server", name))
        handler, credentials = AnyMethod(aio=True), server_credentials(tls_files(config))
        assert credentials is not None
        running = grpc.aio.server(interceptors=aio_server_interceptors(callers=callers_of(config, server)))
        running.add_generic_rpc_handlers((handler,))
        address = f"127.0.0.1:{running.add_secure_port('127.0.0.1:0', credentials)}"
        await running.start()
        for caller, client in clients.items():
            async with aio_channel(address, client, name) as channel:
                for rpc in (*rows, "quire.v1.New/Rpc"):
                    handler.read.clear()
                    right = rpc in rows and right_of(server, rpc, caller)
                    call: Any = channel.unary_unary(f"/{rpc}")
                    if right:
                        assert await call(b"message", timeout=20) == b"done", (server, caller, rpc)
                    else:
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await call(b"message", timeout=20)
                        assert from_rpc_error(caught.value).code == "CALLER_NOT_ALLOWED", (server, caller, rpc)
                    assert handler.read == ([b"message"] if right else []), "a refused message is not read"
        await running.stop(0)


def test_a_refusal_tells_the_caller_the_rpc_and_the_certificate_to_use(authority: Authority) -> None:
    with (
        sync_server("scheduler", config_of(authority.files("server", "scheduler"))) as (_, address),
        contextlib.closing(sync_channel(address, config_of(authority.files("w", WORKER)), "scheduler")) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        ask(channel, "quire.v1.Scheduler/Drain", b"")
    error = from_rpc_error(caught.value)
    assert "spiffe://quire/worker" in error.message and "quire.v1.Scheduler/Drain" in error.message
    assert "spiffe://quire/operator" in error.fix


def test_a_server_is_verified_by_its_services_name_and_not_by_its_address(authority: Authority) -> None:
    """The certificate of the kvstore contains the address that is dialled, and still is not the scheduler's."""
    client = config_of(authority.files("router", "router"))
    with sync_server("scheduler", config_of(authority.files("server", "kvstore"))) as (_, address):
        with (
            contextlib.closing(sync_channel(address, client, "scheduler")) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            ask(channel, "quire.v1.Scheduler/GetTicket", b"")
        assert from_rpc_error(caught.value).code == "PEER_UNAVAILABLE"
    with (
        sync_server("scheduler", config_of(authority.files("server", "scheduler"))) as (_, address),
        contextlib.closing(sync_channel(address.replace("127.0.0.1", "localhost"), client, "scheduler")) as channel,
    ):
        assert ask(channel, "quire.v1.Scheduler/GetTicket", b"") == b"done"


def test_a_certificate_names_one_identity_or_none() -> None:
    one, two = identity_uri("router").encode(), identity_uri("operator").encode()
    assert identity_of({"peer_uri": [one]}) == "router"
    assert identity_of({"peer_uri": [b"spiffe://other/router", one]}) == "router"
    for uris in ([], [one, two], [b"spiffe://other/router"], [b"https://quire/router"]):
        assert identity_of({"peer_uri": uris}) is None
    assert identity_of({"x509_subject_alternative_name": [one], "peer_dns": [one]}) is None, "a DNS name is no URI"
    assert identity_of({}) is None


def test_without_mutual_tls_nobody_is_checked(authority: Authority) -> None:
    files = authority.files("server", WORKER)
    assert callers_of(ServiceConfig(), WORKER) is None
    assert callers_of(ServiceConfig(tls_cert=files.cert, tls_key=files.key), WORKER) is None
    assert callers_of(config_of(files), WORKER) is not None

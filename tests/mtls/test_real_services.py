"""Every identity, a client without a certificate and a stranger of another authority, on every RPC of real services.

The table of callers says what is right. Here the services run as users start them, with the certificates of
`quire certs`; tests/contract/common/identity/test_callers.py asks any method, and tests/contract/peers the peer port.
"""

from __future__ import annotations

import contextlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.__main__ import main
from quire.local.ports import free_ports
from quire.local.service_tls import SERVER_NAME
from quire.local.spec import SERVICES, StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from quire_common.errors import from_rpc_error
from quire_common.identity.callers import CALLER_NOT_ALLOWED, CALLERS, IDENTITIES, METRICS_READERS, PUBLIC
from tests.certificates import HOST
from tests.pipeline.leftovers import assert_nothing_left

pytestmark = pytest.mark.slow
# A call that is allowed may wait for more messages. This is enough to be refused.
CALL_LIMIT_S = 3.0
# What would end the stack, or take its worker from the scheduler. Only those whom the table refuses may try.
HARMFUL = {"quire.v1.Scheduler/Drain", "quire.v1.Scheduler/SetRole", "quire.v1.Worker/Run"}
STRANGER, NOBODY = "stranger", "nobody"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stack's certificates, and in `stranger` those of another authority."""
    made = tmp_path_factory.mktemp("certificates")
    assert main(["certs", str(made)]) == 0
    assert main(["certs", str(made / STRANGER)]) == 0
    return made


@pytest.fixture(scope="module")
def metrics_ports() -> dict[str, int]:
    return dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))


@pytest.fixture(scope="module")
def stack(
    folder: Path, metrics_ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        flags: dict[str, dict[str, str | bool]] = {
            service: {"metrics-listen": f"{HOST}:{port}"} for service, port in metrics_ports.items()
        }
        flags["worker"] |= {"paced": "1"}
        flags["router"] |= {"vllm-grpc": True}
        running = LocalStack(
            StackSpec("mtls", str(find_model(None)), drain_timeout_s=5.0, tls_folder=str(folder), flags=flags)
        )
        state = running.directory.read()
    assert state is not None
    yield running
    assert running.deaths == [], "no call of a stranger ends a service"
    running.close()
    assert_nothing_left(state)


def credentials(folder: Path, caller: str, ca: str) -> grpc.ChannelCredentials:
    """Of an identity; of the stranger, who claims to be the operator; or of nobody, without a certificate."""
    root = (folder / ca).read_bytes()
    if caller == NOBODY:
        return grpc.ssl_channel_credentials(root)
    stem = folder / STRANGER / "operator" if caller == STRANGER else folder / caller
    return grpc.ssl_channel_credentials(
        root, stem.with_suffix(".key").read_bytes(), stem.with_suffix(".pem").read_bytes()
    )


@contextlib.contextmanager
def connected(stack: LocalStack, folder: Path, server: str, caller: str) -> Iterator[grpc.Channel]:
    state = stack.directory.read()
    assert state is not None
    public = server == "router"
    name = "localhost" if public else SERVER_NAME.format(server)
    secure = credentials(folder, caller, "public-ca.pem" if public else "ca.pem")
    address = stack.grpc if public else f"{HOST}:{state.services[server].port}"
    with grpc.secure_channel(address, secure, [("grpc.ssl_target_name_override", name)]) as channel:
        yield channel


def refusal(channel: grpc.Channel, rpc: str) -> str:
    """How a call with an empty message is refused: `handshake`, the code of the table, or not at all."""
    method: Any = channel.stream_stream(f"/{rpc}")
    call = method(iter([b""]), timeout=CALL_LIMIT_S)
    try:
        for _ in call:
            return ""
    except grpc.RpcError as error:
        found = from_rpc_error(error)
        if found.code == CALLER_NOT_ALLOWED:
            return CALLER_NOT_ALLOWED
        return "handshake" if found.code == "PEER_UNAVAILABLE" else ""
    finally:
        call.cancel()
    return ""


@pytest.mark.parametrize("server", SERVICES)
def test_only_the_callers_of_the_table_get_an_answer(stack: LocalStack, folder: Path, server: str) -> None:
    public = server == "router"
    asked = 0
    for caller in (*IDENTITIES, STRANGER, NOBODY):
        with connected(stack, folder, server, caller) as channel:
            for rpc, callers in CALLERS[server].items():
                allowed = callers == PUBLIC or caller in callers
                if allowed and rpc in HARMFUL:
                    continue
                unknown = caller in (STRANGER, NOBODY) and not public
                wanted = "handshake" if unknown else "" if allowed else CALLER_NOT_ALLOWED
                assert refusal(channel, rpc) == wanted, (caller, rpc)
                asked += 1
    spared = sum(len(callers) for rpc, callers in CALLERS[server].items() if rpc in HARMFUL)
    assert asked == (len(IDENTITIES) + 2) * len(CALLERS[server]) - spared


def test_metrics_are_shown_to_their_readers_only(
    stack: LocalStack, folder: Path, metrics_ports: dict[str, int]
) -> None:
    """The router's port of metrics is not among these: it has the public certificate, and API keys decide there."""
    for service, port in metrics_ports.items():
        if service == "router":
            continue
        for caller in (*IDENTITIES, STRANGER, NOBODY):
            context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            context.check_hostname = False
            if caller != NOBODY:
                stem = folder / STRANGER / "operator" if caller == STRANGER else folder / caller
                context.load_cert_chain(stem.with_suffix(".pem"), stem.with_suffix(".key"))
            try:
                with urllib.request.urlopen(f"https://{HOST}:{port}/metrics", timeout=20, context=context) as answer:
                    found = answer.status
            except urllib.error.HTTPError as error:
                found = error.code
            except OSError:  # the handshake fails
                found = 0
            wanted = 200 if caller in METRICS_READERS else 0 if caller == STRANGER else 403
            assert found == wanted, (service, caller)

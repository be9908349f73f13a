"""Runs the pipeline tests under mutual TLS (`make test-mtls`), without a second copy of them.

With QUIRE_TEST_MTLS=1, each stack that a test starts in this process gets the certificates of `quire certs`. Clients
of the test process trust the authority of the public ports. Tests dial a single service by `dial` or `dial_aio`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from quire import channel
from quire.__main__ import main
from quire.local import service_tls
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

ENABLED = os.environ.get("QUIRE_TEST_MTLS") == "1"


def dial(stack: LocalStack, service: str, port: int = 0) -> grpc.Channel:
    """Open a channel to a service of the stack as the operator. `port`: of a member, if there are several."""
    return service_tls.sync_channel(_address(stack, service, port), service, _folder(stack))


def dial_aio(stack: LocalStack, service: str, port: int = 0) -> grpc.aio.Channel:
    """Open an asyncio channel, as `dial` does."""
    return service_tls.aio_channel(_address(stack, service, port), service, _folder(stack))


def dial_public(stack: LocalStack) -> grpc.Channel:
    """Open a channel to the router's public gRPC port, as a client."""
    secure = channel.credentials(None)
    return grpc.insecure_channel(stack.grpc) if secure is None else grpc.secure_channel(stack.grpc, secure)


@contextmanager
def mutual_tls(folder: Path) -> Iterator[None]:
    """Within it, all stacks of real services use the certificates of `folder`, and clients trust their authority."""
    assert main(["certs", str(folder)]) == 0
    checked, credentials = StackSpec.__post_init__, channel.credentials

    def with_certificates(spec: StackSpec) -> None:
        if not spec.tls_folder and not spec.commands:  # fake services know no TLS
            object.__setattr__(spec, "tls_folder", str(folder))
        checked(spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StackSpec, "__post_init__", with_certificates)
        patch.setattr(channel, "credentials", lambda tls_ca: credentials(tls_ca or str(folder / service_tls.PUBLIC_CA)))
        patch.setenv("SSL_CERT_FILE", str(folder / service_tls.PUBLIC_CA))
        yield


def _folder(stack: LocalStack) -> str:
    state = stack.directory.read()
    assert state is not None
    return state.tls_folder


def _address(stack: LocalStack, service: str, port: int) -> str:
    state = stack.directory.read()
    assert state is not None
    return f"127.0.0.1:{port or state.services[service].port}"

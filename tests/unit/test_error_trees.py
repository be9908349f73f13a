"""The client's errors are those of the services: neither package may import the other, so both declare the tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from quire import errors as client_errors
from quire.wire import read_error
from quire_common import errors


class PeerFailure(grpc.RpcError):
    """A failed call, as gRPC raises it; `status` replaces the encoded google.rpc.Status."""

    def __init__(self, error: errors.QuireError, status: bytes | None = None) -> None:
        super().__init__()
        self._error = error
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._error.grpc_code

    def details(self) -> str:
        return self._error.message

    def trailing_metadata(self) -> Any:  # grpc's stubs name a private class here
        if self._status is not None:
            return (("grpc-status-details-bin", self._status),)
        return errors.trailing_metadata(self._error)


def tree(root: type[errors.QuireError]) -> Iterator[type[errors.QuireError]]:
    for error in root.__subclasses__():
        if error.__module__ == errors.__name__:
            yield error
            yield from tree(error)


@pytest.mark.parametrize("kind", list(tree(errors.QuireError)), ids=lambda kind: kind.__name__)
def test_client_and_services_decode_a_status_alike(kind: type[errors.QuireError]) -> None:
    failure = PeerFailure(kind("SOME_CODE", "The cause.", "The fix.", param="prompt", retry_after_s=1.5))
    of_client, of_service = read_error(failure, "127.0.0.1:1"), errors.from_rpc_error(failure)
    assert type(of_client).__name__ == type(of_service).__name__
    for name in ("code", "message", "fix", "param", "retry_after_s"):
        assert getattr(of_client, name) == getattr(of_service, name), name


def test_client_knows_every_error_that_a_status_can_name() -> None:
    decoded = {type(errors.from_rpc_error(PeerFailure(kind("C", "M", "F")))) for kind in tree(errors.QuireError)}
    for kind in decoded:
        mirrored = getattr(client_errors, kind.__name__)
        assert [base.__name__ for base in kind.__mro__] == [base.__name__ for base in mirrored.__mro__]


@pytest.mark.parametrize("status", [b"\xff", b"\x1a\x7f", b"\x1a\x3a\x0a\x28type.googleapis.com/google.rpc.ErrorInfo"])
def test_a_damaged_status_leaves_the_status_code(status: bytes) -> None:
    """As from a proxy that cuts trailers short."""
    failure = PeerFailure(errors.NotFound("SOME_CODE", "The cause.", "The fix."), status)
    found = read_error(failure, "127.0.0.1:1")
    assert isinstance(found, client_errors.NotFound)
    assert found.code == "NOT_FOUND"
    assert "The cause." in found.message

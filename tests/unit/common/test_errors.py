"""The error tree on the wire: code, cause and fix survive; what is not ours tells nothing."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from quire_common import errors
from quire_common.errors import QuireError

TREE = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, QuireError) and cls not in (QuireError, errors.ConfigError)
]


@pytest.mark.parametrize("cls", TREE)
def test_round_trips(cls: type[QuireError]) -> None:
    error = cls("A_CODE", "the cause", "the fix", param="p", retry_after_s=1.5)
    for back in (errors.from_status(errors.to_status(error)), errors.from_message(errors.to_message(error))):
        assert (back.code, back.message, back.fix, back.param, back.retry_after_s) == (
            "A_CODE",
            "the cause",
            "the fix",
            "p",
            1.5,
        )
        assert back.grpc_code is cls.grpc_code
    assert 400 <= cls.http_status < 600


def test_a_delay_is_rounded_up_to_milliseconds() -> None:
    error = errors.Overloaded("FULL", "m", "f", retry_after_s=0.0112)
    assert errors.from_status(errors.to_status(error)).retry_after_s == 0.012


def test_grpc_codes_are_google_rpc_codes() -> None:
    for cls in TREE:
        assert code_pb2.Code.Name(errors.to_status(cls("A", "b", "c")).code) == cls.grpc_code.name


def test_foreign_exceptions_tell_nothing() -> None:
    shown = errors.as_quire_error(ValueError("the password is hunter2"))
    assert isinstance(shown, errors.Internal)
    assert "hunter2" not in str(shown)


class PeerError(grpc.RpcError):
    """A gRPC error as a client gets it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailer: Any) -> None:
        self._code, self._details, self._trailer = code, details, trailer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailer


def test_a_bare_status_becomes_the_class_of_its_code() -> None:
    bare = PeerError(grpc.StatusCode.UNAVAILABLE, "connection refused", None)
    assert type(errors.from_rpc_error(bare)) is errors.Unavailable


def test_trailer_that_cannot_be_decoded_leaves_the_class_of_the_code() -> None:
    torn = PeerError(grpc.StatusCode.NOT_FOUND, "no such page", [("grpc-status-details-bin", b"\xff\xff")])
    error = errors.as_quire_error(torn)
    assert type(error) is errors.NotFound and "no such page" in error.message


def test_texts_are_bounded() -> None:
    error = errors.InvalidArgument("A", "m" * 10_000, "f" * 10_000)
    assert len(error.message) + len(error.fix) <= 4000


@pytest.mark.parametrize("cls", [errors.InvalidArgument, errors.Internal])
def test_quoted_text_that_is_no_utf8_can_be_sent(cls: type[QuireError]) -> None:
    error = cls("CODE", "The field is '\udc80'.", "Remove '\ud800'.", param="\udfff")
    assert (error.message, error.fix, error.param) == (r"The field is '\udc80'.", r"Remove '\ud800'.", r"\udfff")
    assert errors.to_message(error).message == error.message

"""The one error tree, and its way onto the wire.

QuireError                     code, message, fix; maps to a gRPC status and an HTTP status
├── InvalidArgument            the request can never succeed as it is                INVALID_ARGUMENT    400
│   ├── Unsupported            a known feature that this build or model lacks        UNIMPLEMENTED       400
│   └── TooLarge               a bound was exceeded (body, prompt, list, image)      INVALID_ARGUMENT    413
├── Unauthenticated            no credential, or a wrong one                         UNAUTHENTICATED     401
├── PermissionDenied           a good credential without the right                   PERMISSION_DENIED   403
├── NotFound                   no such model, request, lease, page                   NOT_FOUND           404
├── FailedPrecondition         right request, wrong state (draining, wrong epoch)    FAILED_PRECONDITION 409
├── Overloaded                 a bounded queue is full; carries retry_after_s        RESOURCE_EXHAUSTED  429
├── Unavailable                no healthy replica or dependency; may be retried      UNAVAILABLE         503
├── DeadlineExceeded           the request's own deadline passed                     DEADLINE_EXCEEDED   504
├── Aborted                    the client or an operator ended it                    ABORTED             499
├── ConfigError                a flag, variable, file or model folder is wrong       FAILED_PRECONDITION 500
└── Internal                   a bug or broken invariant; text stays in the logs     INTERNAL            500

Every error has a stable code, a message that names the cause, and a fix. Clients get these three and a request id;
other exceptions reach them as INTERNAL, with their text in the logs only.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

DOMAIN = "quire"
_MAX_TEXT = 2000
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


class QuireError(Exception):
    """Base of all typed errors. `param` names the offending field, and may be empty; `retry_after_s` is advice for the
    client, 0 if there is none. Message, fix and param are cut to 2000 characters."""

    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "api_error"

    def __init__(self, code: str, message: str, fix: str, *, param: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(f"{code}: {message} Fix: {fix}")
        self.code = code
        self.message = _sendable(message)
        self.fix = _sendable(fix)
        self.param = _sendable(param)
        self.retry_after_s = retry_after_s


class InvalidArgument(QuireError):
    """The request can never succeed as it is."""

    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    kind = "invalid_request_error"


class Unsupported(InvalidArgument):
    """A known feature that this build or model lacks."""

    grpc_code = grpc.StatusCode.UNIMPLEMENTED


class TooLarge(InvalidArgument):
    """A bound was exceeded."""

    http_status = 413


class Unauthenticated(QuireError):
    """No credential, or a wrong one."""

    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    kind = "authentication_error"


class PermissionDenied(QuireError):
    """A good credential without the right."""

    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    kind = "permission_error"


class NotFound(QuireError):
    """No such model, request, lease or page."""

    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    kind = "not_found_error"


class FailedPrecondition(QuireError):
    """A right request in a wrong state."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409
    kind = "invalid_request_error"


class Overloaded(QuireError):
    """A bounded queue is full."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    kind = "rate_limit_error"


class Unavailable(QuireError):
    """No healthy replica or dependency; the request may be retried."""

    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    kind = "service_unavailable_error"


class DeadlineExceeded(QuireError):
    """The request's own deadline passed."""

    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    kind = "timeout_error"


class Aborted(QuireError):
    """The client or an operator ended it."""

    grpc_code = grpc.StatusCode.ABORTED
    http_status = 499
    kind = "aborted_error"


class ConfigError(QuireError):
    """A flag, an environment variable, a file or a model folder is wrong; fatal at start."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION


class Internal(QuireError):
    """A bug or a broken invariant."""


def _sendable(text: str) -> str:
    """Return text that protobuf can carry: cut to 2000 characters, with lone surrogates, which quoted JSON may have,
    escaped."""
    return text[:_MAX_TEXT].encode(errors="backslashreplace").decode()


def require(holds: bool, what: str) -> None:
    """Raise AssertionError unless `holds`, under `python -O` too. Use this only for invariants of the program's own
    state. For input of a user or another process, raise one of the errors above instead."""
    if not holds:
        raise AssertionError(what)


def spread_retry_s(wait_s: float) -> float:
    """Return a time for `retry_after_s`: `wait_s`, brought within one second to one minute, and made up to half longer
    by chance (90 s at most). So clients that were refused together do not return together."""
    least_s = min(max(wait_s, _LEAST_RETRY_S), _MOST_RETRY_S)
    return round(least_s * random.uniform(1.0, 1.5), 1)


_BY_GRPC: dict[grpc.StatusCode, type[QuireError]] = {
    cls.grpc_code: cls
    for cls in (
        Internal,
        InvalidArgument,
        Unsupported,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        FailedPrecondition,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Aborted,
    )
}
_BY_NUMBER: dict[int, type[QuireError]] = {code.value[0]: cls for code, cls in _BY_GRPC.items()}


def internal_error() -> Internal:
    """What a client is told of an exception that is not ours."""
    return Internal("INTERNAL", "The service failed to handle this request.", "Report it with its request id.")


def as_quire_error(error: BaseException) -> QuireError:
    """Return the typed form of any exception: ours as it is, a gRPC error of a peer decoded (see `from_rpc_error`),
    everything else, cancellations and timeouts too, the generic INTERNAL error without details."""
    if isinstance(error, QuireError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error)
    return internal_error()


def to_status(error: QuireError) -> status_pb2.Status:
    """Encode an error as google.rpc.Status with ErrorInfo (reason = code; metadata fix, param) and, where given,
    RetryInfo."""
    metadata = {"fix": error.fix}
    if error.param:
        metadata["param"] = error.param
    details = [error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN, metadata=metadata)]
    packed = [_pack(detail) for detail in details]
    if error.retry_after_s > 0:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))  # never too early
        packed.append(_pack(retry))
    return status_pb2.Status(code=error.grpc_code.value[0], message=error.message, details=packed)


def trailing_metadata(error: QuireError) -> Sequence[tuple[str, bytes]]:
    """The trailer that carries the rich status."""
    return (("grpc-status-details-bin", to_status(error).SerializeToString()),)


def from_rpc_error(error: grpc.RpcError) -> QuireError:
    """Decode a peer's failure. If its trailer has a rich status, the result is the peer's own error (see
    `from_status`). Otherwise, or if the trailer cannot be decoded, it is the class of its gRPC code (CANCELLED:
    Unavailable, unknown codes: Internal), with the code `PEER_` and the gRPC code's name, the peer's details in the
    message, and a generic fix."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else None) or "no details"
    metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in metadata or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            with suppress(DecodeError):
                return from_status(status_pb2.Status.FromString(value))
    cls = _BY_GRPC.get(code, Unavailable if code is grpc.StatusCode.CANCELLED else Internal)
    return cls(f"PEER_{code.name}", f"A service answered {code.name}: {details}.", "Retry; see the peer's log.")


def from_status(status: status_pb2.Status) -> QuireError:
    """Decode the error that `to_status` encoded, with code, fix, param and retry time. The class follows from the gRPC
    code alone, so TooLarge comes back as InvalidArgument, and ConfigError as FailedPrecondition; Internal for an
    unknown code. Without ErrorInfo, the code is UNKNOWN."""
    code, fix, param, retry_after_s = "UNKNOWN", "", "", 0.0
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            code, fix, param = info.reason, info.metadata.get("fix", ""), info.metadata.get("param", "")
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    cls = _BY_NUMBER.get(status.code, Internal)
    return cls(code, status.message, fix, param=param, retry_after_s=retry_after_s)


def to_message(error: QuireError) -> common_pb2.RequestError:
    """Encode an error as it travels inside a stream whose other requests go on."""
    return common_pb2.RequestError(
        code=error.code,
        message=error.message,
        fix=error.fix,
        param=error.param,
        grpc_code=error.grpc_code.value[0],
        retry_after_s=error.retry_after_s,
    )


def from_message(message: common_pb2.RequestError) -> QuireError:
    """Decode the error that `to_message` encoded; its class follows from the gRPC code as in `from_status`."""
    cls = _BY_NUMBER.get(message.grpc_code, Internal)
    return cls(message.code, message.message, message.fix, param=message.param, retry_after_s=message.retry_after_s)


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    """Pack a detail of an error into a protobuf Any."""
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed

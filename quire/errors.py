"""What a caller of Quire can catch. One tree; every error has a stable code, a message with the cause, and a fix.

QuireError
├── InvalidArgument        the request can never succeed as it is
│   └── Unsupported        a known feature that this build or model lacks
├── Unauthenticated        no credential, or a wrong one
├── PermissionDenied       a good credential without the right
├── NotFound               no such model, stack, file
├── FailedPrecondition     a right request in a wrong state (already running, not running)
├── Overloaded             a bounded queue is full; `retry_after_s` is advice
├── Unavailable            no healthy replica; may be retried
├── DeadlineExceeded       the request's own time limit passed
├── Aborted                the request was ended by the caller or an operator
├── StartFailed            a local service did not start; `service` and `log` say which and where
└── Internal               a bug; the services' logs have the rest

This module knows nothing of gRPC: `quire.wire` decodes the services' rich status into these.
"""

from __future__ import annotations


class QuireError(Exception):
    """Base of all. `param` names the offending field, `request_id` the request, where there is one."""

    def __init__(
        self,
        code: str,
        message: str,
        fix: str,
        *,
        param: str = "",
        request_id: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(code, message, fix)
        self.code = code
        self.message = message
        self.fix = fix
        self.param = param
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        if self.fix:
            parts.append(f"Fix: {self.fix}")
        if self.request_id:
            parts.append(f"(request {self.request_id})")
        return " ".join(parts)


class InvalidArgument(QuireError):
    """The request can never succeed as it is."""


class Unsupported(InvalidArgument):
    """A known feature that this build or model lacks."""


class Unauthenticated(QuireError):
    """No credential, or a wrong one."""


class PermissionDenied(QuireError):
    """A good credential without the right."""


class NotFound(QuireError):
    """No such model, stack or file."""


class FailedPrecondition(QuireError):
    """A right request in a wrong state."""


class Overloaded(QuireError):
    """A bounded queue is full."""


class Unavailable(QuireError):
    """No healthy replica; the request may be retried."""


class DeadlineExceeded(QuireError):
    """The request's own time limit passed."""


class Aborted(QuireError):
    """The request was ended by the caller or an operator."""


class StartFailed(QuireError):
    """A local service did not start, or a stack has lost a service that it cannot do without. `service` is its name,
    `log` the file with the rest; both may be empty."""

    def __init__(self, code: str, message: str, fix: str, *, service: str = "", log: str = "") -> None:
        super().__init__(code, message, fix)
        self.service = service
        self.log = log

    def __str__(self) -> str:
        where = f"The {self.service} did not start. " if self.service else ""
        log = f" Log: {self.log}" if self.log else ""
        return f"{where}{super().__str__()}{log}"


class Internal(QuireError):
    """A bug; the services' logs have the rest."""

"""The roles of replicas: which requests a replica is intended for, as reported to routers, and which requests it
refuses while its role changes. A role is advice. A replica refuses a request because of its role only during a
change."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire_common.errors import FailedPrecondition, InvalidArgument, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from quire_common.ticket import KvTransfer

PREFILL, DECODE, BOTH = ROLES = ("prefill", "decode", "both")
_RETRY_S = 1.0


def takes(role: str, transfer: KvTransfer) -> bool:
    """Whether a replica of this role is meant for requests with this transfer: `both` for all, `prefill` for those that
    are prefill-only, `decode` for all others."""
    return role == BOTH or transfer.prefill_only == (role == PREFILL)


def role_changing() -> Unavailable:
    """Return the Unavailable error (retry after 1 s) for requests that the next role does not take."""
    return Unavailable(
        "ROLE_CHANGING",
        "This replica is changing its role, and does not take requests of this kind any more.",
        "Send the request to another replica.",
        retry_after_s=_RETRY_S,
    )


class Roles:
    """The present role and, during a change, the next one."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._next = ""

    @property
    def parts(self) -> bool:
        """Whether prefill and decode are on different replicas, so that pages come from or go to other engines."""
        return self.role != BOTH

    def check(self, transfer: KvTransfer) -> None:
        """Raise Unavailable if the role is changing and the next role does not take the request."""
        if self._next and not takes(self._next, transfer):
            raise role_changing()

    def change(self, role: str) -> AbstractContextManager[None]:
        """Return a context in which requests that the new role does not take are refused. When the context ends
        normally, the role changes; when it ends by an error, the role stays. Raises InvalidArgument for an unknown
        role, FailedPrecondition while another change is under way."""
        if role not in ROLES:
            raise InvalidArgument("BAD_ROLE", f"There is no role {role!r}.", f"Use one of {', '.join(ROLES)}.")
        if self._next:
            raise FailedPrecondition(
                "ROLE_CHANGE_UNDER_WAY", f"The role is changing to {self._next} already.", "Wait until it has."
            )
        return self._change(role)

    @contextmanager
    def _change(self, role: str) -> Iterator[None]:
        """Refuse requests that `role` does not take while the context is open; then make it the role, unless the
        context raised."""
        self._next = role
        try:
            yield
            self.role = role
        finally:
            self._next = ""

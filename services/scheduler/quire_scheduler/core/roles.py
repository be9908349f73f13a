"""What a replica is meant for, as routers are told, and what it refuses while that changes. A role is advice: between
changes nothing is refused by it."""

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
    """Whether a replica of the role is meant for requests of this kind."""
    return role == BOTH or transfer.prefill_only == (role == PREFILL)


def role_changing() -> Unavailable:
    """Return the error for requests that the next role does not take."""
    return Unavailable(
        "ROLE_CHANGING",
        "This replica is changing its role, and does not take requests of this kind any more.",
        "Send the request to another replica.",
        retry_after_s=_RETRY_S,
    )


class Roles:
    """The present role and, while it changes, the next."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._next = ""

    @property
    def parts(self) -> bool:
        """Whether requests are here for one part of their life, so that pages come or go."""
        return self.role != BOTH

    def check(self, transfer: KvTransfer) -> None:
        """Raise Unavailable for what the next role does not take."""
        if self._next and not takes(self._next, transfer):
            raise role_changing()

    def change(self, role: str) -> AbstractContextManager[None]:
        """Return a context in which requests that the new role does not take are refused. When it is left, the role has
        changed; when it is left by an error, nothing has. Raises InvalidArgument for an unknown role,
        FailedPrecondition while another change is under way."""
        if role not in ROLES:
            raise InvalidArgument("BAD_ROLE", f"There is no role {role!r}.", f"Use one of {', '.join(ROLES)}.")
        if self._next:
            raise FailedPrecondition(
                "ROLE_CHANGE_UNDER_WAY", f"The role is changing to {self._next} already.", "Wait until it has."
            )
        return self._change(role)

    @contextmanager
    def _change(self, role: str) -> Iterator[None]:
        """Refuse what `role` does not take while the context is open; then make it the role, unless the context
        raised."""
        self._next = role
        try:
            yield
            self.role = role
        finally:
            self._next = ""

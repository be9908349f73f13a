"""The audit log: the caller and the outcome of each administrative call. Its lines belong to the logger `quire.audit`
and are written at every `--log-level`. No line has a credential or the content of a request."""

from __future__ import annotations

import contextvars
import logging

from quire_common.telemetry import metrics
from quire_common.telemetry.logs import get_logger

LOGGER = "quire.audit"
ALLOWED = "allowed"
# The outcome of a stream that was admitted. Another line has the outcome at its end.
BEGUN = "begun"
log = get_logger(LOGGER)
logging.getLogger(LOGGER).setLevel(logging.INFO)
_calls = metrics.counter(
    "quire_audited_calls_total",
    "Administrative calls, and calls that the table of callers refused.",
    ("action", "outcome"),
)
_key_name: contextvars.ContextVar[str] = contextvars.ContextVar("audited_key_name", default="")
_subject: contextvars.ContextVar[str] = contextvars.ContextVar("audited_subject", default="")


def bind_subject(subject: str) -> None:
    """Set the subject of this context's call: the name of a peer, or the id of a request."""
    _subject.set(subject)


def bind_key_name(name: str) -> None:
    """Set the name of the API key with which the call of this context is made."""
    _key_name.set(name)


def audit(action: str, outcome: str, *, identity: str = "", peer: str = "") -> None:
    """Log an administrative or refused call, and count it by action and outcome. `action` is an RPC, or a method and a
    route. `outcome` is `allowed`, `begun` or an error's code. `identity` is the identity in the caller's certificate,
    and `peer` is the caller's address. The bound key name and subject are logged too."""
    _calls.labels(action, outcome).inc()
    names = {"identity": identity, "api_key_name": _key_name.get(), "subject": _subject.get()}
    log.info("audit", action=action, outcome=outcome, peer=peer, **names)

"""Problems that a snapshot of the console shows, the worst first, each with what has the problem and a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BAD, WARNING = "bad", "warning"
_LONG_WAIT_MS = 5_000
_FULL_PAGES = 0.97
_DAY_S = 86_400
_SOON_DAYS = 14
_MOST = 50


class Problem(NamedTuple):
    """`subject` is the name of an instance, or `fleet` or `router`."""

    severity: str
    subject: str
    text: str


def problems(snapshot: Mapping[str, Any]) -> list[Problem]:
    """Return the problems that a snapshot shows, at most 50, the bad ones before the warnings. The router, replicas,
    tokenizers, kvstores and certificates are looked at."""
    found = [
        *_router(snapshot["router"], snapshot["replicas"], snapshot["tokenizers"]),
        *(problem for replica in snapshot["replicas"] for problem in _replica(replica)),
        *_tokenizers(snapshot["tokenizers"]),
        *(problem for store in snapshot["kv"]["stores"] for problem in _store(store)),
        *(problem for one in snapshot["certificates"] for problem in _certificate(one)),
    ]
    return sorted(found, key=lambda problem: problem.severity != BAD)[:_MOST]


def _router(
    router: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]], tokenizers: Sequence[Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield bad problems if no replica accepts requests or no tokenizer is ready. Yield warnings if the router is
    paused, or has as many sequences in flight as it may."""
    if not any(replica["accepts"] for replica in replicas):
        yield Problem(BAD, "fleet", "No replica accepts requests.")
    if not any(tokenizer["phase"] == "ready" for tokenizer in tokenizers):
        yield Problem(BAD, "fleet", "No tokenizer answers.")
    if router["paused"]:
        yield Problem(WARNING, "router", "The router is paused: it refuses new requests.")
    if router["in_flight"] >= router["limit"]:
        yield Problem(WARNING, "router", "The router runs as many sequences as it may: it refuses new requests.")


def _replica(replica: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of one replica. For an unreachable or failed one, yield only this, as a bad problem. Otherwise
    yield a warning if it is loading, connecting or draining, or else a bad problem if its session is closed. Also yield
    a warning if a request has waited for 5 s, and one if running requests hold 97 % of the KV pages."""
    name, phase = replica["instance"], replica["phase"]
    if phase in ("unreachable", "failed"):
        yield Problem(BAD, name, f"{phase.capitalize()}. {replica['detail']}".strip())
        return
    if phase in ("loading", "connecting"):
        yield Problem(WARNING, name, f"{phase.capitalize()}: {replica['progress']:.0%}. {replica['detail']}".strip())
    elif phase == "draining":
        left = replica["running"] + replica["waiting"]
        text = f"Draining: {left} requests are left." if left else "Drained: it serves again after a restart."
        yield Problem(WARNING, name, text)
    elif not replica["session"]:
        yield Problem(BAD, name, "The session with its scheduler is closed.")
    if replica["oldest_wait_ms"] >= _LONG_WAIT_MS:
        yield Problem(WARNING, name, f"A request has waited {replica['oldest_wait_ms'] / 1000:.0f} s for a slot.")
    if replica["pages"] and replica["referenced_pages"] >= _FULL_PAGES * replica["pages"]:
        yield Problem(WARNING, name, "Running requests hold nearly all KV pages.")


def _tokenizers(tokenizers: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield a warning for each tokenizer that is not ready."""
    for tokenizer in tokenizers:
        if tokenizer["phase"] != "ready":
            yield Problem(WARNING, tokenizer["instance"], "The tokenizer does not answer.")


def _store(store: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a warning if the kvstore does not answer, and one for each of its tiers that is not available."""
    if store["error"]:
        yield Problem(WARNING, store["instance"], f"The kvstore does not answer: {store['error']}")
    for tier in store["tiers"]:
        if not tier["available"]:
            yield Problem(WARNING, store["instance"], f"The tier {tier['medium']} is not available.")


def _certificate(certificate: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a bad problem if the certificate has expired, and a warning if it expires within 14 days."""
    days = certificate["seconds_left"] / _DAY_S
    if days < 0:
        yield Problem(BAD, certificate["subject"], "The certificate has expired.")
    elif days < _SOON_DAYS:
        yield Problem(WARNING, certificate["subject"], f"The certificate expires in {days:.0f} days.")

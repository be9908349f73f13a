"""Problems that the console shows: each state of the stack that an operator must know, the worst first."""

from __future__ import annotations

from typing import Any

import pytest

from quire_router.front.http.console.problems import BAD, WARNING, problems

REPLICA: dict[str, Any] = {
    "instance": "a",
    "phase": "ready",
    "progress": 1.0,
    "detail": "",
    "session": True,
    "accepts": True,
    "running": 1,
    "waiting": 0,
    "oldest_wait_ms": 0,
    "pages": 100,
    "referenced_pages": 10,
}
STORE: dict[str, Any] = {"instance": "store", "error": "", "tiers": [{"medium": "ram", "available": True}]}
DAY_S = 86_400


def snapshot(**parts: Any) -> dict[str, Any]:
    router = {"paused": False, "in_flight": 1, "limit": 10, **parts.pop("router", {})}
    stores = parts.pop("stores", [STORE])
    return {
        "router": router,
        "replicas": [REPLICA],
        "tokenizers": [{"instance": "t", "phase": "ready"}],
        "kv": {"stores": stores},
        "certificates": [],
        **parts,
    }


def replica(**changed: Any) -> dict[str, Any]:
    return {"replicas": [REPLICA, {**REPLICA, "instance": "b", **changed}]}


def test_healthy_stack_has_no_problem() -> None:
    assert problems(snapshot()) == []


@pytest.mark.parametrize(
    ("parts", "severity", "subject", "word"),
    [
        ({"replicas": []}, BAD, "fleet", "No replica"),
        ({"tokenizers": []}, BAD, "fleet", "No tokenizer"),
        ({"router": {"paused": True}}, WARNING, "router", "paused"),
        ({"router": {"in_flight": 10}}, WARNING, "router", "as many sequences as it may"),
        (replica(phase="unreachable", detail="no answer"), BAD, "b", "no answer"),
        (replica(phase="failed", detail="out of memory"), BAD, "b", "out of memory"),
        (replica(phase="loading", progress=0.4), WARNING, "b", "40%"),
        (replica(phase="draining", waiting=2), WARNING, "b", "3 requests"),
        (replica(phase="draining", running=0), WARNING, "b", "Drained"),
        (replica(session=False), BAD, "b", "session"),
        (replica(oldest_wait_ms=7_000), WARNING, "b", "7 s"),
        (replica(referenced_pages=99), WARNING, "b", "pages"),
        ({"tokenizers": [{"instance": "t", "phase": "ready"}, {"instance": "u", "phase": "connecting"}]},
         WARNING, "u", "answer"),
        ({"stores": [{**STORE, "error": "gone"}]}, WARNING, "store", "gone"),
        ({"stores": [{**STORE, "tiers": [{"medium": "redis", "available": False}]}]}, WARNING, "store", "redis"),
        ({"certificates": [{"subject": "a", "seconds_left": -1}]}, BAD, "a", "expired"),
        ({"certificates": [{"subject": "a", "seconds_left": 3 * DAY_S}]}, WARNING, "a", "3 days"),
    ],
)  # fmt: skip
def test_problem_is_told(parts: dict[str, Any], severity: str, subject: str, word: str) -> None:
    (found,) = problems(snapshot(**parts))
    assert (found.severity, found.subject) == (severity, subject) and word in found.text


def test_worst_problems_come_first_and_their_number_is_bounded() -> None:
    replicas = [{**REPLICA, "instance": f"{i}", "phase": "draining"} for i in range(200)]
    found = problems(snapshot(replicas=[*replicas, {**REPLICA, "instance": "dead", "phase": "failed"}]))
    assert found[0].subject == "dead" and len(found) == 50

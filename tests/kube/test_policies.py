"""The connections that the rendered NetworkPolicies allow are those that docs/kubernetes.md draws."""

from __future__ import annotations

import re

import pytest

from tests.kube.chart import RELEASE, RENDERINGS, ROOT, of_kind, one, rendered
from tests.kube.policies import Edge, allowed_edges

pytestmark = pytest.mark.slow
_ARROW = re.compile(r'^\s*([\w-]+) (--|-\.) "([\d, ]+)" (?:-->|\.->) ([\w-]+)$', re.MULTILINE)


def drawn() -> tuple[set[Edge], set[Edge]]:
    """The solid and the dotted arrows of the page."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    always: set[Edge] = set()
    sometimes: set[Edge] = set()
    for source, line, ports, target in _ARROW.findall(text):
        (always if line == "--" else sometimes).update((source, target, int(port)) for port in ports.split(","))
    return always, sometimes


def test_with_everything_on_the_allowed_edges_are_the_drawn_ones() -> None:
    always, sometimes = drawn()
    assert len(always) == 7 and not always & sometimes
    assert allowed_edges(rendered("everything")) == always | sometimes


@pytest.mark.parametrize("name", [each for each in RENDERINGS if each != "ranks"])
def test_each_example_allows_the_solid_edges_and_no_edge_that_is_not_drawn(name: str) -> None:
    always, sometimes = drawn()
    allowed = allowed_edges(rendered(name))
    assert always <= allowed <= always | sometimes


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cpu", {("router", "kvstore", 50054), ("engine", "kvstore", 50054), ("engine", "kvstore", 50064)}
            | {("router", "redis", 6379), ("tokenizer", "hub", 443), ("engine", "hub", 443)}),
        ("pd", {("router", "kvstore", 50054), ("engine", "kvstore", 50054), ("engine", "kvstore", 50064)}
            | {("router", "redis", 6379), ("engine", "engine", 50055), ("engine", "engine", 50056)}),
    ],
)  # fmt: skip  # a line for each origin
def test_the_dotted_edges_follow_the_values(name: str, wanted: set[Edge]) -> None:
    assert allowed_edges(rendered(name)) - drawn()[0] == wanted


def test_ranks_of_an_engine_reach_each_other() -> None:
    ranks = {edge for edge in allowed_edges(rendered("ranks")) if "engine-rank" in edge}
    both = ("engine", "engine-rank")
    assert ranks == {(a, b, 50057) for a in both for b in both if (a, b) != ("engine", "engine")} | {
        ("engine-rank", "dns", 53)
    }


def test_a_rule_too_many_is_seen() -> None:
    """The comparison can fail: a policy that lets routers call kvstores' data port, and one that is open to all."""
    manifests = rendered("everything")
    one(manifests, "NetworkPolicy", "kvstore")["spec"]["ingress"].append(
        {"ports": [{"protocol": "TCP", "port": 50064}]}
    )
    assert not any(edge[2] == 50064 and edge[0] == "router" for edge in allowed_edges(manifests)), (
        "routers may not send"
    )
    one(manifests, "NetworkPolicy", "router")["spec"]["egress"].append({})
    assert ("router", "kvstore", 50064) in allowed_edges(manifests)
    bare = [each for each in manifests if each not in of_kind(manifests, "NetworkPolicy")]
    assert ("tokenizer", "engine", 50052) in allowed_edges(bare), "without policies everybody may call everybody"
    assert RELEASE == "quire"

"""docs/security.md ties each rule to tests, and the threat model each threat to rules: both must be there."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = 15


def sections() -> dict[int, str]:
    """The text of each rule by its number."""
    text = (ROOT / "docs" / "security.md").read_text()
    return {
        int(number): body for number, body in re.findall(r"^## (\d+)\. [^\n]+\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    }


def named_tests(text: str) -> set[str]:
    """The tests that a text names. By name alone: files move."""
    return set(re.findall(r"`(test_\w+)`", text))


@functools.cache
def all_tests() -> frozenset[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset(
        name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)
    )


def test_all_rules_are_there_in_order() -> None:
    assert list(sections()) == list(range(1, RULES + 1))


@pytest.mark.parametrize("number", range(1, RULES + 1))
def test_a_rule_has_tests_that_exist(number: int) -> None:
    named = named_tests(sections()[number])
    assert named, "a rule without a test"
    assert named <= all_tests(), "rename them in docs/security.md, or bring them back"


def test_the_threat_model_names_rules_that_exist_and_uses_each() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    rows = re.findall(r"^\| [A-Z]\d+ \|.*\|$", text, re.MULTILINE)
    named = {int(number) for row in rows for number in re.findall(r"security\.md#(\d+)-", row)}
    assert len(rows) >= 15 and named == set(range(1, RULES + 1))


def test_links_to_rules_lead_to_their_headings() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"security\.md#([\w-]+)", (ROOT / "docs" / "threat-model.md").read_text()))
    assert linked and linked <= anchors


def test_a_test_that_is_gone_is_noticed() -> None:
    assert named_tests("- `test_of_long_ago`, of old") == {"test_of_long_ago"}
    assert not named_tests("- `test_of_long_ago`") <= all_tests()

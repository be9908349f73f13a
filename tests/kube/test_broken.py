"""Each release of the table is caught by what the table says, before it reaches a cluster."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import pytest

from tests.kube import rules, schemas
from tests.kube.broken import MANIFESTS, SCHEMA, BrokenManifest
from tests.kube.broken_values import VALUES, BrokenValues
from tests.kube.chart import CHART, Manifest, rendered, template, title

pytestmark = pytest.mark.slow


@functools.cache
def _changed(broken: BrokenManifest) -> tuple[list[Manifest], list[Manifest]]:
    """The release, and those of its manifests that were changed."""
    before = {json.dumps(each, sort_keys=True) for each in rendered(broken.base)}
    manifests = rendered(broken.base)
    broken.change(manifests)
    return manifests, [each for each in manifests if json.dumps(each, sort_keys=True) not in before]


@functools.cache
def _by_schemas() -> dict[str, list[str]]:
    """The schemas' findings in all releases that they must catch, by name."""
    found: dict[str, list[str]] = {}
    broken = [each for each in MANIFESTS if each.by == SCHEMA]
    flat = [(each.name, manifest) for each in broken for manifest in _changed(each)[1]]
    answers = schemas.problems_of([manifest for _, manifest in flat])
    for (name, _), problems in zip(flat, answers, strict=True):
        found.setdefault(name, []).extend(problems)
    return found


@pytest.mark.parametrize("broken", MANIFESTS, ids=lambda each: str(each.name))
def test_a_broken_release_is_caught(broken: BrokenManifest) -> None:
    manifests, changed = _changed(broken)
    assert len(manifests) != len(rendered(broken.base)) or changed, "the row changes something"
    if broken.by == SCHEMA:
        assert len(changed) == 1
        problems: Sequence[str] = _by_schemas()[broken.name]
        assert any(problem.startswith(title(changed[0])) for problem in problems)
    else:
        rule = next(each for each in rules.RULES if each.__name__ == broken.by)
        problems = list(rule(manifests))
        assert problems
    print(f"{broken.name}: {problems[0]}")


@pytest.mark.parametrize("broken", VALUES, ids=lambda each: str(each.name))
def test_broken_values_are_refused_with_a_word_on_the_fix(broken: BrokenValues) -> None:
    result = template(CHART / "values-cpu.yaml", values=broken.values)
    assert result.returncode != 0
    assert broken.words in result.stderr


def test_each_rule_catches_something() -> None:
    """A rule that no row breaks could be one that never speaks."""
    assert {rule.__name__ for rule in rules.RULES} == {each.by for each in MANIFESTS} - {SCHEMA}
    assert len(MANIFESTS) >= 40 and len({each.name for each in MANIFESTS}) == len(MANIFESTS)

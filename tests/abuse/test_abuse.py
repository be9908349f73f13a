"""Clients that send as much as every bound allows do not harm the streams beside them: `make abuse`.

QUIRE_ABUSE_SECONDS is the time of a case. The harness itself is tested with services that are broken on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.abuse import bounds
from tests.abuse.arena import Arena, show
from tests.abuse.attacks import CASES
from tests.abuse.cpu_group import one_cpu_group

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("QUIRE_ABUSE_SECONDS", "8"))


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("QUIRE_ABUSE_LOG", "")
    monkeypatch.setenv("QUIRE_ABUSE_MUTATION", "")


@pytest.fixture(autouse=True)
def cpu_group() -> Iterator[None]:
    with one_cpu_group() as is_one:
        print("\nAll threads weigh alike." if is_one else "\nThe kernel may group threads by session.")
        yield


async def test_abuse_harms_nobody_else(tmp_path: Path) -> None:
    async with Arena(tmp_path / "spent") as arena:
        assert await arena.posts() == {*bounds.ROUTES, *bounds.PLAIN}, "a route without a row in tests/abuse/bounds.py"
        found = [each for name in CASES for each in await arena.case(name, SECONDS)]
        found += await arena.kept()
    print("\n" + show(arena.results))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("mutation", "case", "wanted"),
    [
        ("slow-callback", "HTTP: each field", "of CPU in tokenizer"),
        ("hoarding", "HTTP: each field", "router grew"),
        ("stalling", "HTTP: each field", "a gap of"),
    ],
)
async def test_a_broken_service_is_noticed(mutation: str, case: str, wanted: str, tmp_path: Path) -> None:
    async with Arena(tmp_path / "spent", mutation) as arena:
        found = await arena.case(case, SECONDS)
    print("\n" + show(arena.results))
    assert any(wanted in each for each in found), found

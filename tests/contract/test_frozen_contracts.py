"""Wire, HTTP, flags, metrics, error codes and Python's API are what tests/contract/frozen says they are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.contract.frozen_contracts import CONTRACTS, FOLDER, ROOT


@pytest.fixture(scope="module")
def present() -> dict[str, str]:
    """A process of its own makes them: other tests import and register things that are not the product's."""
    script = (
        "import json; from tests.contract.frozen_contracts import CONTRACTS, as_text;"
        "print(json.dumps({name: as_text(make()) for name, make in CONTRACTS.items()}))"
    )

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CONTRACTS)
def test_contract_is_unchanged(name: str, present: dict[str, str]) -> None:
    kept = (FOLDER / f"{name}.json").read_text()
    assert present[name] == kept, "users see this: say it in CHANGELOG.md, then run the module that writes the files"

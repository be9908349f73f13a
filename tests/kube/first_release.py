"""`python -m tests.kube.first_release` writes the immutable fields of the chart's objects to first_release.json.

Run it only for a release to which nobody can upgrade: objects of an installed release cannot follow."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kube.chart import EXAMPLES, rendered
from tests.kube.immutable import frozen

FIRST = Path(__file__).with_name("first_release.json")

if __name__ == "__main__":
    FIRST.write_text(json.dumps({name: frozen(rendered(name)) for name in EXAMPLES}, indent=1, sort_keys=True) + "\n")

"""Serve scenarios by their numbers: python -m tests.exactness paced|cpu FIRST [LAST]"""

from __future__ import annotations

import sys
import time

from tests.exactness.events import table
from tests.exactness.hunt import run_scenarios
from tests.exactness.subjects import make_subject


def main(kind: str, first: str, last: str = "") -> None:
    began = time.monotonic()
    events = run_scenarios(make_subject(kind), range(int(first), int(last or first) + 1))
    print(f"{events['scenarios']} scenarios on the {kind} engine in {time.monotonic() - began:.1f} s")
    print(table(events))


if __name__ == "__main__":
    main(*sys.argv[1:])

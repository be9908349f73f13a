"""Serve scenarios by their numbers: python -m tests.exactness [warm] paced|cpu|demo FIRST [LAST]"""

from __future__ import annotations

import sys
import time

from tests.exactness.events import table
from tests.exactness.hunt import run_scenarios
from tests.exactness.judge import judge
from tests.exactness.scenario import make_scenario
from tests.exactness.subjects import make_subject
from tests.exactness.warm_judge import judge_warm
from tests.exactness.warm_scenario import make_warm_scenario


def main(kind: str, first: str, last: str = "", *, warm: bool) -> None:
    began, seeds = time.monotonic(), range(int(first), int(last or first) + 1)
    asked = (make_warm_scenario, judge_warm) if warm else (make_scenario, judge)
    events = run_scenarios(make_subject(kind), seeds, *asked)
    print(f"{events['scenarios']} scenarios on the {kind} engine in {time.monotonic() - began:.1f} s")
    print(table(events))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(*[each for each in arguments if each != "warm"], warm="warm" in arguments)

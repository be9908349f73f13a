"""Serve scenarios by their numbers: python -m tests.exactness [warm|pd|yields] paced|cpu|demo|smollm2 FIRST [LAST]"""

from __future__ import annotations

import sys
import time

from tests.exactness.events import table
from tests.exactness.hunt import run_plainly, run_scenarios
from tests.exactness.judge import judge
from tests.exactness.prefill_decode.pd_judge import judge_pd
from tests.exactness.prefill_decode.pd_scenario import make_pd_scenario
from tests.exactness.prefill_decode.pd_subjects import PdSubjects
from tests.exactness.scenario import make_scenario, make_yield_scenario
from tests.exactness.subjects import make_subject
from tests.exactness.warm.warm_judge import judge_warm
from tests.exactness.warm.warm_scenario import make_warm_scenario


def main(kind: str, first: str, last: str = "", *, about: str = "") -> None:
    began, seeds = time.monotonic(), range(int(first), int(last or first) + 1)
    if about == "pd":
        events = run_plainly(PdSubjects(kind), seeds, make_pd_scenario, judge_pd)
    else:
        kinds = {"warm": (make_warm_scenario, judge_warm), "yields": (make_yield_scenario, judge)}
        asked = kinds.get(about, (make_scenario, judge))
        events = run_scenarios(make_subject(kind), seeds, *asked)
    print(f"{events['scenarios']} scenarios on the {kind} engine in {time.monotonic() - began:.1f} s")
    print(table(events))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    about = arguments.pop(0) if arguments[:1] in (["warm"], ["pd"], ["yields"]) else ""
    main(*arguments, about=about)

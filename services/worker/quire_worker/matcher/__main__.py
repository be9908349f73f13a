"""`python -m quire_worker.matcher` runs a process of the matcher. Only a worker starts it."""

from __future__ import annotations

import sys

from quire_worker.matcher.matcher_main import run_matcher

if __name__ == "__main__":
    run_matcher(sys.argv[1:])

"""`python -m quire_worker.matcher`: a matcher's process, started by its worker alone."""

from __future__ import annotations

import sys

from quire_worker.matcher.matcher_main import run_matcher

if __name__ == "__main__":
    run_matcher(sys.argv[1:])

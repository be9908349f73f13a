"""Renames by a map, and the proof of it:

python -m tools.renames apply MAP            # moves and rewrites the working tree
python -m tools.renames prove MAP [COMMIT]   # whether the commit (HEAD) is its parent with the map applied
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.renames.apply_map import apply_map
from tools.renames.prove_map import differences
from tools.renames.rename_map import load_map

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the program. Returns 1 if a proof fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("apply", "prove"))
    parser.add_argument("map", type=Path)
    parser.add_argument("commit", nargs="?", default="HEAD")
    arguments = parser.parse_args()
    renames = load_map(arguments.map)
    if arguments.what == "apply":
        print("\n".join(apply_map(ROOT, renames)))
        return 0
    found = differences(ROOT, arguments.commit, renames)
    print("\n".join(found) if found else f"{arguments.commit} is its parent with {arguments.map} applied")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tools.release 0.2.0` writes a version to every file that has one, and dates the changelog's entries.

The file VERSION has the version of this tree. Packages, chart and `quire.__version__` repeat it, because their own
tools read them; a test compares all of them. RELEASE names the commit of the last release, and is written after that
commit.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("common", "kvstore", "router", "scheduler", "tokenizer", "worker")
_VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
# The number itself is the group. A pin of one of our packages is `quire-router==0.1.0`, with or without extras.
_OWN = re.compile(r'^version = "([^"]+)"', re.MULTILINE)
_PIN = re.compile(r'"quire(?:-[a-z]+)?==([^"]+)"')
PLACES: dict[str, tuple[re.Pattern[str], ...]] = {
    "VERSION": (re.compile(r"^(.+)$", re.MULTILINE),),
    "pyproject.toml": (_OWN, _PIN),
    **{f"services/{name}/pyproject.toml": (_OWN, _PIN) for name in DISTRIBUTIONS},
    "quire/__init__.py": (re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE),),
    "deploy/compose/compose.yaml": (re.compile(r"\$\{QUIRE_VERSION:-([^}]+)\}"),),
    "deploy/helm/quire/Chart.yaml": (
        re.compile(r"^version: (.+)$", re.MULTILINE),
        re.compile(r'^appVersion: "(.+)"$', re.MULTILINE),
    ),
}
CHANGELOG = "CHANGELOG.md"
_UNRELEASED = "## Unreleased\n"


def versions(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Return every place that has the version, and its present value. Raises LookupError if a place has none."""
    for name, patterns in PLACES.items():
        text = (root / name).read_text()
        for pattern in patterns:
            found = pattern.findall(text)
            if not found and pattern is not _PIN:
                raise LookupError(f"{name} has no version")
            yield from ((name, version) for version in found)


def set_version(version: str, root: Path = ROOT) -> None:
    """Write the version to every place. Raises ValueError for a malformed version."""
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version: write 1.2.3, or 1.2.3rc1 before a release")
    for name, patterns in PLACES.items():
        path = root / name
        text = path.read_text()
        for pattern in patterns:
            text = pattern.sub(lambda found: found[0].replace(found[1], version), text)
        path.write_text(text)


def date_changes(version: str, day: datetime.date, root: Path = ROOT) -> None:
    """Give the unreleased entries of the changelog a version and a day. Raises LookupError if there are none."""
    path = root / CHANGELOG
    before, heading, after = path.read_text().partition(_UNRELEASED)
    if not heading or not after.strip() or after.lstrip().startswith("## "):
        raise LookupError("the changelog has nothing unreleased")
    path.write_text(f"{before}{heading}\n## {version} - {day.isoformat()}\n{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="such as 0.2.0")
    version = parser.parse_args().version
    try:
        set_version(version)
        date_changes(version, datetime.datetime.now(tz=datetime.UTC).date())
    except (ValueError, LookupError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"This tree is {version}. Commit it, then write `{version} COMMIT` to RELEASE with that commit.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

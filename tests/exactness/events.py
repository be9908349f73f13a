"""What really happened, counted: a test that does not see its events proves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

Events = Counter[str]


def require_events(events: Events, count: int, least: Mapping[str, int]) -> None:
    """Every event that `count` scenarios were to provoke has occurred often enough. `least`: in a hundred scenarios."""
    wanted = {name: each * count // 100 for name, each in least.items()}
    rare = {name: f"{events[name]} of {most}" for name, most in wanted.items() if events[name] < most}
    assert not rare, f"these hardly happened, so nothing was shown about them: {rare}"


def table(events: Events) -> str:
    """To print."""
    return "\n".join(f"  {count:8d}  {name}" for name, count in sorted(events.items()))

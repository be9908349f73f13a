"""What really happened, counted: a test that does not see its events proves nothing."""

from __future__ import annotations

from collections import Counter

Events = Counter[str]


def require_events(events: Events, least: dict[str, int]) -> None:
    """Every event that the run was to provoke has occurred so often."""
    rare = {name: f"{events[name]} of {wanted}" for name, wanted in least.items() if events[name] < wanted}
    assert not rare, f"these hardly happened, so nothing was shown about them: {rare}"


def table(events: Events) -> str:
    """To print."""
    return "\n".join(f"  {count:8d}  {name}" for name, count in sorted(events.items()))

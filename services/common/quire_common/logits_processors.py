"""Logits processors by name: how a model's capabilities tell of those that a worker runs, and how names are checked.

A request carries names, never code: what runs is what the worker's operator installed and allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, TooLarge
from quire_common.request_parameters import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_PROCESSORS = BY_NAME["logits_processors"].max_items
MAX_NAME_CHARS = int(BY_NAME["logits_processors"].high)
_CAPABILITY = "logits_processor:"


def capabilities_of(names: Iterable[str]) -> tuple[str, ...]:
    """What a model that has these processors is able to do."""
    return tuple(_CAPABILITY + name for name in names)


def processors_in(capabilities: Iterable[str]) -> list[str]:
    """The names among capabilities."""
    return [each.removeprefix(_CAPABILITY) for each in capabilities if each.startswith(_CAPABILITY)]


def check_names(names: Sequence[str]) -> None:
    """Raise TooLarge if a request names more logits processors than it may (MAX_PROCESSORS), or one by more than
    MAX_NAME_CHARS characters."""
    if len(names) > MAX_PROCESSORS or max(map(len, names), default=0) > MAX_NAME_CHARS:
        raise TooLarge(
            "TOO_MANY_ITEMS",
            f"logits_processors names {len(names)}, or one by more than {MAX_NAME_CHARS} characters.",
            f"Name {MAX_PROCESSORS} at most.",
            param="logits_processors",
        )


def check_known(names: Sequence[str], known: Iterable[str]) -> None:
    """Raise InvalidArgument for a name that is not among the known ones, which the error lists."""
    there = sorted(known)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise InvalidArgument(
            "UNKNOWN_LOGITS_PROCESSOR",
            f"There is no logits processor {unknown[0][:64]!r} here.",
            f"Name one of: {', '.join(there)}." if there else "None are allowed; see the worker's --logits-processors.",
            param="logits_processors",
        )

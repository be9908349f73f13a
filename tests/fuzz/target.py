"""A fuzz target: inputs that are right, ways to change them, and code of the product that takes them."""

from __future__ import annotations

import enum
import random
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Self

from quire_common.errors import QuireError

LEAST_READABLE = 0.5
"""Share of a target's inputs that its first parser must pass: the others test little."""


FILES_MARK = b"\n---\n"
"""Between two files of one input."""


class Outcome(enum.Enum):
    """The outcome of an input. `UNREADABLE`: the first parser (JSON, protobuf, a magic number) refused it. `REFUSED`:
    that parser passed it, and a later check refused it by a typed error."""

    UNREADABLE = "unreadable"
    REFUSED = "refused"
    ACCEPTED = "accepted"


class Finding(Exception):
    """An answer that no input may cause, such as a 500. Any exception of `run` that is not typed is a finding too."""


class Target(ABC):
    """A context, entered once per process. `covers` names the product's modules whose lines count as its coverage,
    relative to `services`; a folder stands for all modules in it."""

    covers: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path) -> None:
        """`folder` is empty, and the target's own."""
        self.folder = folder
        self.closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.close()

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Inputs that the product accepts."""

    @abstractmethod
    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        """Return the input with a few changes. Most changes leave it readable to the first parser."""

    @abstractmethod
    def run(self, data: bytes) -> Outcome:
        """Give the input to the product. Raises Finding, and whatever the product must not raise."""


def check_error(error: QuireError) -> None:
    """Raise Finding unless the error tells a client what is wrong: a code, a cause and a fix that can be encoded, and
    no bug of ours."""
    if type(error).__name__ == "Internal" or not (error.code and error.message and error.fix):
        raise Finding(f"{type(error).__name__} {error.code}: {error.message}") from error
    try:
        f"{error.message}{error.fix}{error.param}".encode()
    except UnicodeEncodeError as broken:
        raise Finding(f"{error.code} has a message that is no UTF-8") from broken

"""The fake worker's slots, and its steps between launch and completion."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from quire_common.credit import Start
from quire_common.errors import QuireError
from tests.fakes.worker.counted_answer import fold


@dataclass(eq=False)
class Slot:
    start: Start
    computed: int
    limit: int
    tables: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    prefixes: array[int] = field(default_factory=lambda: array("q"))
    waiting: bool = True
    stopped: bool = False

    def __post_init__(self) -> None:
        self.known_len = self.start.sequence.known_len

    @property
    def decodes(self) -> bool:
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.known_len

    def append(self, token: int) -> None:
        self.prefixes.append(fold(self.prefixes[-1] if self.prefixes else 0, token))
        self.tokens.append(token)


@dataclass
class Launched:
    """A step between its launch and its completion."""

    applied: int
    rows: list[tuple[int, list[int], int]] = field(default_factory=list)
    logprobs: list[bool] = field(default_factory=list)
    prefill: list[tuple[int, int]] = field(default_factory=list)
    prefill_tokens: int = 0
    writes: list[tuple[int, int, int, int]] = field(default_factory=list)
    filled: list[tuple[Slot, int, int, int]] = field(default_factory=list)
    errors: list[tuple[int, QuireError]] = field(default_factory=list)

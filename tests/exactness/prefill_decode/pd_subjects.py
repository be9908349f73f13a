"""As many devices of one kind as a scenario of prefill and decode may have sides: their pools are apart, their models
alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.exactness.subjects import make_subject

if TYPE_CHECKING:
    from tests.exactness.scenario import Scale
    from tests.exactness.subject import Subject

MOST_SIDES = 4


class PdSubjects:
    """`one` of them answers what is asked alone, and serves what is compared with."""

    def __init__(self, kind: str) -> None:
        self.sides: list[Subject] = [make_subject(kind) for _ in range(MOST_SIDES)]
        self.one: Subject = make_subject(kind)

    @property
    def scale(self) -> Scale:
        """Of all of them."""
        return self.one.scale

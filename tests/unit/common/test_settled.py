"""What is there at the start is left out of collections; what comes later is not."""

from __future__ import annotations

import gc
import weakref

from quire_common.serving.settled import settle


class Ring:
    """Refers to itself: only the collector can end it."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_not_looked_through_and_what_comes_later_is_collected() -> None:
    try:
        settle()
        assert gc.get_freeze_count() > 1000 > len(gc.get_objects())
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        gc.freeze()  # as tests/conftest.py did

"""Masks take no processor time in these tests, unless a test sets its own clock. On a busy machine, a first mask can
take so long that its sequence counts as slow, and gets no lookahead masks."""

from __future__ import annotations

import itertools

import pytest


@pytest.fixture(autouse=True)
def no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nanosecond for each look at the clock."""
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", itertools.count().__next__)

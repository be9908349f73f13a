"""The soak, on the CPU's own engine: it holds, and what it is to find is found: leaks, pages of two, stale reads."""

from __future__ import annotations

import json
from collections.abc import Sequence as Listed
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu.record import Recorder
from bench.harness.local_engine import LocalEngine
from quire_scheduler.kv.page_allocator import Fence, PageAllocator
from quire_worker.config import CUDA_PAGE_SIZE
from quire_worker.engine.step_builder import StepBuilder
from tests.gpu import soak
from tests.gpu.soak_run import STATES, SoakPlan, SoakRun
from tests.gpu.soak_traffic import SoakTraffic
from tests.model.folders import load_dummy_model

PLAN = SoakPlan(
    steps=150,
    requests=60,
    arrivals=(0.3, 1.5),
    abort_rate=0.15,
    least_finished=20,
    least_aborted=3,
    check_every=5,
    most_open=24,
)


FEW_PAGES = replace(soak.SOAKS[1].plan, steps=20, requests=24, least_finished=10, least_preempted=2)
"""That of a GPU, shorter."""


def soaked(
    tmp_path: Path, plan: SoakPlan = PLAN, pages: int = 13, most_prompt: int = 60, most_output: int = 50
) -> dict[str, dict[str, object]]:
    model, reference = (load_dummy_model(tmp_path / name) for name in ("model", "reference"))
    local = LocalEngine(model, max_num_seqs=4, num_pages=pages, max_waiting=1000, max_num_batched_tokens=24)

    def poison(pages: list[int]) -> None:
        model.runner.pool.tensor[pages] = float("nan")

    recorder = Recorder(5, "a machine", tmp_path / "out")
    run = SoakRun(local, SoakTraffic(97, most_prompt, most_output).requests(), plan, poison)
    soak.check(recorder, "soak", run, local, reference.runner, 1e-4, answers=8)
    local.close()
    return {line["check"]: line for line in map(json.loads, (tmp_path / "out").read_text().splitlines())}


def test_random_arrivals_and_aborts_in_every_state(tmp_path: Path) -> None:
    found = soaked(tmp_path)
    assert {line["result"] for line in found.values()} == {"ok"}, found
    told = found["soak"]
    assert all(int(str(told[f"aborted_{state}"])) >= 3 for state in STATES)
    assert told["abort"] == sum(int(str(told[f"aborted_{state}"])) for state in STATES)
    # Both ways to end. Beginnings in common are few here, and not sure to come about: a device has its own time.
    assert all(told[name] for name in ("stop", "length", "pages_poisoned")), told
    assert found["soak: greedy answers"]["answers"] in range(4, 9)


@pytest.mark.deep
def test_where_pages_are_few_those_that_run_lose_theirs(tmp_path: Path) -> None:
    found = soaked(tmp_path, FEW_PAGES, pages=7, most_prompt=12, most_output=80)
    assert {line["result"] for line in found.values()} == {"ok"}, found
    assert int(str(found["soak"]["preempted"])) >= 2


@pytest.mark.parametrize("plan", soak.SOAKS, ids=lambda plan: plan.name)
def test_every_request_of_a_soak_can_be_served_alone(plan: soak.Soak) -> None:
    assert plan.most_prompt + plan.most_output <= (plan.pages - 1) * CUDA_PAGE_SIZE


def test_the_soak_of_few_pages_asks_for_more_than_there_are() -> None:
    """Whoever starts has a page, and those of two long ones are more than all."""
    few = soak.SOAKS[1]
    assert few.plan.least_preempted >= 10 and few.most_prompt < CUDA_PAGE_SIZE
    assert 2 * (few.most_prompt + few.most_output) > (few.pages - 1) * CUDA_PAGE_SIZE


@pytest.mark.deep
def test_too_little_of_anything_fails(tmp_path: Path) -> None:
    rare = SoakPlan(
        steps=20,
        requests=5,
        arrivals=(0.5, 0.5),
        abort_rate=0.0,
        least_finished=50,
        least_aborted=1,
        least_preempted=1000,
        least_cached=100_000,
        check_every=5,
    )
    told = soaked(tmp_path, rare)["soak"]
    assert told["result"] == "FAILED"
    wrong = str(told["wrong"])
    assert "requests finished of 50" in wrong and "0 aborted while queued, of 1" in wrong
    assert "preempted of 1000" in wrong and "found in pages, of 100000" in wrong


def test_a_leak_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of an aborted or ended request is forgotten."""
    released = PageAllocator.release
    calls = 0

    def release(self: PageAllocator, pages: Listed[int], fence: Fence) -> None:
        nonlocal calls
        calls += 1
        released(self, pages[:-1] if calls == 20 else pages, fence)

    monkeypatch.setattr(PageAllocator, "release", release)
    assert soaked(tmp_path)["soak"]["result"] == "FAILED"


def test_a_page_that_two_write_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives a page to a second request while the first has it."""
    allocate = PageAllocator.allocate
    given: list[int] = []

    def twice(self: PageAllocator, count: int) -> list[int]:
        pages = allocate(self, count)
        given.extend(pages)
        if pages and len(given) > 30 and given[-2] not in pages:
            pages[-1] = given[-2]
        return pages

    monkeypatch.setattr(PageAllocator, "allocate", twice)
    told = soaked(tmp_path)["soak"]
    assert told["result"] == "FAILED" and told["wrong"]


@pytest.mark.deep
def test_a_step_that_uses_anothers_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The books are right, but what the device is told is not: only tokens can show it."""
    build = StepBuilder.build

    def crossed(self: StepBuilder, *args: object) -> object:
        batch = build(self, *args)  # type: ignore[arg-type]  # StepBuilder's own
        if len(batch.count) > 1:
            batch.page_table[1, 0] = batch.page_table[0, 0]
        return batch

    monkeypatch.setattr(StepBuilder, "build", crossed)
    assert soaked(tmp_path)["soak: greedy answers"]["result"] == "FAILED"

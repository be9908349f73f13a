"""Logits processors: found by name, run in order, told of all tokens, and alone in their failures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quire_common.errors import ConfigError, InvalidArgument
from quire_common.logit_controls import LogitControls
from quire_common.logits_processors import capabilities_of, check_known, processors_in
from quire_common.sequence import Sampling, Sequence, Stop, check_sampling
from quire_common.thinking import ThinkingBudget
from quire_worker.arrays import Float32, Int32
from quire_worker.engine.step_runner import failed_samples
from quire_worker.sampling.logits_processor import GROUP, LogitsProcessor, load_processors
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.sampler import sample
from quire_worker.step import NOTHING_LEFT
from tests.model.batches import Run, make_batch
from tests.model.sampling.sampling_columns import columns

VOCAB = 12


def row(*processors: LogitsProcessor, output: tuple[int, ...] = (), **asks: object) -> LogitsState:
    named = {f"p{index}": each for index, each in enumerate(processors)}
    sampling = Sampling(processors=tuple(named), controls=asks.pop("controls", None))  # type: ignore[arg-type]  # by its name
    prompt, before = np.array([1, 2], np.int32), np.array(output, np.int32)
    found = LogitsState.of(Sequence(prompt, Stop(20), sampling, before, **asks), named)  # type: ignore[arg-type]  # by names
    assert found is not None and found.runs_python and found.changes_logits
    return found


def test_they_see_all_tokens_and_run_in_the_order_of_the_request() -> None:
    seen: list[tuple[list[int], list[int], float]] = []

    def tell(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
        assert not prompt_ids.flags.writeable and not output_ids.flags.writeable
        seen.append((prompt_ids.tolist(), output_ids.tolist(), float(logits[0])))
        return logits + 1

    def double(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
        logits *= 2
        return logits

    controls = row(tell, double, tell, output=(7,))
    for token in range(100):
        logits = np.full(VOCAB, 3, np.float32)
        controls.apply(logits)
        controls.apply(np.full(VOCAB, 3, np.float32))  # twice: nothing of the first is left
        assert logits.tolist() == [9] * VOCAB
        controls.fed(token % VOCAB)
    assert seen[:4] == [([1, 2], [7], 3.0), ([1, 2], [7], 8.0)] * 2
    assert seen[-1] == ([1, 2], [7, *(token % VOCAB for token in range(99))], 8.0)


def test_masks_and_biases_come_before_and_penalties_after() -> None:
    """A token that it brings back may be drawn; what the prompt has is penalised still."""

    def forget(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
        assert np.isinf(logits).sum() == VOCAB - 1
        return np.full(VOCAB, 8, np.float32)

    asked = LogitControls(allowed_token_ids=(5,), repetition_penalty=2.0)
    logits = np.zeros(VOCAB, np.float32)
    row(forget, controls=asked).apply(logits)
    assert logits.tolist() == [8, 4, 4, *[8] * (VOCAB - 3)]


def test_a_forced_token_asks_nobody() -> None:
    def never(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
        raise AssertionError("asked")

    forced = row(never, thinking=ThinkingBudget((2,), (9,), 0))
    logits = np.zeros(VOCAB, np.float32)
    forced.apply(logits)
    assert forced.failure is None and np.flatnonzero(logits == 0).tolist() == [9]


def fails(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    raise KeyError("mine")


def makes_nan(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    logits[3] = np.nan
    return logits


def makes_infinite(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    return np.full(VOCAB, np.inf, np.float32)


def makes_another_shape(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    return np.zeros(VOCAB + 1, np.float32)


def returns_nothing(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    return None  # type: ignore[return-value]  # a mistake that others make


@pytest.mark.parametrize("wrong", [fails, makes_nan, makes_infinite, makes_another_shape, returns_nothing])
def test_a_failure_is_its_requests_alone(wrong: LogitsProcessor) -> None:
    controls = row(wrong)
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 40.0
    token = sample(logits, columns(3, controls={1: controls}))
    assert token.tolist() == [4, NOTHING_LEFT, 4]
    batch = make_batch([Run([1], 0, [1]), Run([1], 0, [2], controls=controls), Run([1], 0, [3])])
    (failed,) = failed_samples(batch, token).items()
    assert failed[0] == 1 and failed[1].code == "LOGITS_PROCESSOR_FAILED" and "'p0'" in failed[1].message


def test_names_are_told_and_checked() -> None:
    told = ("top_k", *capabilities_of(["b", "a"]))
    assert processors_in(told) == ["b", "a"]
    check_known(["a", "b", "a"], processors_in(told))
    with pytest.raises(InvalidArgument, match="'c'") as caught:
        check_known(["a", "c"], processors_in(told))
    assert (caught.value.param, caught.value.fix) == ("logits_processors", "Name one of: a, b.")
    for names in (("a",) * 17, ("x" * 257,)):
        with pytest.raises(InvalidArgument, match="logits_processors names"):
            check_sampling(Sampling(processors=names))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package, as importlib.metadata sees one."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = ["good = theirs:make", "broken = theirs:fail", "absent = theirs:nothing"]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points]))
    (tmp_path / "theirs.py").write_text(
        "def make(model):\n    return lambda p, o, x: x + len(model.name)\ndef fail(model):\n    raise OSError('no')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("theirs", None)


def test_only_what_is_allowed_is_loaded(package: Path) -> None:
    found = load_processors(["good"], package / "demo")
    assert [*found] == ["good"]
    logits = np.zeros(3, np.float32)
    assert found["good"](logits.astype(np.int32), logits.astype(np.int32), logits).tolist() == [4, 4, 4]
    assert load_processors([], package) == {}


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("other", "LOGITS_PROCESSOR_MISSING", "'other'"),
        ("broken", "LOGITS_PROCESSOR_BROKEN", "OSError"),
        ("absent", "LOGITS_PROCESSOR_BROKEN", "theirs:nothing"),
    ],
)
def test_what_cannot_be_loaded_ends_the_start(package: Path, name: str, code: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_processors(["good", name], package)
    assert caught.value.code == code

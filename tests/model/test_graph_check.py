"""`find_defect` with a recorder that replays by calling the same code for the tensors of the capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_worker.transformers_backend.graph_check import find_defect

VOCABULARY, POSITIONS = 11, 50


class RecordedModel:
    """Layers whose last pass can be repeated. `chosen` is what Python decided in a pass, which a graph keeps."""

    def __init__(self, choose: Callable[[Tensor], float]) -> None:
        self._choose = choose
        self.capturing = False
        self._last: tuple[Tensor, Tensor, float, Tensor] | None = None

    def hidden(self, token: Tensor, position: Tensor | None) -> Tensor:
        assert position is not None
        chosen = self._choose(position)
        result = token[:, None] * 1.0 + position[:, None] * chosen
        self._last = token, position, chosen, result
        return result

    def replayed(self) -> Callable[[], None]:
        assert self._last is not None
        token, position, chosen, result = self._last

        def replay() -> None:
            result.copy_(token[:, None] * 1.0 + position[:, None] * chosen)

        return replay


class Graph:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class Recorder:
    def __init__(self, model: RecordedModel) -> None:
        self._model = model
        self.abandoned = False

    def begin(self) -> None:
        self._model.capturing = True

    def end(self) -> Graph:
        self._model.capturing = False
        return Graph(self._model.replayed())

    def abandon(self) -> None:
        self._model.capturing = False
        self.abandoned = True


def defect_of(model: RecordedModel, recorder: Recorder) -> str:
    return find_defect(model, VOCABULARY, POSITIONS, torch.device("cpu"), recorder)


def test_code_without_choices_can_be_captured() -> None:
    model = RecordedModel(lambda position: 2.0)
    assert defect_of(model, Recorder(model)) == ""


def test_code_that_chooses_by_values_is_found() -> None:
    """As rotary embeddings do whose scale depends on the longest position."""
    model = RecordedModel(lambda position: float(position.max()))
    assert defect_of(model, Recorder(model)) == "a replayed pass computes something else than a new one"


def test_code_that_reads_values_is_found_by_its_error() -> None:
    def choose(position: Tensor) -> float:
        if model.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        return 1.0

    model = RecordedModel(choose)
    recorder = Recorder(model)
    assert defect_of(model, recorder) == "RuntimeError: operation not permitted when stream is capturing"
    assert recorder.abandoned


def test_an_error_without_text_is_named_by_its_type() -> None:
    def choose(position: Tensor) -> float:
        if model.capturing:
            raise NotImplementedError
        return 1.0

    model = RecordedModel(choose)
    assert defect_of(model, Recorder(model)) == "NotImplementedError: no text"


@pytest.mark.parametrize("positions", [1, 2])
def test_a_short_context_is_no_defect(positions: int) -> None:
    model = RecordedModel(lambda position: 2.0)
    assert find_defect(model, VOCABULARY, positions, torch.device("cpu"), Recorder(model)) == ""

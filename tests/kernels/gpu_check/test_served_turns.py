"""Two checkouts by turns: the first one alternates, the first turn does not count, ratios are those of medians."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.http_load import HttpLoad
from bench.gpu.served_turns import measure
from bench.harness.checkout_services import CheckoutServices

HERE, OTHER = CheckoutServices("http://here", "", 1), CheckoutServices("http://other", "", 2)


def test_ratios_are_of_medians_without_the_first_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    seeds: list[int] = []
    figures = {"http://here": iter([999.0, 30.0, 90.0, 40.0]), "http://other": iter([1.0, 20.0, 10.0, 20.0])}

    def put(load: HttpLoad, url: str, folder: Path) -> dict[str, float]:
        asked.append(url.removeprefix("http://"))
        seeds.append(load.seed)
        return {"median_ttft_ms": next(figures[url])}

    monkeypatch.setattr(HttpLoad, "put", put)
    ratios = measure({"row": (HttpLoad(2, 8, 4), "median_ttft_ms")}, [HERE, OTHER], 3, tmp_path)
    assert ratios == {"row": 2.0}
    assert asked == ["here", "other", "other", "here", "here", "other", "other", "here"]
    assert seeds == [0, 0, 1, 1, 2, 2, 3, 3], "both get the same prompts, and no turn those of another"
    assert "row, median_ttft_ms: here 30 90 40, other 20 10 20, ratio 2.000" in capsys.readouterr().out

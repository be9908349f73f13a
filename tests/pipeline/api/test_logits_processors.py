"""The example of docs/python.md, as its reader would use it: a package that is installed beside the worker."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, InvalidArgument, SamplingParams

ROOT = Path(__file__).parents[3]
WINDOW = 8


def example() -> tuple[str, str]:
    """Its module, and its part of pyproject.toml."""
    section = (ROOT / "docs" / "python.md").read_text().split("## Logits processors")[1]
    blocks = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)))
    return blocks["python"], blocks["toml"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that are started from here on."""
    code, project = example()
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    ((name, target),) = points.items()
    (tmp_path / f"{target.split(':')[0]}.py").write_text(code)
    info = tmp_path / "example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


@pytest.fixture
def llm(installed: None, demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, logits_processors="no-echo") as running:
        yield running


def echoes(tokens: list[int]) -> bool:
    return any(token in tokens[max(0, place - WINDOW) : place] for place, token in enumerate(tokens))


def test_example_logits_processor_changes_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked = params.clone(logits_processors=["no-echo"])
    plain, changed, again = llm.generate(["ROMEO:"] * 3, [params, asked, asked])
    tokens = list(changed.outputs[0].token_ids)
    assert len(tokens) == 60 and not echoes(tokens) and echoes(list(plain.outputs[0].token_ids))
    assert list(again.outputs[0].token_ids) == tokens
    with pytest.raises(InvalidArgument, match="'echo'") as caught:
        llm.generate("ROMEO:", params.clone(logits_processors=["echo"]))
    assert (caught.value.code, caught.value.fix) == ("UNKNOWN_LOGITS_PROCESSOR", "Name one of: no-echo.")

"""YAML of plain values: as PyYAML reads it, in bounded time and depth, with libyaml's parser."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest
import yaml
from yaml._yaml import CParser

from quire_common import config
from quire_common.config import parse_yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.mark.parametrize(
    "text",
    ["[" * 30_000, '{"a": ' * 10_000, "a: " + "[" * 101 + "]" * 101, "# " + "]" * 30_000 + "\n" + "[" * 30_000],
    ids=len,
)
def test_yaml_nested_too_deeply_is_refused_at_once(text: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError, match="open brackets"):
        parse_yaml(text)
    assert time.process_time() - began_s < 0.5


def test_yaml_as_deep_as_the_bound_is_read() -> None:
    assert parse_yaml("[" * 100 + "]" * 100 + " # " + "[]" * 1000)


@pytest.mark.parametrize("text", ["- " * 200_000 + "a", "\n".join(" " * i + "a:" for i in range(3000))], ids=len)
def test_blocks_nested_too_deeply_are_refused_at_once(text: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError, match="recursion"):
        parse_yaml(text)
    assert time.process_time() - began_s < 0.5


def test_libyaml_parses() -> None:
    assert isinstance(config._yaml_loader(""), CParser)


def test_python_parses_where_libyaml_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_yaml_loader", yaml.SafeLoader)
    assert parse_yaml("a: [1, 2]") == {"a": [1, 2]}


@pytest.mark.parametrize("path", [path for path in sorted(DEPLOY.rglob("*.y*ml")) if "templates" not in path.parts])
def test_files_are_read_as_by_safe_load(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    if len(documents) == 1:
        assert parse_yaml(text) == documents[0]
    else:
        with pytest.raises(ValueError, match="single document"):
            parse_yaml(text)


def test_only_plain_values_are_made() -> None:
    assert parse_yaml("[2020-01-01, 0x1f, 1:30, ~, yes, 1e3, 'a']") == [
        datetime.date(2020, 1, 1), 31, 90, None, True, "1e3", "a",
    ]  # fmt: skip
    for text in ("!!python/object/apply:os.getcwd []", "!!python/name:os.getcwd", "2020-13-01", "!!bool x", "a: b: c"):
        with pytest.raises(ValueError, match=r"\S"):
            parse_yaml(text)

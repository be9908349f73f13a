"""Tuning and troubleshooting name metrics, options and error codes that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("tuning.md", "troubleshooting.md")
# Flags of `quire up`, `quire restart`, `quire complete`, `quire bench serve` and `quire plan`, and of every service.
_OF_COMMANDS = (
    "tokenizers start-timeout timeout timings num-processes gpu requests-per-s prompt-tokens output-tokens ttft-ms "
    "itl-ms help"
)
OF_COMMANDS = set(_OF_COMMANDS.split())


def frozen(name: str) -> Any:
    return json.loads((ROOT / "tests" / "contract" / "frozen" / f"{name}.json").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_metrics_of_the_page_exist(page: str) -> None:
    named = set(re.findall(r"`(quire_\w+)`", (ROOT / "docs" / page).read_text()))
    known = set(frozen("metrics"))
    assert len(named) >= 5
    assert not {name for name in named if name not in known and name.removesuffix("_total") not in known}


@pytest.mark.parametrize("page", PAGES)
def test_options_of_the_page_exist(page: str) -> None:
    named = set(re.findall(r"`--([a-z-]+)", (ROOT / "docs" / page).read_text()))
    known = {option.replace("_", "-") for options in frozen("flags").values() for option in options}
    assert len(named) >= 5 and named <= known | OF_COMMANDS


@pytest.mark.parametrize("page", PAGES)
def test_error_codes_of_the_page_exist(page: str) -> None:
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", (ROOT / "docs" / page).read_text())) - {"TRITON_CACHE_DIR"}
    assert named and named <= set(frozen("errors"))

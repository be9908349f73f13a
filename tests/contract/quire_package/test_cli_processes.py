"""Commands of the CLI that start a process, or run as one: `quire config` and `quire key`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.__main__ import main
from quire_router.api_keys import load_api_keys
from quire_router.principal import ADMIN, METRICS, KeyLimits

ROOT = Path(__file__).resolve().parents[3]


def test_config_explains_values_and_their_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_MAX_N", "7")
    assert main(["config", "router", "--max-logprobs", "5", "--api-key", "secret-key", "--json"]) == 0
    out = capsys.readouterr().out
    options = {option["name"]: option for option in json.loads(out)["router"]}
    assert (options["max-n"]["value"], options["max-n"]["source"]) == (7, "QUIRE_ROUTER_MAX_N")
    assert (options["max-logprobs"]["value"], options["max-logprobs"]["source"]) == (5, "--max-logprobs")
    assert options["placement"]["source"] == "default" and options["placement"]["help"]
    assert options["api-key"]["value"] == "***" and "secret-key" not in out
    assert main(["config", "router"]) == 0
    table = capsys.readouterr().out
    assert "QUIRE_ROUTER_MAX_N" in table and "max-body-bytes" not in table
    monkeypatch.setenv("QUIRE_ROUTER_MAX_N", "none")
    assert main(["config", "router"]) == 1
    assert "QUIRE_ROUTER_MAX_N is 'none'" in capsys.readouterr().err
    assert main(["config", "gateway"]) == 1


def test_output_of_quire_key_is_a_valid_entry(tmp_path: Path) -> None:
    flags = ["key", "alice", "--scope", "admin", "--scope", "metrics", "--tokens-per-minute", "9"]
    made = subprocess.run(
        [sys.executable, "-m", "quire", *flags], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    file = tmp_path / "keys.yaml"
    assert "under `keys:`" in made.stderr
    header = subprocess.run(
        [sys.executable, "-m", "quire", "key", "bob", "--header"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    file.write_text(header.stdout + made.stdout)
    key = made.stderr.splitlines()[0].rpartition(" ")[2]
    principal = load_api_keys([], str(file)).authenticate(f"Bearer {key}", ADMIN)
    assert principal.name == "alice" and principal.scopes == {ADMIN, METRICS} and principal.limits == KeyLimits(0, 9)
    assert key not in made.stdout and len(key) > 40

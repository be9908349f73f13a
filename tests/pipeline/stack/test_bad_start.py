"""Stacks of real services that cannot start: the cause is the headline, with a fix, and nothing is left running."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import StartFailed
from quire.local.ports import free_ports
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from tests.pipeline.leftovers import assert_nothing_left, read_state
from tests.tiers import deep_after

Damage = Callable[[Path], None]


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def unsupported_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["GPT2LMHeadModel"], model_type="gpt2")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


# One of each kind: what else can be wrong with a model's files, loading tells without processes. Where several services
# read the damaged file, any of them may be the first to say so.
CASES: list[tuple[Damage, str, tuple[str, ...]]] = [
    (unsupported_architecture, "worker", ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")),
    (no_weights, "worker", ("safetensors",)),
    (broken_config, "worker or tokenizer", ("config.json",)),
    (no_tokenizer, "tokenizer", ("tokenizer.json",)),
]


@pytest.mark.deep
@pytest.mark.parametrize(("damage", "service", "words"), deep_after(2, CASES), ids=[case[0].__name__ for case in CASES])
def test_damaged_model_is_named_at_the_start(
    tmp_path: Path, demo_model: Path, damage: Damage, service: str, words: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    damage(folder)
    with pytest.raises(StartFailed) as raised:
        LocalStack(StackSpec("test", str(folder)))
    error = raised.value
    assert error.service in service.split(" or ")
    assert error.code not in ("", "CRASHED", "EXITED", "INTERNAL")
    assert error.fix
    for word in words:
        assert word in f"{error.message} {error.fix}"
    assert_nothing_left(read_state())


BAD_FLAGS = [
    ("worker", "no-such-flag", "1", "no-such-flag"),
    ("scheduler", "scheduling-policy", "lottery", "lottery"),
    ("router", "port", "70000", "70000"),
    ("tokenizer", "listen", "nowhere", "nowhere"),
]


@pytest.mark.parametrize(
    ("service", "flag", "value", "word"), deep_after(1, BAD_FLAGS), ids=[f"{c[0]} {c[1]}" for c in BAD_FLAGS]
)
def test_bad_flag_is_named_at_the_start(demo_model: Path, service: str, flag: str, value: str, word: str) -> None:
    with pytest.raises(StartFailed) as raised:
        LocalStack(StackSpec("test", str(demo_model), flags={service: {flag: value}}))
    assert raised.value.service == service
    assert word in raised.value.message
    assert raised.value.fix
    assert_nothing_left(read_state())


def test_missing_service_is_named_at_the_start(demo_model: Path) -> None:
    import sys

    spec = StackSpec("test", str(demo_model), commands={"kvstore": (sys.executable, "-m", "quire_nothing")})
    with pytest.raises(StartFailed) as raised:
        LocalStack(spec)
    assert raised.value.service == "kvstore"
    assert "quire_nothing" in raised.value.message


@pytest.mark.deep
def test_taken_port_is_named_at_the_start(demo_model: Path) -> None:
    """Two services told to listen on one port: the second one says so, also after choosing again."""
    (port,) = free_ports(1)
    flags = {"worker": {"listen": f"127.0.0.1:{port}"}, "kvstore": {"listen": f"127.0.0.1:{port}"}}
    with pytest.raises(StartFailed) as raised:
        LocalStack(StackSpec("test", str(demo_model), flags=flags))
    assert raised.value.code == "PORT_IN_USE"
    assert str(port) in raised.value.message
    assert_nothing_left(read_state())

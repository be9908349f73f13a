"""Clients from PyPI against a stack with an API key: each program in its own environment. Slow: `make clients`.

The environments are those of environment-N.txt, in the folders that the Makefile makes; their pins conflict. Programs
that call tools talk to SmolLM2: the demo model writes white space without end within JSON.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from tests.parity.real_models import real_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEY, MODEL = "key-of-the-clients", "demo"
LIMIT_S = 300.0
PROGRAMS = {"openai": 1, "anthropic": 1, "litellm": 2, "langchain": 2, "llm": 2}
TOOL_PROGRAMS = {
    "openai_tools": 1,
    "anthropic_tools": 1,
    "litellm_tools": 2,
    "langchain_tools": 2,
    "pydantic_ai": 3,
    "openai_agents": 3,
}


def _serving(folder: Path, model: Path, **tokenizer: str | bool) -> Iterator[str]:
    """Serve a model, and yield the URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(folder))
        flags: dict[str, dict[str, str | bool]] = {"router": {"served-model-name": MODEL}, "tokenizer": tokenizer}
        spec = StackSpec("clients", str(model), api_keys=(KEY,), drain_timeout_s=5.0, flags=flags)
        stack = LocalStack(spec)
    yield stack.ready.http
    assert stack.deaths == []
    stack.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _serving(tmp_path_factory.mktemp("clients-state"), find_model(None))


@pytest.fixture(scope="module")
def tools_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # SmolLM2's own template has no tools; the demo model's writes conversations in the same form.
    template = find_model(None) / "chat_template.jinja"
    yield from _serving(
        tmp_path_factory.mktemp("tools-state"), real_model("smollm2"), **{"chat-template": str(template)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_finds_all_that_it_expects(name: str, url: str, tmp_path: Path) -> None:
    _run_program(name, PROGRAMS[name], url, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_PROGRAMS)
def test_a_client_calls_tools_as_their_schemas_say(name: str, tools_url: str, tmp_path: Path) -> None:
    _run_program(name, TOOL_PROGRAMS[name], tools_url, tmp_path)


def _run_program(name: str, environment: int, url: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("QUIRE_CLIENTS", ROOT)) / f".venv-clients-{environment}"
    python = folder / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{folder} is not there: `make clients` makes it")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [str(python), str(HERE / "programs" / f"{name}_client.py")],
        env={**environ, "CLIENT_URL": url, "CLIENT_KEY": KEY, "CLIENT_MODEL": MODEL, "NO_PROXY": "*"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") >= 3

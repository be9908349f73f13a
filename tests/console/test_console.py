"""The console in a real browser, against real services. Slow: `make console`, which rewrites the pictures of
docs/console.md.

The browser's program runs in an environment of its own. Here are the stack and its keys, and what the stack must look
like afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = "shakespeare"
LIMIT_S = 900.0
MOST_PICTURE_BYTES = 200_000
# Keys and their scopes by name. A name is text for the console, whatever it looks like.
KEYS = {
    "operator": ("key-of-the-operator", "[inference, admin]"),
    "alice": ("key-of-alice", "[inference]"),
    "nightly-batch": ("key-of-the-batch", "[inference]"),
    "search-team": ("key-of-the-search", "[inference]"),
}
CHECKS = (
    "a wrong key opens nothing",
    "a key without the scope opens the playground alone",
    "the operator's key opens all sections",
    "the key is in no URL and in no storage",
    "a chat shows its first token, its speed and its replica",
    "text of models, tenants and clients stays text",
    "a stream goes on after its worker was killed",
    "an operator cancels a request",
    "a drained replica is told of first",
    "every control has a name and is reached by the keyboard",
    "nothing is wider than a phone",
    "the dark scheme is dark, and texts are readable in both",
    "the policy of the page was not violated",
)


@dataclass(frozen=True)
class Running:
    url: str
    workers: dict[str, int]
    """Process ids of workers, by the instance of their scheduler."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("console")
    lines = [
        f"- {{name: {name}, sha256: {hashlib.sha256(key.encode()).hexdigest()}, scopes: {scopes}}}\n"
        for name, (key, scopes) in KEYS.items()
    ]
    keys = folder / "keys.yaml"
    keys.write_text(f"keys:\n{''.join(lines)}")
    flags: dict[str, dict[str, str | bool]] = {
        "router": {"served-model-name": MODEL, "api-key-file": str(keys)},
        # Steps of a given length, so that a slow machine has the same time to act in as a fast one.
        "worker": {"paced": "25", "max-num-seqs": "16"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(folder / "state"))
        spec = StackSpec("console", str(ROOT / "models" / "demo"), replicas=2, drain_timeout_s=20.0, flags=flags)
        stack = LocalStack(spec)
    state = stack.directory.read()
    assert state is not None
    of = state.services
    workers = {f"scheduler-{i}": of[f"worker-{i}"].pid for i in (1, 2)}
    yield Running(stack.ready.http, workers)
    assert [death.service for death in stack.deaths if not death.service.startswith("worker")] == []
    stack.close()


@pytest.mark.slow
def test_the_console_works_in_a_browser(running: Running, tmp_path: Path) -> None:
    python = Path(os.environ.get("QUIRE_CONSOLE", ROOT)) / ".venv-console" / "bin" / "python"
    browser = shutil.which("chromium")
    if browser is None or not python.exists():
        pytest.fail(f"{python} or chromium is not there: `make console` installs both")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    done = subprocess.run(
        [str(python), str(HERE / "programs" / "browser.py")],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "NO_PROXY": "*",
            "CONSOLE_URL": running.url,
            "CONSOLE_KEYS": json.dumps({name: key for name, (key, _) in KEYS.items()}),
            "CONSOLE_WORKERS": json.dumps(running.workers),
            "CONSOLE_PICTURES": str(pictures),
            "CONSOLE_BROWSER": browser,
        },
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    assert [line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")] == [*CHECKS]
    taken = sorted(pictures.glob("*.png"))
    assert len(taken) == 6 and all(0 < picture.stat().st_size < MOST_PICTURE_BYTES for picture in taken)
    if folder := os.environ.get("CONSOLE_PICTURES"):
        for picture in taken:
            shutil.copy(picture, Path(folder) / picture.name)

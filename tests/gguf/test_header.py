"""The reader of GGUF headers: what it finds in sound files, and how it refuses all others."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from quire_common.errors import ConfigError, QuireError, Unsupported
from quire_common.gguf import BLOCK_KINDS, TextArray, is_gguf, open_gguf, read_header
from quire_common.model_hub import resolve_model
from quire_worker.config import WorkerConfig
from quire_worker.model_source import load_configured
from tests.gguf.raw import BOOL, F32, I32, TEXT, U8, U16, U32, RawFile, Tensor, pair, pairs_of, text

GOOD = RawFile(
    pairs=[
        pair("general.architecture", TEXT, "llama"),
        pair("a.number", U32, 7),
        pair("a.flag", BOOL, 1),
        pair("a.share", F32, 0.5),
        pairs_of("a.texts", TEXT, ["one", "", "zwölf"]),
        pairs_of("a.numbers", I32, [3, -4]),
    ],
    tensors=[Tensor("x", (32, 3), 2, 54), Tensor("y", (5,), 0, 20), Tensor("z", (256, 2, 2), 14, 840)],
)


def written(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, bytes(GOOD))
    found = read_header(path)
    meta = found.metadata
    assert (meta.text("general.architecture"), meta.integer("a.number"), meta.flag("a.flag", False)) == (
        "llama",
        7,
        True,
    )
    assert meta.number("a.share") == 0.5 and meta.texts("a.texts") == ["one", "", "zwölf"]
    assert meta.numbers("a.numbers").tolist() == [3, -4]
    places = [(p.name, p.kind.name, p.shape, p.num_bytes) for p in found.tensors.values()]
    assert places == [("x", "Q4_0", (3, 32), 54), ("y", "F32", (5,), 20), ("z", "Q6_K", (2, 2, 256), 840)]
    data = -(-len(GOOD.header()) // 32) * 32
    assert [p.begin - data for p in found.tensors.values()] == [0, 64, 96]


def test_the_last_tensor_may_end_without_padding(tmp_path: Path) -> None:
    size = -(-len(GOOD.header()) // 32) * 32 + 96 + 840
    assert len(read_header(written(tmp_path, bytes(GOOD)[:size])).tensors) == 3
    with pytest.raises(ConfigError, match="TRUNCATED_GGUF"):
        read_header(written(tmp_path, bytes(GOOD)[: size - 1]))


def test_texts_are_found_by_place(tmp_path: Path) -> None:
    words = ["", "a", "bb", "ccc"]
    path = written(tmp_path, bytes(RawFile(pairs=[pairs_of("words", TEXT, words)])))
    found = read_header(path).metadata.values["words"]
    assert isinstance(found, TextArray) and list(found) == words and found[1:3] == ["a", "bb"]
    assert [found[i] for i in range(-4, 4)] == words + words
    with pytest.raises(IndexError):
        found[4]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_kinds_have_the_sizes_of_the_gguf_package(kind: int) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    theirs = GGMLQuantizationType(kind)
    found = BLOCK_KINDS[kind]
    assert (found.name, found.values, found.num_bytes) == (theirs.name, *GGML_QUANT_SIZES[theirs])


def test_headers_are_as_the_gguf_package_writes_them(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "theirs.gguf"
    writer = GGUFWriter(path, "qwen2")
    writer.add_uint32("x.count", 12)
    writer.add_array("x.words", ["a", "ü", ""])
    writer.add_array("x.weights", [0.5, 1.5])
    writer.add_custom_alignment(64)
    values: dict[str, NDArray[np.generic]] = {
        "first": np.arange(6, dtype=np.float32).reshape(2, 3),
        "second": np.ones((4, 8), np.float16),
    }
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(path)
    assert found.metadata.texts("x.words") == ["a", "ü", ""] and found.metadata.integer("x.count") == 12
    assert found.metadata.numbers("x.weights").tolist() == [0.5, 1.5]
    for name, array in values.items():
        place = found.tensors[name]
        raw = path.read_bytes()[place.begin : place.begin + place.num_bytes]
        assert place.begin % 64 == 0 and place.shape == array.shape
        assert np.array_equal(np.frombuffer(raw, array.dtype).reshape(array.shape), array)


HUGE = 1 << 62
ONE = Tensor("x", (32, 3), 2, 54)


def lying(*tensors: Tensor, **fields: object) -> bytes:
    return bytes(replace(RawFile(tensors=list(tensors)), **fields))  # type: ignore[arg-type]  # of a test's choice


DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "TRUNCATED_GGUF"),
    "magic alone": (b"GGUF", "TRUNCATED_GGUF"),
    "another magic": (lying(magic=b"GGML"), "CORRUPT_GGUF"),
    "version 1": (lying(version=1), "UNSUPPORTED_GGUF"),
    "version 4": (lying(version=4), "UNSUPPORTED_GGUF"),
    "big-endian": (lying(version=3 << 24), "UNSUPPORTED_GGUF"),
    "huge count of pairs": (lying(num_pairs=HUGE), "CORRUPT_GGUF"),
    "huge count of tensors": (lying(num_tensors=HUGE), "CORRUPT_GGUF"),
    "a pair too many": (lying(num_pairs=2), "CORRUPT_GGUF"),
    "a tensor too many": (lying(num_tensors=60_000), "CORRUPT_GGUF"),
    "huge key": (lying(pairs=[struct.pack("<Q", HUGE)]), "CORRUPT_GGUF"),
    "huge text": (lying(pairs=[text("k") + struct.pack("<IQ", TEXT, HUGE)]), "TRUNCATED_GGUF"),
    "huge list of numbers": (lying(pairs=[text("k") + struct.pack("<IIQ", 9, U32, HUGE)]), "TRUNCATED_GGUF"),
    "huge list of texts": (lying(pairs=[text("k") + struct.pack("<IIQ", 9, TEXT, HUGE)]), "TRUNCATED_GGUF"),
    "huge text in a list": (
        lying(pairs=[text("k") + struct.pack("<IIQQ", 9, TEXT, 1, 2**64 - 1)]),
        "TRUNCATED_GGUF",
    ),
    "lists in a list": (lying(pairs=[text("k") + struct.pack("<IIQ", 9, 9, 1)]), "UNSUPPORTED_GGUF"),
    "unknown type": (lying(pairs=[text("k") + struct.pack("<I", 13)]), "CORRUPT_GGUF"),
    "unknown type of a list": (lying(pairs=[text("k") + struct.pack("<IIQ", 9, 99, 1)]), "CORRUPT_GGUF"),
    "a key twice": (lying(pairs=[pair("k", U8, 1)] * 2), "CORRUPT_GGUF"),
    "a key that is not UTF-8": (lying(pairs=[text(b"\xff") + struct.pack("<IB", U8, 1)]), "CORRUPT_GGUF"),
    "a text that is not UTF-8": (lying(pairs=[text("k") + struct.pack("<I", TEXT) + text(b"\xff")]), "CORRUPT_GGUF"),
    "half true": (lying(pairs=[pair("k", BOOL, 2)]), "CORRUPT_GGUF"),
    "a list half true": (lying(pairs=[pairs_of("k", BOOL, [0, 2])]), "CORRUPT_GGUF"),
    "alignment 0": (lying(pairs=[pair("general.alignment", U32, 0)]), "BAD_GGUF_METADATA"),
    "alignment 24": (lying(pairs=[pair("general.alignment", U32, 24)]), "CORRUPT_GGUF"),
    "alignment 2 GiB": (lying(pairs=[pair("general.alignment", U32, 1 << 31)]), "CORRUPT_GGUF"),
    "no dimensions": (lying(replace(ONE, shape=())), "CORRUPT_GGUF"),
    "five dimensions": (lying(replace(ONE, shape=(32, 1, 1, 1, 1))), "CORRUPT_GGUF"),
    "an empty axis": (lying(replace(ONE, shape=(32, 0))), "CORRUPT_GGUF"),
    "half a block": (lying(replace(ONE, shape=(33, 3))), "CORRUPT_GGUF"),
    "a shape that overflows": (lying(replace(ONE, shape=(1 << 40, 1 << 40))), "CORRUPT_GGUF"),
    "a larger shape than its data": (lying(replace(ONE, shape=(32, 1000))), "TRUNCATED_GGUF"),
    "an unknown kind": (lying(replace(ONE, kind=5)), "CORRUPT_GGUF"),
    "a name of a kibibyte": (lying(replace(ONE, name="n" * 1024)), "CORRUPT_GGUF"),
    "a tensor twice": (lying(ONE, ONE), "CORRUPT_GGUF"),
    "a tensor over another": (lying(ONE, Tensor("y", (32, 3), 2, 54, offset=0)), "CORRUPT_GGUF"),
    "a gap": (lying(ONE, Tensor("y", (32, 3), 2, 54, offset=96)), "CORRUPT_GGUF"),
    "an offset behind the end": (lying(replace(ONE, offset=HUGE)), "CORRUPT_GGUF"),
    "no data": (lying(ONE, data=b""), "TRUNCATED_GGUF"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, code = DAMAGE[name]
    path = written(tmp_path, content)
    with pytest.raises(QuireError) as error:
        read_header(path)
    assert error.value.code == code and str(path) in error.value.message and error.value.fix


@pytest.mark.parametrize("size", [*range(60), 100, 200, 300])
def test_a_file_cut_anywhere_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_header(written(tmp_path, bytes(GOOD)[:size]))


@pytest.mark.parametrize(
    ("read", "key"),
    [
        (lambda m, k: m.text(k), "a.number"),
        (lambda m, k: m.integer(k), "a.flag"),
        (lambda m, k: m.integer(k, minimum=8), "a.number"),
        (lambda m, k: m.number(k), "a.texts"),
        (lambda m, k: m.flag(k, True), "a.number"),
        (lambda m, k: m.texts(k), "a.numbers"),
        (lambda m, k: m.numbers(k), "a.texts"),
        (lambda m, k: m.text(k), "absent"),
        (lambda m, k: m.texts(k), "absent"),
    ],
)
def test_a_value_of_another_type_is_refused(read: Callable[..., object], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BAD_GGUF_METADATA") as error:
        read(read_header(written(tmp_path, bytes(GOOD))).metadata, key)
    assert key in error.value.message


def split(folder: Path, count: int = 3, **wrong: int) -> list[Path]:
    """A model in shards of one tensor each; `wrong` gives other values of the keys split.*"""
    paths = []
    for number in range(count):
        values = {"no": number, "count": count, "tensors.count": count} | wrong
        shard = RawFile(
            pairs=[pair("general.architecture", TEXT, f"shard {number}")]
            + [pair(f"split.{key}", U16, value) for key, value in values.items()],
            tensors=[Tensor(f"t{number}", (4,), 0, 16)],
        )
        paths.append(written(folder, bytes(shard), f"big-{number + 1:05}-of-{count:05}.gguf"))
    return paths


@pytest.mark.parametrize("named", [0, 2])
def test_split_files_are_one_model(named: int, tmp_path: Path) -> None:
    found = open_gguf(split(tmp_path)[named])
    assert found.name == "big" and list(found.tensors) == ["t0", "t1", "t2"]
    assert found.metadata.text("general.architecture") == "shard 0"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ConfigError, match="MISSING_SHARD") as error:
        open_gguf(paths[0])
    assert "big-00002-of-00003.gguf" in error.value.message


@pytest.mark.parametrize("wrong", [{"no": 1}, {"tensors.count": 4}])
def test_contradictory_shards_are_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CORRUPT_GGUF"):
        open_gguf(split(tmp_path, **wrong)[0])


def test_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path)[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="BAD_GGUF_SPLIT"):
        open_gguf(path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    written(tmp_path, paths[1].read_bytes().replace(b"t1", b"t0"), paths[1].name)
    with pytest.raises(ConfigError, match="CORRUPT_GGUF"):
        open_gguf(paths[0])


@pytest.mark.parametrize(
    ("file", "name"),
    [("Llama-3.1-8B", "Llama-3.1-8B"), ("Llama-3.1-8B.gguf", "Llama-3.1-8B"), ("tiny.Q4_0.GGUF", "tiny.Q4_0")],
)
def test_model_name_is_the_file_name_without_gguf(file: str, name: str, tmp_path: Path) -> None:
    assert open_gguf(written(tmp_path, bytes(GOOD), file)).name == name


def test_unsupported_form_is_explained(tmp_path: Path) -> None:
    path = written(tmp_path, lying(pairs=[text("k") + struct.pack("<IIQ", 9, 9, 1)]))
    with pytest.raises(Unsupported) as error:
        read_header(path)
    assert error.value.message == f"{path} is not supported: `k` is a list of lists."
    assert error.value.fix == "Convert the model with a current llama.cpp."


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "absent")
    assert is_gguf(written(tmp_path, b"GGUF....", "model.bin")) and not is_gguf(written(tmp_path, b"{}", "a.json"))
    with pytest.raises(ConfigError, match="MODEL_NOT_FOUND"):
        open_gguf(tmp_path / "absent.gguf")
    assert issubclass(Unsupported, QuireError)


def test_a_path_that_cannot_be_looked_up_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("long" * 64 + ".gguf")
    assert not is_gguf(path) and resolve_model(str(path)) == str(path)
    with pytest.raises(ConfigError, match="cannot be looked up: File name too long"):
        open_gguf(path)
    with pytest.raises(ConfigError, match="cannot be looked up: File name too long"):
        load_configured(WorkerConfig(model=str(path)), lambda *_: None)

    def refuse(path: Path, **_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(ConfigError, match="cannot be looked up: Permission denied"):
            load_configured(WorkerConfig(model=str(tmp_path)), lambda *_: None)

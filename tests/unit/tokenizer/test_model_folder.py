from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_common.errors import ConfigError
from quire_tokenizer.chat.chat_renderer import ChatRenderer
from quire_tokenizer.chat.render_pool import RenderLimits, RenderPool
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.vocabulary import MAX_VOCABULARY, Vocabulary
from quire_tokenizer.work_pool import WorkPool
from tests.unit.tokenizer import folders


def test_what_the_files_say(tmp_path: Path) -> None:
    found = read_model_folder(str(folders.write_folder(tmp_path / "tiny")))
    assert found.name == "tiny"
    assert found.token_variables == {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    assert found.eos == (2, 4, "<|im_end|>")
    assert found.templates == {"default": folders.TEMPLATE}
    vocabulary = Vocabulary(found)
    assert (vocabulary.bos_id, set(vocabulary.eos_ids)) == (1, {2, 4})
    assert set(vocabulary.specials.values()) == set(folders.SPECIALS)


def test_templates_within_json_and_beside_it(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "m", template=None)
    settings = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_model_folder(str(folder)).templates == {"default": "D", "tool_use": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "J"}))
    assert read_model_folder(str(folder)).templates == {"default": "J"}
    (folder / "chat_template.jinja").write_text("F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert read_model_folder(str(folder)).templates == {"default": "F", "rag": "R"}
    (tmp_path / "own.jinja").write_text("O")
    assert read_model_folder(str(folder), chat_template=str(tmp_path / "own.jinja")).templates == {"default": "O"}


def test_a_tokenizer_from_another_folder(tmp_path: Path) -> None:
    model, text = folders.write_folder(tmp_path / "model"), folders.write_folder(tmp_path / "text", "metaspace")
    (model / "tokenizer.json").unlink()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    found = read_model_folder(str(model), str(text))
    assert found.name == "model"
    assert found.tokenizer_json == (text / "tokenizer.json").read_bytes()
    assert 7 in found.eos


def test_a_tokenizer_by_another_path_of_the_models_folder_is_read_with_the_overrides(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "link").symlink_to(folder)
    for text in (tmp_path / "link", folder / ".." / "model"):
        assert read_model_folder(str(folder), str(text), overrides={"eos_token_id": 9}).eos == (9, "<|im_end|>")
    with pytest.raises(ConfigError, match="MODEL_NOT_FOUND"):
        read_model_folder(str(folder), str(tmp_path / "absent"))


def test_a_multimodal_models_eos_tokens_are_its_own_or_those_of_its_language_model(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    for config, eos in (
        ({"text_config": {"eos_token_id": 9}}, 9),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 9}}, 9),
        ({"eos_token_id": [8], "text_config": {"eos_token_id": 9}}, 8),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        assert read_model_folder(str(folder)).eos == (eos, "<|im_end|>")


def test_the_digest_is_of_tokenizer_and_template(tmp_path: Path) -> None:
    one = folders.load(tmp_path / "one").digest
    assert one == folders.load(tmp_path / "other-name").digest
    assert len(one) == 32
    assert one != folders.load(tmp_path / "two", template="other").digest
    assert one != folders.load(tmp_path / "three", "metaspace").digest


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def huge_token_id(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["zzz"] = MAX_VOCABULARY
    path.write_text(json.dumps(tokenizer))


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def change(part: str, name: str, value: object, kind: str = "byte_level") -> Callable[[Path], None]:
    """Set a value of a part of tokenizer.json, of a tokenizer of this kind."""

    def damage(folder: Path) -> None:
        path = folders.write_folder(folder, kind) / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer[part][name] = value
        path.write_text(json.dumps(tokenizer))

    return damage


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (remove("tokenizer.json"), "TOKENIZER_MISSING"),
        (write("tokenizer.json", b'{"version": "1.0"'), "BAD_TOKENIZER"),
        (write("tokenizer.json", b"{}"), "BAD_TOKENIZER"),
        (write("tokenizer_config.json", b"[]"), "BAD_MODEL_FILE"),
        (write("tokenizer_config.json", b"{"), "BAD_MODEL_FILE"),
        (write("tokenizer_config.json", b"[" * 100_000), "BAD_MODEL_FILE"),
        (write("tokenizer_config.json", rb'{"bos_token": "\ud800"}'), "BAD_MODEL_FILE"),
        (write("tokenizer_config.json", rb'{"chat_template": "\ud800"}'), "BAD_MODEL_FILE"),
        (write("generation_config.json", b"\xff\xfe"), "BAD_MODEL_FILE"),
        (write("generation_config.json", b'{"eos_token_id": [2, 2147483648]}'), "BAD_MODEL_FILE"),
        (write("config.json", b'{"eos_token_id": -99999999999999999999}'), "BAD_MODEL_FILE"),
        (huge_token_id, "BAD_TOKENIZER"),
        # The library finds these faults in other ways: with a panic, and only when it encodes.
        (change("model", "continuing_subword_prefix", "longer"), "BAD_TOKENIZER"),
        (change("model", "unk_token", "missing", "word_piece"), "BAD_TOKENIZER"),
        (change("pre_tokenizer", "pretokenizers", [_BYTE_LEVEL] * 11), "BAD_TOKENIZER"),
        (change("normalizer", "normalizers", [_DOUBLING] * 11, "byte_fallback"), "BAD_TOKENIZER"),
        (change("decoder", "decoders", [_DOUBLING] * 11, "byte_fallback"), "BAD_TOKENIZER"),
        (change("post_processor", "single", [{"SpecialToken": {"id": "missing", "type_id": 0}}]), "BAD_TOKENIZER"),
        (write("chat_template.jinja", b"{% if %}"), "BAD_CHAT_TEMPLATE"),
    ],
)
async def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], object], code: str) -> None:
    folder = folders.write_folder(tmp_path / "m")
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        vocabulary = Vocabulary(read_model_folder(str(folder)))
        ChatRenderer(
            vocabulary,
            RenderPool(1, 1, RenderLimits(1, 1 << 29, 100)),
            WorkPool(1, 8),
            max_bytes=100,
            allow_request_template=False,
        )
    assert caught.value.code == code
    assert caught.value.fix


def test_folders_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="MODEL_REQUIRED"):
        read_model_folder("")
    with pytest.raises(ConfigError, match="MODEL_NOT_FOUND"):
        read_model_folder("/no/such/folder")
    with pytest.raises(ConfigError, match="FILE_UNREADABLE"):
        read_model_folder("/", chat_template="/no/such/template")

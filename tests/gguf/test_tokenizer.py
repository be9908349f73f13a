"""Tokenizers of GGUF files: as transformers reads the same file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from quire_common.errors import QuireError
from quire_tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from tests.gguf.vocabularies import TextFile, random_texts
from tests.oracle import quiet_transformers
from tests.unit.tokenizer import folders

TEXTS = random_texts(300) + folders.CORPUS
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return folders.byte_level()


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return folders.byte_fallback()


def transformers_of(path: Path) -> Tokenizer:
    with quiet_transformers():
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, values, _ = get_gguf_tokenizer(str(path))
        found: Tokenizer = convert_gguf_tokenizer(architecture, values)[0]
    return found


def ids_of(path: Path, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    vocabulary = Vocabulary(read_model_files(str(path)))
    return [e.ids for e in vocabulary.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "deepseek-r1-qwen", "tekken", "gpt-4o"])
def test_byte_level_ids_are_transformers(pre: str, byte_level: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_level, pre=pre).write(tmp_path / "text.gguf")
    theirs = transformers_of(path)
    model = theirs.model
    model.ignore_merges = PRE_TOKENIZERS[pre].ignore_merges
    theirs.model = model
    wanted = [e.ids for e in theirs.encode_batch(TEXTS, add_special_tokens=False)]
    assert ids_of(path, TEXTS) == wanted
    assert len({i for ids in wanted for i in ids}) > 100


def test_digits_stand_alone_as_llama_cpp_has_them(byte_level: Tokenizer, tmp_path: Path) -> None:
    """llama.cpp's two expressions for these names, one after the other; transformers knows none of the names."""
    path = TextFile(byte_level, pre="smollm").write(tmp_path / "text.gguf")
    theirs = transformers_of(path)
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert ids_of(path, TEXTS) == [e.ids for e in theirs.encode_batch(TEXTS, add_special_tokens=False)]


def test_qwen_composes_characters(byte_level: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_level, pre="qwen2").write(tmp_path / "text.gguf")
    assert ids_of(path, ["cafe\u0301"]) == ids_of(path, ["café"])


def test_sentence_piece_ids_are_transformers(byte_fallback: Tokenizer, tmp_path: Path) -> None:
    """transformers prepends the space as SentencePiece does for this architecture alone."""
    path = TextFile(byte_fallback, model="llama", architecture="phi3").write(tmp_path / "text.gguf")
    wanted = [e.ids for e in transformers_of(path).encode_batch(TEXTS, add_special_tokens=False)]
    assert ids_of(path, TEXTS) == wanted
    assert ids_of(path, TEXTS) == [e.ids for e in byte_fallback.encode_batch(TEXTS, add_special_tokens=False)]


def test_sentence_piece_without_a_space_before(byte_fallback: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_fallback, model="llama", change={"ggml.add_space_prefix": False}).write(tmp_path / "text.gguf")
    (with_space,), (without,) = ids_of(path, [" hello"]), ids_of(path, ["hello"])
    assert with_space != without
    vocabulary = Vocabulary(read_model_files(str(path)))
    assert vocabulary.tokenizer.decode(without) == "hello" and vocabulary.tokenizer.decode(with_space) == " hello"


def test_texts_come_back(byte_level: Tokenizer, byte_fallback: Tokenizer, tmp_path: Path) -> None:
    for name, file in {"b": TextFile(byte_level), "s": TextFile(byte_fallback, model="llama")}.items():
        vocabulary = Vocabulary(read_model_files(str(file.write(tmp_path / f"{name}.gguf"))))
        for text in TEXTS[:100]:
            assert vocabulary.tokenizer.decode(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_special_tokens_templates_and_ends(byte_level: Tokenizer, tmp_path: Path) -> None:
    change = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    path = TextFile(byte_level, pre="llama-bpe", change=change).write(tmp_path / "text.gguf")
    found = read_model_files(str(path))
    assert found.templates == {"default": folders.TEMPLATE, "tool_use": "T"} and found.name == "text"
    vocabulary = Vocabulary(found)
    ids = {text: i for i, text in vocabulary.specials.items()}
    assert set(folders.SPECIALS) == set(ids) and "<think>" not in ids
    assert vocabulary.bos_id == ids[folders.BOS]
    assert vocabulary.eos_ids == {ids[folders.EOS], ids[folders.TURN_END]}
    assert vocabulary.token_variables == {"bos_token": folders.BOS, "eos_token": folders.EOS}
    assert vocabulary.tokenizer.encode("a<think>").ids[-1] == vocabulary.tokenizer.token_to_id("<think>")
    (tmp_path / "own.jinja").write_text("O")
    assert read_model_files(str(path), chat_template=str(tmp_path / "own.jinja")).templates == {"default": "O"}


@pytest.mark.parametrize(
    ("pre", "change", "bos", "eos"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"ggml.add_bos_token": False}, False, False),
        ("gpt-2", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, True, True),
    ],
)
def test_what_is_put_around_texts(
    pre: str, change: dict[str, Any], bos: bool, eos: bool, byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = TextFile(byte_level, pre=pre, change=change).write(tmp_path / "text.gguf")
    (plain,), (whole,) = ids_of(path, ["dog"]), ids_of(path, ["dog"], add_special_tokens=True)
    token = byte_level.token_to_id
    assert whole == [token(folders.BOS)] * bos + plain + [token(folders.EOS)] * eos


def test_a_tokenizers_folder_beside_a_gguf_file(byte_level: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_level, pre="no such words").write(tmp_path / "model.gguf")
    folder = folders.write_folder(tmp_path / "text")
    found = read_model_files(str(path), str(folder))
    assert found.name == "model" and found.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert byte_level.token_to_id(folders.TURN_END) in found.eos


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown words": ({"ggml.pre": "klingon"}, "UNSUPPORTED_PRE_TOKENIZER", "klingon"),
    "default words": ({"ggml.pre": "default"}, "UNSUPPORTED_PRE_TOKENIZER", "default"),
    "no words": ({"ggml.pre": None}, "UNSUPPORTED_PRE_TOKENIZER", "tokenizer.ggml.pre"),
    "another kind": ({"ggml.model": "rwkv"}, "UNSUPPORTED_TOKENIZER", "rwkv"),
    "no kind": ({"ggml.model": None}, "BAD_GGUF_METADATA", "tokenizer.ggml.model"),
    "no tokens": ({"ggml.tokens": None}, "BAD_GGUF_METADATA", "tokenizer.ggml.tokens"),
    "a type too few": ({"ggml.token_type": [1, 1]}, "BAD_GGUF_METADATA", "token_type"),
    "no types": ({"ggml.token_type": None}, "BAD_GGUF_METADATA", "token_type"),
    "a token twice": ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "BAD_TOKENIZER", "twice"),
    "a merge of one": ({"ggml.merges": ["ab"]}, "BAD_GGUF_METADATA", "merges"),
    "a merge of strangers": ({"ggml.merges": ["zzz yyy"]}, "BAD_TOKENIZER", "unusable"),
    "an end that is no token": ({"ggml.eos_token_id": 1 << 20}, "BAD_GGUF_METADATA", "eos_token_id"),
    "no bos to add": ({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, "BAD_GGUF_METADATA", "bos_token_id"),
    "a template that is no text": ({"chat_template": 5}, "BAD_GGUF_METADATA", "chat_template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, byte_level: Tokenizer, tmp_path: Path) -> None:
    change, code, word = REFUSED[name]
    path = TextFile(byte_level, change=change).write(tmp_path / "text.gguf")
    with pytest.raises(QuireError) as error:
        Vocabulary(read_model_files(str(path)))
    assert error.value.code == code and word in error.value.message and error.value.fix


def test_a_score_too_few_is_refused(byte_fallback: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_fallback, model="llama", change={"ggml.scores": [0.5]}).write(tmp_path / "text.gguf")
    with pytest.raises(QuireError, match="scores"):
        read_model_files(str(path))

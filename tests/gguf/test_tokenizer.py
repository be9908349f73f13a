"""Tokenizers of GGUF files: as transformers reads the same file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from quire_common.errors import ConfigError, QuireError, Unsupported
from quire_common.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from tests.gguf.vocabularies import NORMAL, TextFile, random_texts
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


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The expressions that llama.cpp applies for a name, one after the other. transformers knows none of these names.
OF_LLAMA_CPP: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", GPT2_WORDS),
    "exaone": (r"\p{N}", GPT2_WORDS),
    "exaone4": (GPT2_WORDS,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]"),
    "glm4": (_WORDS % r"\p{N}{1,3}",),
    "chatglm-bpe": (_WORDS % r"\p{N}{1,3}",),
    "hunyuan": (_WORDS % r"\p{N}",),
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-v3": _DEEPSEEK3,
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
    "seed-coder": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


# Steps of a model's tokenizer.json, where they differ from llama.cpp's: they split words that no merge joins anyway.
OWN_STEPS: dict[str, list[Any]] = {
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
}


@pytest.mark.parametrize("pre", OF_LLAMA_CPP)
def test_words_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    """With a vocabulary that was learnt from such words, as a model's own is."""
    steps = [
        *(pre_tokenizers.Split(Regex(each), "isolated") for each in OF_LLAMA_CPP[pre]),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(OWN_STEPS.get(pre, steps))
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=folders.SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(random_texts(3000, seed=1), trainer)
    path = TextFile(tokenizer, pre=pre).write(tmp_path / "text.gguf")
    found = ids_of(path, TEXTS)
    assert found == [e.ids for e in tokenizer.encode_batch(TEXTS, add_special_tokens=False)]
    assert len({i for ids in found for i in ids}) > 300
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    assert found == [e.ids for e in tokenizer.encode_batch(TEXTS, add_special_tokens=False)]


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


def with_eos_id(path: Path, eos: int, tokenizer: Tokenizer) -> Path:
    """A GGUF file or a folder, as the path's suffix says, whose vocabulary is the same and whose eos id is `eos`."""
    if path.suffix:
        # Of normal tokens, none is known to end an answer by its text.
        types = [NORMAL] * tokenizer.get_vocab_size()
        change = {"ggml.eos_token_id": eos, "ggml.eot_token_id": None, "ggml.token_type": types}
        return TextFile(tokenizer, change=change).write(path)
    folders.write_folder(path)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (path / "config.json").unlink()
    return path


@pytest.mark.parametrize("model", ["model", "model.gguf"])
@pytest.mark.parametrize("text", ["text", "text.gguf"])
def test_name_is_the_models_and_eos_tokens_are_of_model_and_tokenizer(
    model: str, text: str, byte_level: Tokenizer, tmp_path: Path
) -> None:
    main, other = with_eos_id(tmp_path / model, 7, byte_level), with_eos_id(tmp_path / text, 8, byte_level)
    found = read_model_files(str(main), str(other))
    assert found.name == "model" and set(found.eos) == {7, 8}
    assert found.tokenizer_json == read_model_files(str(other)).tokenizer_json
    for alone, eos in ((main, 7), (other, 8)):
        assert set(read_model_files(str(alone)).eos) == {eos} == set(read_model_files("", str(alone)).eos)
    with pytest.raises(ConfigError, match="MODEL_NOT_FOUND"):
        read_model_files(str(tmp_path / "absent"), str(other))


@pytest.mark.parametrize("overridden", [[9], [9, 11]])
@pytest.mark.parametrize("text", ["", "text.gguf"])
@pytest.mark.parametrize("model", ["model", "model.gguf"])
def test_overridden_eos_tokens_replace_those_of_the_models_configuration(
    model: str, text: str, overridden: list[int], byte_level: Tokenizer, tmp_path: Path
) -> None:
    main = with_eos_id(tmp_path / model, 7, byte_level)
    if main.is_dir():
        (main / "generation_config.json").unlink()
        (main / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    other = str(with_eos_id(tmp_path / text, 8, byte_level)) if text else ""
    own = {8} if text else set()
    assert set(read_model_files(str(main), other, overrides={"vocab_size": 300}).eos) == {7} | own
    assert set(read_model_files(str(main), other, overrides={"eos_token_id": overridden}).eos) == {*overridden} | own
    assert set(read_model_files(str(main), other, overrides={"eos_token_id": None}).eos) == own
    with pytest.raises(ConfigError, match="BAD_MODEL_FILE: --hf-overrides: `eos_token_id`"):
        read_model_files(str(main), other, overrides={"eos_token_id": 1 << 40})


def test_overridden_eos_tokens_count_if_the_tokenizer_is_the_model_by_another_path(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    main, link = with_eos_id(tmp_path / "model.gguf", 7, byte_level), tmp_path / "link.gguf"
    link.symlink_to(main)
    assert read_model_files(str(main), str(link), overrides={"eos_token_id": 9}).eos == (9,)
    assert read_model_files(str(main), str(link)).name == "model"


def test_a_tokenizers_folder_beside_a_gguf_file(byte_level: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_level, pre="no such words").write(tmp_path / "model.gguf")
    folder = folders.write_folder(tmp_path / "text")
    found = read_model_files(str(path), str(folder))
    assert found.name == "model" and found.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert byte_level.token_to_id(folders.TURN_END) in found.eos


def test_folder_of_gguf_files_is_answered_with_the_name_of_one(byte_level: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_level).write(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match="TOKENIZER_MISSING") as error:
        read_model_files(str(tmp_path))
    assert "holds GGUF files" in error.value.message and str(path) in error.value.fix


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown words": ({"ggml.pre": "klingon"}, "UNSUPPORTED_PRE_TOKENIZER", "klingon"),
    "default words": ({"ggml.pre": "default"}, "UNSUPPORTED_PRE_TOKENIZER", "default"),
    "no words": ({"ggml.pre": None}, "UNSUPPORTED_PRE_TOKENIZER", "tokenizer.ggml.pre"),
    "another kind": ({"ggml.model": "rwkv"}, "UNSUPPORTED_TOKENIZER", "rwkv"),
    "no kind": ({"ggml.model": None}, "BAD_GGUF_METADATA", "tokenizer.ggml.model"),
    "no tokens": ({"ggml.tokens": None}, "BAD_GGUF_METADATA", "tokenizer.ggml.tokens"),
    "a type too few": ({"ggml.token_type": [1, 1]}, "BAD_GGUF_METADATA", "not one type for each of the 422 tokens"),
    "types that are no integers": ({"ggml.token_type": [1.0, float("nan")]}, "BAD_GGUF_METADATA", "list of integers"),
    "types that are unknown": ({"ggml.token_type": [1] * 421 + [99]}, "BAD_GGUF_METADATA", "holds 99"),
    "no types": ({"ggml.token_type": None}, "BAD_GGUF_METADATA", "token_type"),
    "a token twice": ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "BAD_TOKENIZER", "twice"),
    "a merge of one": ({"ggml.merges": ["ab"]}, "BAD_GGUF_METADATA", "'ab', which has no space between two texts"),
    "a merge of strangers": ({"ggml.merges": ["zzz yyy"]}, "BAD_TOKENIZER", "unusable"),
    "an end that is no token": ({"ggml.eos_token_id": 1 << 20}, "BAD_GGUF_METADATA", "eos_token_id"),
    "no bos to add": ({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, "BAD_GGUF_METADATA", "bos_token_id"),
    "no bos by default": (
        {"ggml.pre": "llama-bpe", "ggml.bos_token_id": None},
        "BAD_GGUF_METADATA",
        "the pre-tokenizer llama-bpe adds one to each text, and the file names none (`tokenizer.ggml.bos_token_id`)",
    ),
    "a bos to add that is no token": (
        {"ggml.add_bos_token": True, "ggml.bos_token_id": 1 << 20},
        "BAD_GGUF_METADATA",
        "bos_token_id",
    ),
    "a template that is no text": ({"chat_template": 5}, "BAD_GGUF_METADATA", "chat_template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, byte_level: Tokenizer, tmp_path: Path) -> None:
    change, code, word = REFUSED[name]
    path = TextFile(byte_level, change=change).write(tmp_path / "text.gguf")
    with pytest.raises(QuireError) as error:
        Vocabulary(read_model_files(str(path)))
    assert error.value.code == code and word in error.value.message and error.value.fix
    assert str(path) in error.value.message


def test_unusable_tokenizer_names_the_gguf_file(byte_level: Tokenizer, tmp_path: Path) -> None:
    path = TextFile(byte_level, change={"ggml.merges": ["zzz yyy"]}).write(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match="BAD_TOKENIZER") as error:
        Vocabulary(read_model_files(str(path)))
    assert f"The tokenizer of {path} is unusable" in error.value.message
    assert error.value.fix.startswith(f"Download {path} again")


@pytest.mark.parametrize("score", ["a score too few", "nan", "inf"])
def test_bad_scores_are_refused(score: str, byte_fallback: Tokenizer, tmp_path: Path) -> None:
    size = byte_fallback.get_vocab_size()
    scores = [0.5] * (size - 1) + ([] if " " in score else [float(score)])
    path = TextFile(byte_fallback, model="llama", change={"ggml.scores": scores}).write(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match=r"BAD_GGUF_METADATA.*tokenizer\.ggml\.scores"):
        read_model_files(str(path))


def test_token_of_too_many_characters_is_refused(byte_fallback: Tokenizer, tmp_path: Path) -> None:
    """Without merges the token would never be used, and nothing would show it."""
    tokens = [*TextFile(byte_fallback, model="llama").values()["ggml.tokens"]]
    tokens[-1] = "a" * 257
    path = TextFile(byte_fallback, model="llama", change={"ggml.tokens": tokens}).write(tmp_path / "text.gguf")
    with pytest.raises(Unsupported, match=r"UNSUPPORTED_TOKENIZER.*257 characters"):
        read_model_files(str(path))

"""Special tokens of GGUF files: which tokens end an answer, llama.cpp's defaults, and ids outside the vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import ConfigError
from quire_common.gguf import Metadata, read_header
from quire_common.gguf.token_ids import TokenType, eos_token_ids, special_token_id
from quire_tokenizer.config import TokenizerConfig
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.text_service import TextService
from quire_tokenizer.vocabulary import Vocabulary
from tests.gguf.raw import I32, TEXT, RawFile, pair, pairs_of
from tests.gguf.tiny import TinyModel
from tests.gguf.vocabularies import TextFile
from tests.model.folders import read_source
from tests.unit.tokenizer import folders

NO_IDS = {f"ggml.{role}_token_id": None for role in ("bos", "eos", "eot")}


def metadata(folder: Path, control: list[str], ids: dict[str, int], *, kind: str = "gpt2") -> Metadata:
    """Of a file whose tokens are six normal ones and then control tokens."""
    tokens = ["a", "b", "c", "d", "<|eot_id|>", "</s>", *control]
    types = [TokenType.NORMAL] * 6 + [TokenType.CONTROL] * len(control)
    file = RawFile(
        pairs=[
            pair("tokenizer.ggml.model", TEXT, kind),
            pairs_of("tokenizer.ggml.tokens", TEXT, tokens),
            pairs_of("tokenizer.ggml.token_type", I32, types),
            *(pair(f"tokenizer.ggml.{role}_token_id", I32, i) for role, i in ids.items()),
        ]
    )
    path = folder / "text.gguf"
    path.write_bytes(bytes(file))
    return read_header(path).metadata


@pytest.mark.parametrize(
    ("control", "ids", "wanted"),
    [
        ([], {"eos": 1, "eot": 0, "eom": 2}, (1, 0, 2)),
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], {}, (7, 8)),
        (["<|im_end|>", "<|endoftext|>"], {"eos": 7}, (7, 6)),
        (["<|eom_id|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<EOT>"], {"eot": 3}, (3, 6, 7, 8, 9)),
        (["<|end|>"], {}, (6,)),
        (["<|end|>", "<|return|>", "<|call|>"], {}, (7, 8)),
        (["<|end|>", "<|flush|>", "<|calls|>"], {}, (7, 8)),
        (["<|end|>", "<|return|>"], {}, (6, 7)),
        (["</S>", "<eos>"], {}, (7,)),
        ([], {}, ()),
    ],
)
def test_eos_tokens_are_named_by_id_or_known_by_text(
    control: list[str], ids: dict[str, int], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    """Normal tokens of these texts are the user's text, and end nothing."""
    assert eos_token_ids(metadata(tmp_path, control, ids)) == wanted


@pytest.mark.parametrize(
    ("kind", "ids", "wanted"),
    [
        ("llama", {}, {"unknown": 0, "bos": 1, "eos": 2, "eot": None, "padding": None}),
        ("llama", {"bos": 4, "eos": 5, "unknown": 3}, {"unknown": 3, "bos": 4, "eos": 5}),
        ("gpt2", {}, {"unknown": None, "bos": None, "eos": None}),
        (
            "gpt2",
            {"padding": 6, "bos": -1, "mask": 1 << 30, "seperator": 5},
            {"padding": None, "bos": None, "mask": None},
        ),
        ("llama", {"bos": 6}, {"bos": 1}),
    ],
)
def test_special_tokens_have_llama_cpps_defaults(
    kind: str, ids: dict[str, int], wanted: dict[str, int | None], tmp_path: Path
) -> None:
    found = metadata(tmp_path, [], ids, kind=kind)
    assert {role: special_token_id(found, role) for role in wanted} == wanted


@pytest.mark.parametrize("role", ["eos", "eot", "eom"])
def test_eos_id_outside_the_vocabulary_is_refused(role: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BAD_GGUF_METADATA") as error:
        eos_token_ids(metadata(tmp_path, [], {role: 6}))
    assert f"`tokenizer.ggml.{role}_token_id` is 6, not an id of the 6 tokens" in error.value.message


def test_eos_id_of_a_file_without_tokens_is_an_int32(tmp_path: Path) -> None:
    def told(eos: int) -> tuple[int, ...]:
        return eos_token_ids(Metadata({"tokenizer.ggml.eos_token_id": eos}, tmp_path / "text.gguf"))

    assert told(2**31 - 1) == (2**31 - 1,)
    with pytest.raises(ConfigError, match=r"`tokenizer\.ggml\.eos_token_id` is 2147483648, not from 0 to 2147483647"):
        told(2**31)


def test_required_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bos_token_id"):
        special_token_id(metadata(tmp_path, [], {"bos": 6}), "bos", required=True)


def served(folder: Path, change: dict[str, Any]) -> Path:
    tokenizer = folders.byte_level()
    file = TextFile(tokenizer, change=change)
    return TinyModel(vocab=tokenizer.get_vocab_size(), text=file).write(folder / "tiny.gguf")


def worker_eos_ids(path: Path) -> tuple[int, ...]:
    config = read_source(path).config
    return config.token_ids("eos_token_id")


@pytest.mark.parametrize("change", [{}, NO_IDS, {"ggml.eot_token_id": None, "ggml.padding_token_id": 2**32 - 1}])
def test_worker_and_tokenizer_agree_on_eos_tokens(change: dict[str, Any], tmp_path: Path) -> None:
    path = served(tmp_path, change)
    vocabulary = Vocabulary(read_model_files(str(path)))
    token = vocabulary.tokenizer.token_to_id
    assert vocabulary.eos_ids == {token(folders.EOS), token(folders.TURN_END)} == set(worker_eos_ids(path))
    assert "pad_token" not in vocabulary.token_variables


def test_worker_and_tokenizer_refuse_an_eos_id_outside_the_vocabulary(tmp_path: Path) -> None:
    path = served(tmp_path, {"ggml.eot_token_id": 1 << 20})
    for read in (worker_eos_ids, lambda path: read_model_files(str(path))):
        with pytest.raises(ConfigError, match="eot_token_id"):
            read(path)


async def test_model_without_eos_token_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    types = [TokenType.NORMAL] * folders.byte_level().get_vocab_size()
    path = served(tmp_path, NO_IDS | {"ggml.token_type": [int(kind) for kind in types]})
    with caplog.at_level(logging.WARNING):
        assert worker_eos_ids(path) == ()
        assert caplog.text.count("names no eos token") == 1
        service = TextService(TokenizerConfig(model=str(path)))
        await service.load()
        assert service.tools.vocabulary.eos_ids == set() and caplog.text.count("names no eos token") == 2
        await service.close()

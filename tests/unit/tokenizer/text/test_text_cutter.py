"""Long texts are encoded in pieces, which have the tokens of the whole, take little memory, and let others between."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_common.errors import InvalidArgument, TooLarge
from quire_tokenizer import encoder as encoder_module
from quire_tokenizer import text_cutter
from quire_tokenizer.encoder import Encoder
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.text_cutter import PIECE_CHARS, pieces
from quire_tokenizer.vocabulary import Vocabulary
from quire_tokenizer.work_pool import WorkPool
from tests.tiers import deep_after

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
PARTS = (
    " ", "  ", "\n", "\r\n", " \n\n ", "\t", "word", "Word", "x",
    "1", "2024", "3.14", ",", ".", "...", "'s", "'ve", "it's",
    "don't", "I'll", "e\u0301", "\u0301", "é", "a.b", "/", "+", "=",
    "==", "\"", "(", ")", "你好", "，", "。", "ひ", "が", "カ",
    "한국", "\u1112\u1161", "Привет", "й", "й", "😀", "👩‍👩‍👧",
    "क़", "\u0958", "²", "Ⅷ", "_", "-", "<|im_end|>", "<think>",
    "</think>", "<|end_of_text|>", "\u00a0", "\u2028", "\ufb01", "ſ",
    "'S", "'REturn", ";", ":", "!?", "#include", "\x00",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Vocabulary:
    return Vocabulary(read_model_folder(str(DEMO), "", ""))


@pytest.fixture
def pool() -> Iterator[WorkPool]:
    made = WorkPool(1, 64)
    yield made
    made.close()


def mixed(rng: random.Random, parts: int) -> str:
    return "".join(rng.choices(PARTS, k=parts))


@pytest.mark.parametrize("seed", range(30))
def test_the_tokens_of_pieces_are_those_of_the_whole(
    demo: Vocabulary, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert demo.may_cut
    rng = random.Random(seed)
    monkeypatch.setattr(text_cutter, "PIECE_CHARS", rng.randint(1, 30))
    text = mixed(rng, 600)
    cuts = list(pieces(text))
    assert len(cuts) > 20
    assert "".join(text[start:end] for start, end in cuts) == text

    def guarded(part: str) -> list[int]:
        return list(demo.guarded.encode_batch([part], add_special_tokens=False)[0].tolist())

    def plain(part: str) -> list[int]:
        return list(demo.tokenizer.encode(part, add_special_tokens=False).ids)

    for ids in (guarded, plain):
        assert [i for start, end in cuts for i in ids(text[start:end])] == ids(text)


@pytest.mark.parametrize("piece_chars", deep_after(1, [PIECE_CHARS // 4, PIECE_CHARS]))
async def test_a_long_text_and_a_long_conversation_are_encoded_as_they_were(
    demo: Vocabulary, pool: WorkPool, monkeypatch: pytest.MonkeyPatch, piece_chars: int
) -> None:
    cuts = list[int]()

    def counted(whole: str) -> list[tuple[int, int]]:
        found = list(pieces(whole))
        cuts.append(len(found))
        return found

    for module in (text_cutter, encoder_module):  # the encoder has a copy of the number
        monkeypatch.setattr(module, "PIECE_CHARS", piece_chars)
    monkeypatch.setattr(encoder_module, "pieces", counted)
    rng = random.Random(7)
    encoder = Encoder(demo, pool, max_texts=8, max_text_bytes=16 << 20)
    text = mixed(rng, piece_chars * 90 // 64)
    assert len(text) > 3 * piece_chars
    for add in (False, True):
        for allow in (False, True):
            tokenizer = demo.tokenizer if allow else None
            found = await encoder.encode(
                ["short", text, "x"], add_special_tokens=add, allow_special_tokens=allow, max_tokens=0
            )
            for one, ids in zip(["short", text, "x"], found, strict=True):
                whole = (
                    tokenizer.encode(one, add_special_tokens=add).ids
                    if tokenizer is not None
                    else demo.guarded.encode_batch([one], add_special_tokens=add)[0].tolist()
                )
                assert ids.tolist() == whole
    spans = [match.span() for match in re.finditer(r"<\|end_of_text\|>", text)]
    marked = await encoder.encode_marked(text, spans[::2], max_tokens=0)
    assert marked.tolist() == demo.guarded.encode_marked(text, spans[::2]).tolist()
    count = len(marked)
    assert len(await encoder.encode_marked(text, spans[::2], max_tokens=count)) == count
    with pytest.raises(InvalidArgument, match="PROMPT_TOO_LONG"):
        await encoder.encode_marked(text, spans[::2], max_tokens=count - 1)
    assert len(cuts) >= 6 and min(cuts) > 2, "each long text was cut"


async def test_no_text_is_encoded_in_more_than_a_piece_and_others_go_between(
    demo: Vocabulary, pool: WorkPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 4 MiB took one of two threads for seconds, and 600 MiB of memory that stayed."""
    sizes: list[int] = []
    whole = demo.guarded.encode_batch

    def watched(texts: list[str], *, add_special_tokens: bool) -> list[object]:
        sizes.append(sum(map(len, texts)))
        return list(whole(texts, add_special_tokens=add_special_tokens))

    monkeypatch.setattr(demo.guarded, "encode_batch", watched)
    encoder = Encoder(demo, pool, max_texts=1024, max_text_bytes=16 << 20)

    async def encode(*texts: str) -> None:
        await encoder.encode(texts, add_special_tokens=True, allow_special_tokens=False, max_tokens=0)

    long = asyncio.ensure_future(encode("some words, " * 60_000))
    await asyncio.sleep(0)
    await encode("others " * 1_000)
    assert not long.done()
    await long
    await encode(*["a text of many " * 256] * 500)
    assert max(sizes) <= PIECE_CHARS + 16


async def test_a_text_without_words_is_refused_by_name(demo: Vocabulary, pool: WorkPool) -> None:
    encoder = Encoder(demo, pool, max_texts=8, max_text_bytes=16 << 20)
    with pytest.raises(TooLarge, match="TEXT_TOO_LARGE"):
        await encoder.encode(["x" * 600_000], add_special_tokens=True, allow_special_tokens=False, max_tokens=0)


@pytest.mark.parametrize("change", ["lstrip", "single_word", "cut inside"])
def test_added_tokens_that_reach_over_a_cut_forbid_cutting(demo: Vocabulary, change: str) -> None:
    from tokenizers import AddedToken

    token = {
        "lstrip": AddedToken("<x>", lstrip=True),
        "single_word": AddedToken("<x>", single_word=True),
        "cut inside": AddedToken("<end. of>"),
    }[change]
    steps = [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]
    assert text_cutter.may_cut(steps, [{"type": "NFC"}], [AddedToken("<|im_end|>")])
    assert not text_cutter.may_cut(steps, [], [token])
    assert not text_cutter.may_cut(steps, [{"type": "NFKC"}], [])
    assert not text_cutter.may_cut([{"type": "Metaspace"}], [], [])

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from quire_common.errors import InvalidArgument, Overloaded, TooLarge
from quire_tokenizer.encoder import Encoder
from quire_tokenizer.vocabulary import Vocabulary
from quire_tokenizer.work_pool import WorkPool


@pytest.fixture
def pool() -> Iterator[WorkPool]:
    made = WorkPool(2, 8)
    yield made
    made.close()


@pytest.fixture
def encoder(vocabulary: Vocabulary, pool: WorkPool) -> Encoder:
    return Encoder(vocabulary, pool, max_texts=4, max_text_bytes=1 << 20)


async def encode(
    encoder: Encoder, *texts: str, add: bool = False, allow: bool = False, max_tokens: int = 0
) -> list[list[int]]:
    ids = await encoder.encode(texts, add_special_tokens=add, allow_special_tokens=allow, max_tokens=max_tokens)
    assert all(column.dtype == np.int32 for column in ids)
    return [column.tolist() for column in ids]


async def test_a_batch(encoder: Encoder, vocabulary: Vocabulary) -> None:
    texts = ["hello world", "", "你好 😀"]
    assert await encode(encoder, *texts) == [
        vocabulary.tokenizer.encode(t, add_special_tokens=False).ids for t in texts
    ]
    assert [ids[0] for ids in await encode(encoder, *texts, add=True)] == [1, 1, 1]


async def test_special_tokens_are_text_unless_allowed(encoder: Encoder) -> None:
    assert 4 not in (await encode(encoder, "a<|im_end|>b"))[0]
    assert 4 in (await encode(encoder, "a<|im_end|>b", allow=True))[0]


async def test_long_texts_give_the_same_off_the_loop(encoder: Encoder, vocabulary: Vocabulary) -> None:
    text = "The quick brown fox 你好 jumps. " * 1000
    assert await encode(encoder, text) == [vocabulary.tokenizer.encode(text, add_special_tokens=False).ids]


async def test_exactly_as_many_as_fit(encoder: Encoder) -> None:
    count = len((await encode(encoder, "hello world, the dog"))[0])
    assert len((await encode(encoder, "hello world, the dog", max_tokens=count))[0]) == count
    with pytest.raises(InvalidArgument, match="PROMPT_TOO_LONG") as caught:
        await encode(encoder, "hello world, the dog", max_tokens=count - 1)
    assert f"{count} tokens" in caught.value.message


@pytest.mark.parametrize("text", ["x" * 900_000, "word and word " * 60_000, "汉" * 300_000])
async def test_an_absurd_text_is_refused_without_encoding_it(
    encoder: Encoder, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    asked: list[int] = []
    whole = vocabulary.guarded.encode_batch

    def watched(texts: list[str], *, add_special_tokens: bool) -> list[object]:
        asked.extend(map(len, texts))
        return list(whole(texts, add_special_tokens=add_special_tokens))

    monkeypatch.setattr(vocabulary.guarded, "encode_batch", watched)
    with pytest.raises(InvalidArgument, match="PROMPT_TOO_LONG"):
        await encode(encoder, text, max_tokens=256)
    assert sum(asked) < len(text) / 10


async def test_a_long_text_that_fits_is_not_refused_by_its_beginning(encoder: Encoder) -> None:
    """Dense at first, then nothing but words that are one token each."""
    text = "1 2 3 4 " * 50 + " hello" * 3000
    count = len((await encode(encoder, text))[0])
    assert len((await encode(encoder, text, max_tokens=count))[0]) == count


async def test_bounds(encoder: Encoder) -> None:
    with pytest.raises(TooLarge, match="TOO_MANY_TEXTS"):
        await encode(encoder, *["x"] * 5)
    with pytest.raises(TooLarge, match="TEXT_TOO_LARGE"):
        await encode(encoder, "x" * (1 << 19), "é" * (1 << 19))


async def test_half_a_surrogate_pair(encoder: Encoder) -> None:
    with pytest.raises(InvalidArgument, match="INVALID_UNICODE"):
        await encode(encoder, "a\ud83d")


async def test_the_queue_is_bounded_and_frees_itself(pool: WorkPool) -> None:
    may_end = threading.Event()

    def slow() -> int:
        assert may_end.wait(60)
        return 1

    running = [asyncio.ensure_future(pool.run(slow)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="TOKENIZER_OVERLOADED"):
        await pool.run(slow)
    running[0].cancel()  # the thread stays busy, and the place taken
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="TOKENIZER_OVERLOADED"):
        await pool.run(slow)
    may_end.set()
    assert await asyncio.gather(*running[1:]) == [1] * 7
    assert await pool.run(slow) == 1

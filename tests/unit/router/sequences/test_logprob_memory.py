"""The logprobs of an answer take little memory while the answer runs and while it is written."""

from __future__ import annotations

import tracemalloc
from array import array

import orjson

from quire_router.front.http.formats.large_json import dumps_in_pieces
from quire_router.front.http.formats.logprob_format import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from quire_router.sequences.delta import Delta, LogprobEntry

TOKENS, TOPS = 2_000, 20


class Names:
    """Bytes of tokens."""

    def get(self, token_id: int) -> bytes:
        return b" token-%d" % token_id


def entries() -> list[LogprobEntry]:
    return [
        LogprobEntry(t, -0.5, 1, array("i", range(t, t + TOPS)), array("f", [-float(i) for i in range(TOPS)]))
        for t in range(TOKENS)
    ]


def test_written_logprobs_equal_their_entries() -> None:
    names = TokenNames(Names(), by_id=False)  # type: ignore[arg-type]  # all that is asked of it
    few = entries()[:3]
    told = orjson.loads(orjson.dumps(chat_logprobs(few, names)))["content"]
    assert [token["token"] for token in told] == [" token-0", " token-1", " token-2"]
    assert told[1]["top_logprobs"][2] == {"token": " token-3", "logprob": -2.0, "bytes": list(b" token-3")}
    delta = Delta(0, "", 3, b"", few, [1, 2, 3], 0, None)
    lists = orjson.loads(orjson.dumps(completion_logprobs(delta, names, 0)))
    assert lists["top_logprobs"][0][" token-1"] == -1.0
    prompt = orjson.loads(orjson.dumps(prompt_logprobs([None, few[0]], 2, Names())))  # type: ignore[arg-type]  # as above
    assert prompt[0] is None
    assert prompt[1]["0"] == {"logprob": -0.5, "rank": 1, "decoded_token": " token-0"}


def test_alternatives_take_little_more_memory_than_their_text() -> None:
    names = TokenNames(Names(), by_id=False)  # type: ignore[arg-type]  # all that is asked of it
    tracemalloc.start()
    kept = entries()
    of_entries, _ = tracemalloc.get_traced_memory()
    text = dumps_in_pieces(chat_logprobs(kept, names))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert of_entries < 25 * TOKENS * (1 + TOPS), "an alternative is 8 bytes, and a share of its token"
    assert most - of_entries < 5 * len(text), f"{(most - of_entries) / len(text):.1f} times the text"

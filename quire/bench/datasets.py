"""Data sets of requests: random prompts, a trace of a real service, or a file. Only the trace has arrival times.

Prompts of random data and of the trace are token ids, so that their length is exact and no tokenizer is needed. For a
chat they are words, and their length is only approximate; the report has the counted tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidArgument, NotFound

# Of Mooncake's traces: one hash id stands for so many tokens.
TRACE_BLOCK = 512
_WORDS = ("time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child", "place")


@dataclass(frozen=True)
class BenchRequest:
    """One request. `arrival_s` is seconds after the start, if the data set has arrival times."""

    prompt: str | Sequence[int]
    output_len: int
    arrival_s: float | None = None


@dataclass(frozen=True)
class RandomLengths:
    """Random lengths, uniform from `mean * (1 - ratio)` to `mean * (1 + ratio)`, as in vLLM; at least 1. `prefix_len`
    tokens, which all prompts share, are added to the input."""

    input_len: int = 1024
    output_len: int = 128
    ratio: float = 0.0
    prefix_len: int = 0


def random_requests(
    count: int, lengths: RandomLengths, vocabulary: int, seed: int, *, words: bool = False
) -> list[BenchRequest]:
    """Return `count` requests with random lengths, as `lengths` says, of random token ids below `vocabulary`, or of
    words. The same seed gives the same requests. The first `prefix_len` tokens are the same in all prompts, and are
    added to the random length."""
    numbers = random.Random(seed)
    prefix = _tokens(numbers, lengths.prefix_len, vocabulary)
    requests = []
    for _ in range(count):
        input_len, output_len = (
            numbers.randint(max(1, int(mean * (1 - lengths.ratio))), max(1, int(mean * (1 + lengths.ratio))))
            for mean in (lengths.input_len, lengths.output_len)
        )
        ids = [*prefix, *_tokens(numbers, input_len, vocabulary)]
        requests.append(BenchRequest(_as_words(ids) if words else ids, output_len))
    return requests


def trace_requests(
    path: str,
    count: int,
    vocabulary: int,
    *,
    words: bool = False,
    speed: float = 1.0,
    most_input: int = 0,
    most_output: int = 0,
) -> list[BenchRequest]:
    """Return one request for each of the first `count` lines, or fewer if there are fewer, of a Mooncake trace
    (timestamp in ms, input_length, output_length, hash_ids). Equal hash ids give equal blocks of 512 tokens; the prompt
    is the blocks, cut to its length, or shorter if they are. Lengths below 1 count as 1. Arrival times are seconds
    since that of the first line; `speed` 2 replays twice as fast. `most_input` and `most_output` limit lengths (0: no
    limit), for models with a shorter context. `words`: prompts are words, not token ids. Raises InvalidArgument for a
    malformed line, and NotFound if the file cannot be read."""
    requests: list[BenchRequest] = []
    first_ms = None
    for number, line in _lines(path):
        if len(requests) == count:
            break
        try:
            at_ms, length, output = float(line["timestamp"]), int(line["input_length"]), int(line["output_length"])
            blocks = [_block(int(block), vocabulary) for block in line["hash_ids"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _bad_line(path, number, "timestamp, input_length, output_length and hash_ids") from error
        first_ms = at_ms if first_ms is None else first_ms
        length = min(length, most_input) if most_input else length
        ids = [token for block in blocks for token in block][: max(1, length)]
        output = max(1, min(output, most_output) if most_output else output)
        requests.append(BenchRequest(_as_words(ids) if words else ids, output, (at_ms - first_ms) / 1000 / speed))
    return requests


def custom_requests(path: str, count: int, output_len: int) -> list[BenchRequest]:
    """Return `count` requests from JSON lines with `prompt` (text or token ids) and optionally `output_tokens`
    (default: `output_len`). The lines are repeated until there are enough. Raises InvalidArgument for a malformed line
    or an empty file, and NotFound if the file cannot be read. The whole file is read and checked, also the lines beyond
    `count`. The elements of a list are not checked."""
    found = []
    for number, line in _lines(path):
        prompt = line.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise _bad_line(path, number, "prompt")
        tokens = line.get("output_tokens", output_len)
        if not isinstance(tokens, int) or tokens < 1:
            raise _bad_line(path, number, "output_tokens of at least 1")
        found.append(BenchRequest(prompt, tokens))
    if not found:
        raise InvalidArgument("EMPTY_DATASET", f"{path} has no requests.", "Give one JSON object per line.")
    return [found[i % len(found)] for i in range(count)]


def _lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each JSON line; blank lines are skipped. Raises NotFound if the file cannot be
    read or is not UTF-8, and InvalidArgument for a line that is not a JSON object."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise _bad_line(path, number, "an object") from error
                if not isinstance(value, dict):
                    raise _bad_line(path, number, "an object")
                yield number, value
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound("DATASET", f"Cannot read {path}.", "Give a file of JSON lines with --dataset-path.") from error


def _bad_line(path: str, number: int, wanted: str) -> InvalidArgument:
    return InvalidArgument("BAD_DATASET", f"Line {number} of {path} lacks {wanted}.", "See `quire bench serve --help`.")


def _tokens(numbers: random.Random, count: int, vocabulary: int) -> list[int]:
    return [numbers.randrange(vocabulary) for _ in range(count)]


def _block(hash_id: int, vocabulary: int) -> list[int]:
    return _tokens(random.Random(hash_id), TRACE_BLOCK, vocabulary)


def _as_words(ids: Sequence[int]) -> str:
    return " ".join(_WORDS[token % len(_WORDS)] for token in ids)

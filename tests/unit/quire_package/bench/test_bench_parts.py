"""The load generator's parts: answers taken apart at any split, arrivals, data sets, vLLM's arithmetic."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.__main__ import main
from quire.bench.datasets import RandomLengths, custom_requests, random_requests, trace_requests
from quire.bench.load import arrivals
from quire.bench.outcome import Outcome
from quire.bench.plot import serving_charts
from quire.bench.server_facts import vocabulary_of
from quire.bench.serving_report import ReportOptions, make_report, render_report
from quire.bench.statistics import percentile, summary
from quire.bench.stream_connection import StreamConnection
from quire.cli.benches.engine import model_of
from quire.cli.benches.results import finish
from quire.client import Client
from quire.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from quire.llm import LLM


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        return

    def close(self) -> None:
        self.closed = True


def answer(*events: str, chunk: int = 1, head: str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked") -> bytes:
    """Events as a server sends them, so many in one chunk."""
    body = b""
    frames = [f"data: {event}\n\n".encode() for event in events]
    for first in range(0, len(frames), chunk):
        part = b"".join(frames[first : first + chunk])
        body += b"%x\r\n%s\r\n" % (len(part), part)
    return f"{head}\r\n\r\n".encode() + body + b"0\r\n\r\n"


def token(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
WHOLE = answer(token("é"), token('"choices":[{'), token("c"), USAGE, "[DONE]")


async def receive(
    *pieces: bytes, keep: bool = False, lost: bool = False, error: Exception | None = None
) -> tuple[Outcome, StreamConnection, Wire]:
    connection, wire, outcome = StreamConnection(keep_events=keep), Wire(), Outcome()
    connection.connection_made(wire)
    done = connection.send(b"", outcome)
    for piece in pieces:
        connection.data_received(piece)
    if lost:
        connection.connection_lost(error)
    await asyncio.wait_for(done, 60)
    return outcome, connection, wire


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_an_answer_is_the_same_at_every_split(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(WHOLE)]
    pieces = [WHOLE[a:b] for a, b in itertools.pairwise(places)]
    outcome, connection, _ = asyncio.run(receive(*pieces, keep=True))
    assert (outcome.error, outcome.frames, outcome.prompt_tokens, outcome.output_tokens) == ("", 3, 7, 5)
    assert len(outcome.gaps_s) == 2 and connection.reusable and len(outcome.events) == 4
    assert outcome.sent_s <= outcome.first_s <= outcome.last_s


async def test_several_events_in_a_chunk_and_a_chat_opening() -> None:
    opening = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, separators=(",", ":"))
    said = json.dumps({"choices": [{"delta": {"content": "a"}}]}, separators=(",", ":"))
    outcome, _, _ = await receive(answer(opening, said, said, "[DONE]", chunk=9))
    assert outcome.frames == 2 and outcome.output_tokens == 2 and not outcome.error


async def test_tokens_of_an_event_are_counted_where_it_tells_them() -> None:
    told = [
        '{"choices":[{"index":0,"text":"\\"token_ids\\":[7]","token_ids":[5],"prompt_token_ids":[1,2,3]}]}',
        '{"choices":[{"index":0,"text":"b","token_ids":[6,7,8]}],"usage":null}',
        '{"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]}',
    ]
    outcome, _, _ = await receive(answer(*told, "[DONE]", chunk=2))
    assert outcome.told_tokens == outcome.event_tokens == [1, 3, 0] and outcome.output_tokens == 4
    outcome, _, _ = await receive(WHOLE)
    assert outcome.told_tokens == [] and outcome.event_tokens is None, "three events, five tokens"


async def test_what_goes_wrong_is_said() -> None:
    refused = b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 9\r\nConnection: close\r\n\r\n{"a": 12}'
    outcome, connection, _ = await receive(refused)
    assert outcome.error == 'HTTP 429: {"a": 12}' and not connection.reusable
    outcome, _, _ = await receive(WHOLE[:100], lost=True)
    assert outcome.error.startswith("connection lost")
    outcome, _, _ = await receive(answer(token("a"), '{"error": {"code": "X"}}', "[DONE]"))
    assert "X" in outcome.error
    outcome, _, _ = await receive(answer("[DONE]"))
    assert outcome.error == "the answer has no token"
    outcome, _, wire = await receive(b"SSH-2.0-x nonsense\r\n\r\n", lost=True)
    assert outcome.error.startswith("not HTTP") and wire.closed


@pytest.mark.parametrize("head", [b"transfer-encoding: chunked\r\n\r\n-6\r\n", b"content-length: -1\r\n\r\n"])
async def test_negative_length_is_not_http(head: bytes) -> None:
    outcome, _, wire = await receive(b"HTTP/1.1 200 OK\r\n" + head, lost=True)
    assert outcome.error.startswith("not HTTP: a length of -") and wire.closed


@pytest.mark.parametrize(
    "event",
    [
        '{"choices":[],"usage":{"total":1}}',
        '{"choices":[],"usage":{"prompt_tokens":1}}',
        '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":null}}',
        '{"choices":[],"usage":{"prompt_tokens":"1","completion_tokens":2}}',
        '{"choices":[{"usage":{"prompt_tokens":1,"completion_tokens":2}}]}',
        '[{"usage":{"prompt_tokens":1,"completion_tokens":2}}]',
        '{"usage":{"prompt_tokens":',
        '{"usage":{"prompt_tokens":' + "[" * 100_000,
    ],
)
async def test_a_usage_without_its_counts_fails_its_request(event: str) -> None:
    outcome, connection, wire = await receive(answer(token("a"), event, "[DONE]"), lost=True)
    assert "usage has no prompt_tokens and completion_tokens" in outcome.error and '"usage":{' in outcome.error
    assert wire.closed and not connection.reusable


async def test_a_body_that_ends_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    sent = head + f"data: {token('a')}\r\n\r\n".encode()
    outcome, connection, _ = await receive(sent, lost=True)
    assert outcome.frames == 1 and not outcome.error and not connection.reusable
    outcome, connection, _ = await receive(sent, lost=True, error=ConnectionResetError("reset by peer"))
    assert outcome.error == "connection lost: reset by peer" and not connection.reusable
    sent = b"HTTP/1.1 413 Too Large\r\n\r\nless"
    outcome, _, _ = await receive(sent, lost=True, error=ConnectionResetError("reset by peer"))
    assert outcome.error == "HTTP 413: less", "the server's own reason"


def test_arrivals_keep_their_rate() -> None:
    assert arrivals(3, float("inf"), 1, 0) == [0, 0, 0]
    for burstiness in (0.25, 1.0, 20.0):
        times = arrivals(4000, 50, burstiness, 1)
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        assert times[-1] == pytest.approx(80) and times == sorted(times)
        assert statistics.stdev(gaps) * 50 == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(4, 2, float("inf"), 0) == [0.5, 1.0, 1.5, 2.0]
    assert arrivals(4, 2, 1e-6, 0) == [2.0, 2.0, 2.0, 2.0]
    assert arrivals(5, 1, 1, 2) == arrivals(5, 1, 1, 2) != arrivals(5, 1, 1, 3)


def test_random_requests() -> None:
    lengths = RandomLengths(100, 10, 0.5, prefix_len=4)
    requests = random_requests(200, lengths, 50, 0)
    assert requests == random_requests(200, lengths, 50, 0)
    assert len({tuple(r.prompt[:4]) for r in requests}) == 1
    assert {len(r.prompt) for r in requests} <= set(range(54, 155)) and {r.output_len for r in requests} == set(
        range(5, 16)
    )
    assert all(isinstance(t, int) and 0 <= t < 50 for r in requests for t in r.prompt)
    assert isinstance(random_requests(1, lengths, 50, 0, words=True)[0].prompt, str)


def test_a_trace_repeats_what_its_hashes_repeat(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 1024, "output_length": 4, "hash_ids": [1, 3]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = trace_requests(str(file), 9, 1000, speed=2)
    assert (first.arrival_s, second.arrival_s) == (0, 1) and (len(first.prompt), len(second.prompt)) == (600, 1024)
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:600]
    (cut,) = trace_requests(str(file), 1, 1000, most_input=10, most_output=3)
    assert len(cut.prompt) == 10 and cut.output_len == 3
    file.write_text('{"timestamp": 1}')
    with pytest.raises(InvalidArgument, match="Line 1"):
        trace_requests(str(file), 1, 1000)
    file.write_text('{"timestamp": 0, "input_length": [], "output_length": 1, "hash_ids": [1]}')
    with pytest.raises(InvalidArgument, match="Line 1"):
        trace_requests(str(file), 1, 1000)
    with pytest.raises(NotFound):
        trace_requests(str(tmp_path / "absent"), 1, 1000)


def test_custom_requests_repeat(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_tokens": 3}\n')
    found = custom_requests(str(file), 3, 8)
    assert [(r.prompt, r.output_len) for r in found] == [("a", 8), ([1, 2], 3), ("a", 8)]


@pytest.mark.parametrize("tokens", ['"7"', "0", "null", "1.5", "[]"])
def test_custom_requests_with_a_wrong_number_of_tokens_are_refused(tmp_path: Path, tokens: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "output_tokens": {tokens}}}\n')
    with pytest.raises(InvalidArgument, match=r"Line 2 .* output_tokens"):
        custom_requests(str(file), 3, 8)


@pytest.mark.parametrize(
    "config",
    ["[]", "null", "{}", '{"vocab_size": "many"}', '{"vocab_size": Infinity}', '{"text_config": null}', "{"],
)
def test_a_config_without_vocab_size_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidArgument, match="vocab_size"):
        vocabulary_of(str(tmp_path))


def done(index: int, sent: float, first: float, gaps: list[float], tokens: int) -> Outcome:
    return Outcome(index, sent, first, first + sum(gaps), len(gaps) + 1, gaps, 10, tokens)


def test_the_report_has_vllms_arithmetic() -> None:
    outcomes = [
        done(0, 10.0, 10.1, [0.01] * 10, 11),
        done(1, 10.0, 10.3, [0.02] * 10, 11),
        done(2, 11.0, 11.5, [], 1),
        Outcome(3, 10.0, error="HTTP 500: no"),
    ]
    options = ReportOptions(("ttft", "e2el"), (50, 90), {"ttft": 200, "tpot": 100}, detailed=True)
    report = make_report(outcomes, 10.0, options)
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (3, 1, 23)
    assert report["duration"] == pytest.approx(1.5) and report["output_throughput"] == pytest.approx(23 / 1.5)
    assert report["request_goodput"] == pytest.approx(1 / 1.5)
    assert report["mean_ttft_ms"] == pytest.approx(300) and report["p90_ttft_ms"] == pytest.approx(460)
    assert report["median_tpot_ms"] == pytest.approx(15) and report["std_tpot_ms"] == pytest.approx(5)
    assert report["max_concurrent_requests"] == 2 and report["max_output_tokens_per_s"] == pytest.approx(22)
    assert report["failures"] == {"HTTP 500: no": 1} and len(report["itls"]) == 4
    table = render_report(report, options)
    assert "P90 TTFT (ms):" in table and "Mean E2EL (ms):" in table and "1 failed: HTTP 500" in table
    assert "TPOT" not in table
    chart = serving_charts(outcomes, 10.0, "a < b")
    assert chart.startswith("<svg") and "a &lt; b" in chart and chart.count("<polyline") == 4
    assert "<polyline" in serving_charts([], 0.0, "nothing")


def test_statistics_are_numpys() -> None:
    values = sorted([5.0, 1.0, 2.0, 9.0])
    assert [percentile(values, p) for p in (0, 25, 50, 100)] == [1, 1.75, 3.5, 9]
    assert summary(values, [99])["p99"] == pytest.approx(8.88) and summary(values, [])["std"] == pytest.approx(
        3.112, abs=1e-3
    )
    assert set(summary([], [99]).values()) == {0.0}


def test_benchmark_of_a_router_that_lists_no_model_ends_with_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "models", lambda client: [])
    llm = cast(LLM, SimpleNamespace(address="127.0.0.1:1"))
    with pytest.raises(Unavailable, match="The router lists no model"):
        model_of(llm, argparse.Namespace(api_key=None))


@pytest.mark.parametrize("text", ["[1]", "1", "{"])
def test_extra_body_that_is_no_object_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", "http://127.0.0.1:1", "--model", "m", "--ready-check-timeout-sec", "0"]
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", *flags, "--extra-body", text])
    assert "--extra-body" in capsys.readouterr().err


def test_result_is_printed_though_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FailedPrecondition, match="RESULT_FILE"):
        finish(argparse.Namespace(output_json=str(tmp_path)), {"tokens_per_second": 7})
    assert json.loads(capsys.readouterr().out) == {"tokens_per_second": 7}
    assert finish(argparse.Namespace(output_json=str(tmp_path / "new" / "file")), {"a": 1}) == 0
    assert json.loads((tmp_path / "new" / "file").read_text()) == {"a": 1}

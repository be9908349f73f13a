"""`quire run-batch` against a router: answers by custom_id, refusals in the file, and a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.__main__ import main
from quire.batch import runner
from quire.batch.batch_file import BatchFile, BatchRequest
from quire.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.fakes.router.router_rig import RouterRig, router_rig

ROOT = Path(__file__).resolve().parents[3]

MESSAGE = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


def line(custom_id: str, prompt: str = "ab", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"model": "fake", "prompt": prompt, "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in path.read_text().splitlines()]


async def batch(rig: RouterRig, tmp_path: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "quire", "run-batch", "--base-url", f"http://{rig.router.http.address}/v1"]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    process = await asyncio.create_subprocess_exec(
        *command, *files, *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, out.decode()


async def test_every_line_is_answered_and_a_second_run_asks_what_failed_alone(tmp_path: Path) -> None:
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions"}
    chat["body"] = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}  # type: ignore[assignment]  # a line is any JSON
    write(tmp_path / "in.jsonl", *(line(f"c{i}") for i in range(20)), line("bad", temperature=-1), chat)
    async with router_rig() as rig:
        code, out = await batch(rig, tmp_path, "--max-concurrency", "7")
        assert code == 1 and "21 answered, 1 failed" in out
        answers = read(tmp_path / "out.jsonl")
        assert [answer["custom_id"] for answer in answers] == [*(f"c{i}" for i in range(20)), "bad", "chat"]
        assert answers[0]["response"]["body"]["choices"][0]["text"] == "aba" and answers[0]["error"] is None
        assert answers[20]["response"]["status_code"] == 400 and answers[20]["response"]["body"] is None
        assert answers[20]["error"]["error"]["param"] == "temperature"
        assert len(rig.scheduler.submits) == 21
        write(tmp_path / "in.jsonl", *(line(f"c{i}") for i in range(22)), line("bad"))
        code, out = await batch(rig, tmp_path)
        assert code == 0 and "23 requests, 20 of them answered" in out and len(rig.scheduler.submits) == 24
        assert [answer["custom_id"] for answer in read(tmp_path / "out.jsonl")][-1] == "bad"
        code, out = await batch(rig, tmp_path, "--restart")
        assert code == 0 and len(rig.scheduler.submits) == 47


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (line("a"), 503),
        ({**line("a", url="/v1/messages"), "body": MESSAGE}, 529),
    ],
    ids=["openai", "anthropic"],
)
async def test_what_may_be_retried_is(tmp_path: Path, given: dict[str, Any], status: int) -> None:
    write(tmp_path / "in.jsonl", given)
    async with router_rig() as rig:
        rig.router.admission.pause()
        running = asyncio.ensure_future(batch(rig, tmp_path))
        await asyncio.sleep(1.5)
        rig.router.admission.resume()
        code, out = await running
        assert code == 0, out
        rig.router.admission.pause()
        code, out = await batch(rig, tmp_path, "--restart", "--retries", "0")
        assert code == 1 and read(tmp_path / "out.jsonl")[0]["response"]["status_code"] == status


async def test_answer_that_is_not_json_has_failed(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("stream", stream=True))
    async with router_rig() as rig:
        code, out = await batch(rig, tmp_path)
        assert code == 1 and "1 answered, 1 failed" in out
        stream = read(tmp_path / "out.jsonl")[1]
        assert stream["error"]["code"] == "NOT_JSON" and stream["response"]["body"] is None
        assert stream["error"]["message"].startswith("data: ")
        code, out = await batch(rig, tmp_path)
        assert code == 1 and "2 requests, 1 of them answered" in out


def test_a_line_that_was_cut_is_asked_again(tmp_path: Path) -> None:
    given, out = tmp_path / "in", tmp_path / "out"
    write(given, line("a"), line("b"))
    good = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    out.write_text(json.dumps(good) + '\n{"custom_id": "b", "respo')
    files = BatchFile(str(given), str(out))
    assert [request.custom_id for request in files.todo()] == ["b"] and read(out) == [good]


def test_separators_within_texts_end_no_line(tmp_path: Path) -> None:
    given, out, text = tmp_path / "in", tmp_path / "out", "a\u2028b\u2029c\u0085d"
    given.write_text("".join(json.dumps(line(i, prompt=text), ensure_ascii=False) + "\n" for i in "ab"))
    files = BatchFile(str(given), str(out))
    assert [request.body["prompt"] for request in files.todo()] == [text, text]
    files.append("a", {"custom_id": "a", "response": {"status_code": 200, "body": {"text": text}}})
    again = BatchFile(str(given), str(out))
    assert [request.custom_id for request in again.todo()] == ["b"]
    (kept,) = out.read_text().removesuffix("\n").split("\n")
    assert json.loads(kept)["response"]["body"]["text"] == text


def test_an_answer_that_cannot_be_written_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", line("slow"), line("fast"))
    files = BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()  # nobody can write to a folder
    released, ended = threading.Event(), list[str]()

    def send(_: object, request: BatchRequest) -> dict[str, Any]:
        if request.custom_id == "slow":
            released.wait(10)
        ended.append(request.custom_id)
        return {"response": {"status_code": 200}}

    monkeypatch.setattr(runner._Sender, "send", send)
    try:
        with pytest.raises(FailedPrecondition, match=r"Cannot write .*: Is a directory"):
            runner.run_batch(files, files.todo(), "http://127.0.0.1:1", None, 2, 0)
        assert ended == ["fast"]
    finally:
        released.set()


def test_answer_with_half_of_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"), line("\ud800"))
    files = BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))
    ids = ["a", "\ud800"]
    answers = [{"custom_id": i, "response": {"status_code": 200, "body": {"text": "\udc00"}}} for i in ids]
    for custom_id, answer in zip(ids, answers, strict=True):
        files.append(custom_id, answer)
    assert read(tmp_path / "out") == answers
    files.finish()
    assert read(tmp_path / "out") == answers
    assert not BatchFile(str(tmp_path / "in"), str(tmp_path / "out")).todo()


def test_answer_after_one_that_was_written_in_part_begins_on_a_new_line(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"), line("b"))
    files = BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))
    cut, whole = ({"custom_id": i, "response": {"status_code": 200, "body": {"text": i * 99}}} for i in "ab")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))  # as on a full disk, a part is written
        with pytest.raises(FailedPrecondition, match=r"Cannot write .*out: File too large"):
            files.append("a", cut)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files.append("b", whole)
    first, second = (tmp_path / "out").read_text().splitlines()
    assert first == json.dumps(cut)[:50] and json.loads(second) == whole


class SlowServer(ThreadingHTTPServer):
    """Answers a request whose prompt is `slow` when `release` is set, and every other one after a slow one has come.
    Calls `on_fast` before that."""

    daemon_threads = True

    def __init__(self, on_fast: Callable[[], object]) -> None:
        super().__init__(("127.0.0.1", 0), _SlowHandler)
        self.on_fast, self.slow_came, self.release = on_fast, threading.Event(), threading.Event()


class _SlowHandler(BaseHTTPRequestHandler):
    server: SlowServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "slow":
            self.server.slow_came.set()
            self.server.release.wait(60)
        else:
            self.server.slow_came.wait(60)
            self.server.on_fast()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def run_against(server: SlowServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command on the files `in` and `out` of the folder, against the server, while the context lasts."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [sys.executable, "-m", "quire", "run-batch", "--base-url", f"http://127.0.0.1:{server.server_port}"]
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--max-concurrency", "2"]
    process = subprocess.Popen([*command, *files], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        server.release.set()
        server.shutdown()
        server.server_close()


def test_process_ends_after_a_write_error_while_requests_are_under_way(tmp_path: Path) -> None:
    write(tmp_path / "in", line("slow", prompt="slow"), line("fast"))

    def replace_by_folder() -> None:
        (tmp_path / "out").unlink()
        (tmp_path / "out").mkdir()  # nobody can write to a folder

    with run_against(SlowServer(replace_by_folder), tmp_path) as process:
        _, errors = process.communicate(timeout=40)
        assert process.returncode == 1 and "Is a directory" in errors


def test_interrupted_run_keeps_the_answers_of_requests_under_way(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a", prompt="slow"), line("b", prompt="slow"), line("c"))
    server = SlowServer(lambda: None)
    with run_against(server, tmp_path) as process:
        assert server.slow_came.wait(40)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        server.release.set()
        process.communicate(timeout=40)
    assert process.returncode == 130
    assert {answer["custom_id"] for answer in read(tmp_path / "out")} in ({"a"}, {"a", "b"})


def test_second_interrupt_ends_a_run_at_once(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a", prompt="slow"))
    server = SlowServer(lambda: None)
    with run_against(server, tmp_path) as process:
        assert server.slow_came.wait(40)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.communicate(timeout=40)
    assert process.returncode == 130


@pytest.mark.parametrize("restart", [False, True])
def test_output_file_that_cannot_be_replaced_is_a_typed_error(tmp_path: Path, restart: bool) -> None:
    write(tmp_path / "in", line("a"))
    (tmp_path / "out").mkdir()  # nobody can read or replace a folder as a file
    with pytest.raises(FailedPrecondition, match=r"Cannot (read|write) .*out: Is a directory"):
        BatchFile(str(tmp_path / "in"), str(tmp_path / "out"), restart=restart)


def test_answers_that_cannot_be_put_in_order_at_the_end_are_a_typed_error(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"))
    files = BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))
    files.append("a", {"custom_id": "a", "response": {"status_code": 200}})
    (tmp_path / "out.tmp").mkdir()
    with pytest.raises(FailedPrecondition, match=r"Cannot write .*out: Is a directory"):
        files.finish()
    assert [answer["custom_id"] for answer in read(tmp_path / "out")] == ["a"]


@pytest.mark.parametrize(
    "bad",
    [
        {"custom_id": "a"},
        {**line("a"), "url": "/v1/models"},
        {**line("a"), "method": "GET"},
        {**line("a"), "body": []},
        {**line("b"), "custom_id": "first"},
    ],
    ids=str,
)
def test_bad_lines_are_named(bad: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "in", line("first"), bad)
    with pytest.raises(InvalidArgument, match="Line 2"):
        BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))


def test_requests_are_not_overwritten_by_their_answers(tmp_path: Path) -> None:
    write(tmp_path / "in", line("first"))
    before = (tmp_path / "in").read_text()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for output in ("in", "link"):
        with pytest.raises(InvalidArgument, match="has the requests"):
            BatchFile(str(tmp_path / "in"), str(tmp_path / output))
    assert (tmp_path / "in").read_text() == before
    with pytest.raises(NotFound, match="no folder"):
        BatchFile(str(tmp_path / "in"), str(tmp_path / "nowhere" / "out"))


def test_output_that_is_a_link_stays_one(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "answers")
    answer = {"custom_id": "a", "response": {"status_code": 200}}
    files = BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))
    files.append("a", answer)
    files.finish()
    assert (tmp_path / "out").is_symlink() and read(tmp_path / "elsewhere" / "answers") == [answer]
    assert not BatchFile(str(tmp_path / "in"), str(tmp_path / "out")).todo()


def test_output_that_is_a_device_or_pipe_is_refused_and_stays(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="device or pipe"):
        BatchFile(str(tmp_path / "in"), str(tmp_path / "pipe"), restart=True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000/v1", "http://", "http://a:b", "http://a:99999"])
def test_malformed_base_url_is_refused_and_the_output_stays(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", line("a"))
    (tmp_path / "out").write_text("kept")
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert main(["run-batch", *files, "--base-url", url]) == 1
    assert "BAD_URL" in capsys.readouterr().err and (tmp_path / "out").read_text() == "kept"
    assert main(["bench", "serve", "--base-url", url]) == 1
    assert "BAD_URL" in capsys.readouterr().err

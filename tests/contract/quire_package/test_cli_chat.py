"""`quire chat` and `status --watch`, without a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire import Client, Unavailable
from quire.__main__ import main
from tests.fakes.router.fake_router import FakeRouter

Fake = tuple[FakeRouter, str]
Capture = pytest.CaptureFixture[str]


def talk(address: str, said: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", "--address", address, "--max-tokens", "3", *flags])


def test_a_conversation_goes_on_until_it_is_reset(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    router, address = fake
    said = "one\n\ntwo\n/reset\nthree\n/exit\nnever\n"
    assert talk(address, said, monkeypatch, "--system", "Be brief.", "--temperature", "0.5") == 0
    sent = [json.loads(request.chat.messages_json) for request in router.requests]
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "0 1 2 "}

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    assert sent == [
        [system, user("one")],
        [system, user("one"), answer, user("two")],
        [system, user("three")],
    ]
    assert router.requests[0].sampling.temperature == 0.5
    shown = capsys.readouterr()
    assert shown.out == "0 1 2 \n" * 3
    assert shown.err.count("3 tokens, the first after ") == 3 and "tokens/s" in shown.err


def test_a_refusal_is_said_and_forgotten(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    router, address = fake
    router.overload = 1
    assert talk(address, "one\ntwo\n", monkeypatch) == 0
    assert json.loads(router.requests[1].chat.messages_json) == [{"role": "user", "content": "two"}]
    assert "QUEUE_FULL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shown", "out"),
    [(["half an ", "answer"], "half an answer\n"), ([""], ""), ([], "")],
    ids=["half", "empty", "none"],
)
def test_error_after_a_part_of_an_answer_stands_on_its_own_line(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture, shown: list[str], out: str
) -> None:
    def generate(*_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        yield from (SimpleNamespace(token_ids=[1], text=text) for text in shown)
        raise Unavailable("ENGINE_LOST", "The engine is lost.", "Ask again.")

    monkeypatch.setattr(Client, "generate", generate)
    assert talk(fake[1], "one\n", monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.out == out and "ENGINE_LOST" in printed.err


def test_one_question(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    router, address = fake
    assert talk(address, "", monkeypatch, "-q", "why?") == 0
    assert json.loads(router.requests[0].chat.messages_json) == [{"role": "user", "content": "why?"}]
    assert capsys.readouterr().out == "0 1 2 \n"


def test_a_watched_status_looks_again(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert seconds == 2.5
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("quire.cli.status.time.sleep", sleep)
    assert main(["status", "--name", "no-such-stack", "--watch", "2.5"]) == 1
    assert capsys.readouterr().out.count("not running") == 3

"""Log lines as machines and people read them."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire_common.telemetry import tracing
from quire_common.telemetry.logs import bind_request_id, get_logger, request_id, setup_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

log = get_logger("quire_test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_identity_ids_and_fields(stream: io.StringIO) -> None:
    setup_logging("router", "info", "json", instance="router-1", stream=stream)
    tracing.setup_tracing("router", "router-1", "", processor=SimpleSpanProcessor(InMemorySpanExporter()))
    token = bind_request_id("req-1")
    with tracing.span("work") as span:
        log.info("page stored", pages=3, digest=b"\x01\x02")
    request_id.reset(token)
    tracing.shutdown_tracing()
    log.debug("not written")
    (line,) = lines(stream)
    assert {k: line[k] for k in ("level", "service", "instance", "logger", "message", "request_id", "pages")} == {
        "level": "info",
        "service": "router",
        "instance": "router-1",
        "logger": "quire_test",
        "message": "page stored",
        "request_id": "req-1",
        "pages": 3,
    }
    assert line["digest"] == "0102"
    assert line["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert line["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert line["time"].endswith("Z")


def test_an_exception_is_one_line_with_its_traceback(stream: io.StringIO) -> None:
    setup_logging("router", "info", "json", stream=stream)
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("it broke", step=1, traceback="of a peer")
    (line,) = lines(stream)
    assert "KeyError" in line["traceback"] and line["level"] == "error" and line["step"] == 1
    assert line["traceback_"] == "of a peer" and list(line)[-1] == "traceback"


@pytest.mark.parametrize("fmt", ["json", "pretty"])
def test_prompts_and_keys_are_masked(stream: io.StringIO, fmt: str) -> None:
    setup_logging("router", "info", fmt, stream=stream)
    log.info("request", prompt="my secret novel", api_key="sk-secret", lease_key=b"secret", Authorization="secret")
    assert "secret" not in stream.getvalue()
    assert stream.getvalue().count("[masked]") == 4


def test_a_field_cannot_replace_the_identity(stream: io.StringIO) -> None:
    setup_logging("router", "info", "json", stream=stream)
    log.info("x", service="forged")
    (line,) = lines(stream)
    assert line["service"] == "router" and line["service_"] == "forged"


@pytest.mark.parametrize("fmt", ["json", "pretty"])
def test_a_value_cannot_forge_a_line(stream: io.StringIO, fmt: str) -> None:
    setup_logging("router", "info", fmt, stream=stream)
    log.info("name\nINFO router forged", name="a\nINFO router forged\x1b[2J")
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_an_exception_cannot_forge_a_line(stream: io.StringIO) -> None:
    setup_logging("router", "info", "pretty", stream=stream)
    try:
        raise ValueError("a\n12:00:00.000 INFO  router forged\r12:00:00.000 INFO  router forged\x1b[2J")
    except ValueError:
        log.exception("it broke")
    first, *traceback = stream.getvalue().splitlines()
    assert first.endswith("router it broke") and "Traceback" in traceback[0]
    assert all(line.startswith("  ") for line in traceback)
    assert not {"\r", "\x1b"} & set(stream.getvalue())


def test_pretty_lines_are_plain_off_a_terminal(stream: io.StringIO) -> None:
    setup_logging("router", "info", "pretty", stream=stream)
    log.warning("slow step", took_ms=3, why="page fault storm")
    line = stream.getvalue()
    assert "WARNI router slow step took_ms=3" in " ".join(line.split()) and 'why="page fault storm"' in line


def test_setting_up_twice_does_not_double_the_lines(stream: io.StringIO) -> None:
    setup_logging("router", "info", "json", stream=stream)
    setup_logging("router", "info", "json", stream=stream)
    logging.getLogger("other.library").warning("with %s", "arguments")
    assert [line["message"] for line in lines(stream)] == ["with arguments"]


def test_request_ids_are_cut_and_cleaned() -> None:
    token = bind_request_id("ok\n\x00é" + "x" * 500)
    assert request_id.get() == "ok" + "x" * 123
    request_id.reset(token)


def test_percent_signs_in_a_message_are_not_format_codes(stream: io.StringIO) -> None:
    setup_logging("router", "info", "json", stream=stream)
    log.info("90 % of %s", share=0.9)
    (line,) = lines(stream)
    assert line["message"] == "90 % of %s" and line["share"] == 0.9

"""Log lines: one JSON object or one readable line per event, on stderr, with request and trace ids.

Fields are keyword arguments: `log.info("page stored", pages=3)`. Prompts and keys must not be logged. Callers must not
pass them, and as a last resort this module masks fields with such names. It does not look into messages, nested values
or tracebacks. It does not know where the lines go afterwards.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from opentelemetry import trace

if TYPE_CHECKING:
    from collections.abc import Mapping

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("quire_request_id", default="")

SECRET_FIELDS = frozenset(
    {
        "api_key",
        "authorization",
        "cache_salt",
        "key",
        "lease",
        "lease_key",
        "messages",
        "output",
        "password",
        "prompt",
        "prompts",
        "salt",
        "secret",
        "text",
        "token",
        "token_ids",
        "tokens",
        "tls_key",
    }
)
_MASK = "[masked]"
_MAX_ID = 128
_MAX_VALUE = 2000
_COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_identity = {"service": "", "instance": ""}


class Log:
    """A named logger whose keyword arguments become fields."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, **fields: Any) -> None:
        """Log an event for developers."""
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        """Log an event for operators."""
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Log a problem from which the service has recovered."""
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        """Log a failure."""
        self._log(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: Any) -> None:
        """Log a failure, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, message, fields, exc_info=True)

    def enabled(self, level: str) -> bool:
        """Whether lines of the level are written: for fields that are costly to compute."""
        return self._logger.isEnabledFor(logging.getLevelNamesMapping()[level.upper()])

    def _log(self, level: int, message: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        logger = self._logger
        if logger.isEnabledFor(level):
            # `logger.log` would search the stack for the caller's file and line, which the formatters do not print.
            exception = sys.exc_info() if exc_info else None
            record = logger.makeRecord(logger.name, level, "", 0, message, (), exception, extra={"fields": fields})
            logger.handle(record)


def get_logger(name: str) -> Log:
    """The logger of a module: `log = get_logger(__name__)`."""
    return Log(logging.getLogger(name))


def setup_logging(service: str, level: str, fmt: str, *, instance: str = "", stream: TextIO | None = None) -> None:
    """Send all log lines of the process, of `level` and above, to `stream` (None: stderr), in place of an earlier
    setup. A logger with a level of its own, as `quire.audit`, keeps that level. `fmt` is json; any other text means
    pretty. Python's warnings are logged too. `service` and `instance` are in each JSON line, and `service` in each
    readable one."""
    set_identity(service, instance)
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter() if fmt == "json" else PrettyFormatter(colour=target.isatty()))
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, JsonFormatter | PrettyFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def set_identity(service: str, instance: str) -> None:
    """Name the process in every later line; the instance is known only once the port is."""
    _identity.update(service=service, instance=instance)


def identity() -> tuple[str, str]:
    """Service and instance as they were set: for a helper process that logs under its owner's name."""
    return _identity["service"], _identity["instance"]


def bind_request_id(value: str | bytes | None) -> contextvars.Token[str]:
    """Set the request id of this context. Since it comes from a peer, it is cut to 128 characters, and others than
    printable ASCII are removed. Returns the token that resets it."""
    text = (value.decode("ascii", "replace") if isinstance(value, bytes) else value or "")[:_MAX_ID]
    if not (text.isascii() and text.isprintable()):
        text = "".join(c for c in text if c.isascii() and c.isprintable())
    return request_id.set(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line: time, level and identity first, then the logger, the message and ids, then the event's
        own fields. Secret fields are masked, and a field with a name that is in the line already gets an underscore
        behind it. The message is cut to 2000 characters. A traceback comes last."""
        traceback = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            **_identity,
            "logger": record.name,
            "message": record.getMessage()[:_MAX_VALUE],
            **_ids(),
        }
        for name, value in _fields(record).items():
            line[f"{name}_" if name in line or name in traceback else name] = value
        return json.dumps({**line, **traceback}, default=_plain, ensure_ascii=True)


class PrettyFormatter(logging.Formatter):
    """One line for people; colours on a terminal only. A traceback follows on indented lines. Control characters are
    escaped. Therefore no message, field or exception can forge a line."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: clock, level, service, message, fields and ids, with a traceback if there is one. Secret
        fields are masked, the message is cut to 2000 characters, and control characters are escaped. Each line of the
        traceback is indented."""
        start, end = (_COLOURS.get(record.levelname, ""), "\x1b[0m") if self._colour else ("", "")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {start}{record.levelname[:5]:<5}{end} {_identity['service']}"
        parts = [f"{name}={_readable(value)}" for name, value in {**_fields(record), **_ids()}.items()]
        line = " ".join([head, record.getMessage()[:_MAX_VALUE].translate(_CONTROL), *parts])
        traceback = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n  ".join([line, *(text.translate(_CONTROL) for text in traceback)])


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {name: _MASK if name.lower() in SECRET_FIELDS else value for name, value in fields.items()}


def _ids() -> dict[str, str]:
    """Return the request, trace and span ids of this context, as far as there are any."""
    ids = {"request_id": request} if (request := request_id.get()) else {}
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        ids |= {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
    return ids


def _timestamp(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created % 1 * 1e6):06d}Z"


def _plain(value: object) -> str:
    return value.hex()[:64] if isinstance(value, bytes) else str(value)[:_MAX_VALUE]


def _readable(value: object) -> str:
    text = _plain(value).translate(_CONTROL)
    return json.dumps(text, ensure_ascii=False) if " " in text or '"' in text or not text else text

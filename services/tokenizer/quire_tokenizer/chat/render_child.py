"""A rendering process: jobs in on stdin, texts out on stdout, one at a time, as length-framed JSON.

It exists so that a template that loops, recurses or eats memory harms nobody: its memory is limited, its parent kills
it after a while, and should the parent be gone, an alarm does. It opens no sockets and reads no files after start.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import Any, BinaryIO

from jinja2 import TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from quire_tokenizer.chat.chat_template import ChatTemplate, OutputTooLarge, TemplateRefused

LENGTH = struct.Struct(">I")
_CACHED_TEMPLATES = 16
# A traceback of the deepest recursion must still fit on the stack.
_RECURSION_LIMIT = 1000


def main() -> int:
    """Answer the jobs that come on stdin, one by one, until it ends. The process's arguments are its memory limit in
    bytes, and the seconds after which a single job kills it."""
    memory_bytes, alarm_s = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent says when to end
    sys.setrecursionlimit(_RECURSION_LIMIT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, {"ready": True})
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        answer = run_job(job)
        write_frame(answers, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Render one job. Returns {"text": ...}, or {"error": kind, "message": ...}; never raises."""
    try:
        return {"text": _template(job["source"]).render(job["variables"], job["max_chars"])}
    except TemplateRefused as error:
        return _error("refused", error)
    except TemplateSyntaxError as error:
        return _error("syntax", error)
    except SecurityError as error:
        return _error("forbidden", error)
    except OutputTooLarge:
        return {"error": "too_large", "message": ""}
    except MemoryError:
        return {"error": "memory", "message": ""}
    except RecursionError:
        return {"error": "recursion", "message": ""}
    except Exception as error:  # a template can raise anything: all of it is this job's failure alone
        return _error("failed", error)


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Read one length-framed message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    loaded: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(header)[0]))
    return loaded


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """ASCII JSON, so that any string can travel."""
    body = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


@lru_cache(maxsize=_CACHED_TEMPLATES)
def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _error(kind: str, error: Exception) -> dict[str, Any]:
    """Return the answer for an error, without the conversation: only errors that speak of the template alone are
    quoted."""
    if isinstance(error, TemplateSyntaxError):
        message = f"line {error.lineno}: {error}"
    elif isinstance(error, TemplateRefused | UndefinedError):
        message = str(error)
    else:
        message = type(error).__name__
    return {"error": kind, "message": message[:1000]}


if __name__ == "__main__":
    sys.exit(main())

"""A rendering process. It reads jobs from stdin and writes texts to stdout, one at a time, as length-framed JSON.

Because templates run in this process, a template that loops, recurses or takes much memory harms no other request. The
process has a memory limit, and its parent kills it when a job takes too long. If the parent has ended, an alarm kills
it. The process opens no sockets, and reads no files after its start.
"""

from __future__ import annotations

import signal
import sys
from functools import lru_cache
from typing import Any

from jinja2 import TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from quire_common.children.frames import limit_process, read_frame, write_frame
from quire_tokenizer.chat.chat_template import ChatTemplate, OutputTooLarge, TemplateRefused

_CACHED_TEMPLATES = 16
# A traceback of the deepest recursion must still fit on the stack.
_RECURSION_LIMIT = 1000


def main() -> int:
    """Answer the jobs that come on stdin, one by one, until it ends. The process's arguments are its memory limit in
    bytes, and the seconds after which a single job kills it."""
    memory_bytes, alarm_s = int(sys.argv[1]), float(sys.argv[2])
    sys.setrecursionlimit(_RECURSION_LIMIT)
    limit_process(memory_bytes)
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, {"ready": True})
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        answer = run_job(job.message)
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

"""A rendering process. It reads jobs from stdin and writes texts to stdout, one at a time. The variables of a job and
the text travel as payloads of frames, since they may be long.

Because templates run in this process, a template that loops, recurses or takes much memory harms no other request. The
process has a memory limit, and its parent kills it when a job takes too long. If the parent has ended, an alarm kills
it. The process opens no sockets, and reads no files after its start.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import lru_cache

from jinja2 import TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from quire_common.children.frames import Frame, limit_process, read_frame, write_frame
from quire_tokenizer.chat.chat_template import ChatTemplate, OutputTooLarge, TemplateRefused

_CACHED_TEMPLATES = 16
# A traceback of the deepest recursion must still fit on the stack.
_RECURSION_LIMIT = 1000


def main() -> int:
    """Limit the process, report that it is ready, and answer the jobs that come on stdin, one by one, until it ends.
    The process's arguments are its memory limit in bytes, and the seconds after which a single job kills it."""
    memory_bytes, alarm_s = int(sys.argv[1]), float(sys.argv[2])
    sys.setrecursionlimit(_RECURSION_LIMIT)
    limit_process(memory_bytes)
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, {"ready": True})
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        answer, text = run_job(job)
        del job
        write_frame(answers, answer, text)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def run_job(job: Frame) -> Frame:
    """Render one job: its message has the template's source and `max_chars`, its payload the variables as JSON. Returns
    the text as the payload, or {"error": kind, "message": ...}; never raises."""
    try:
        text = _template(job.message["source"]).render(json.loads(job.payload), job.message["max_chars"])
        return Frame({}, text.encode(errors="surrogatepass"))
    except TemplateRefused as error:
        return _error("refused", error)
    except TemplateSyntaxError as error:
        return _error("syntax", error)
    except SecurityError as error:
        return _error("forbidden", error)
    except OutputTooLarge:
        return Frame({"error": "too_large", "message": ""})
    except MemoryError:
        return Frame({"error": "memory", "message": ""})
    except RecursionError:
        return Frame({"error": "recursion", "message": ""})
    except Exception as error:  # a template can raise anything: all of it is this job's failure alone
        return _error("failed", error)


@lru_cache(maxsize=_CACHED_TEMPLATES)
def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _error(kind: str, error: Exception) -> Frame:
    """Return the answer {"error": kind, "message": ...} for an error. The message quotes a syntax error with its line,
    a refusal by the template, and the name of an undefined variable, at most 1,000 characters. Of other errors it has
    the type alone, since their text may contain the conversation."""
    if isinstance(error, TemplateSyntaxError):
        message = f"line {error.lineno}: {error}"
    elif isinstance(error, TemplateRefused | UndefinedError):
        message = str(error)
    else:
        message = type(error).__name__
    return Frame({"error": kind, "message": message[:1000]})


if __name__ == "__main__":
    sys.exit(main())

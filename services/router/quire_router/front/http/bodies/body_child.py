"""This program parses long bodies in a process of its own. It reads bodies from stdin, and writes parsed requests to
stdout, one at a time.

Memory and processor time of the process are limited, so that a body that takes too much of them fails alone. The
process has a low priority: streams of tokens matter more than bodies of megabytes. It ends when its parent has ended,
since stdin ends then. It opens no sockets, and reads no files after its start.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from quire_common.children.frames import Frame, limit_process, read_frame, write_frame
from quire_common.errors import InvalidArgument, TooLarge, internal_error
from quire_router.front.http.bodies.body_parsers import parse_body
from quire_router.front.http.bodies.parsed_codec import encode_parsed, encode_refusal
from quire_router.front.parameters.request_limits import Limits

_NICENESS = 10


def main() -> int:
    """Limit the memory and the priority of this process, say that it is ready, and answer jobs from stdin until it
    ends. Command-line arguments: the bytes of memory for parsing, in addition to what the program itself maps, and the
    seconds of processor time after which a body ends the process."""
    memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    limit_process(_mapped_bytes() + memory_bytes)
    os.nice(_NICENESS)
    write_frame(answers, {"ready": True})
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        message, payload = run_job(job)
        del job
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, message, payload)
        del message, payload
    return 0


def run_job(job: Frame) -> tuple[dict[str, Any], bytes]:
    """Parse one body with the parser that the job names. Returns a message and a payload, which `decode_parsed` reads:
    the parsed request, or the error that refuses the body. No body makes it raise: lack of memory and mistakes of a
    parser are such errors too. The message of a mistake also has the name of the exception as `failed`."""
    asked = job.message
    defaults = {model: tuple(map(tuple, values)) for model, values in asked["defaults"].items()}
    limits = Limits(asked["max_n"], asked["max_logprobs"])
    try:
        return encode_parsed(parse_body(asked["parser"], job.payload, limits, defaults, timings=asked["timings"]))
    except InvalidArgument as error:
        return encode_refusal(error), b""
    except MemoryError:
        return encode_refusal(_too_large()), b""
    except Exception as error:  # a mistake of a parser; it fails this body alone
        return encode_refusal(internal_error()) | {"failed": type(error).__name__}, b""


def _too_large() -> TooLarge:
    """Make the error for a body that takes more memory to parse than the process may use."""
    return TooLarge(
        "BODY_TOO_COMPLEX",
        "The body takes too much memory to parse.",
        "Send fewer values, or split the request.",
    )


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())

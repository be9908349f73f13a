"""BodyParser: turns a body into a parsed request, in this process if it is short, and in a child process if it is long.

A parser written in C holds Python's global interpreter lock until it ends, and the event loop of the process waits for
as long. So no long body is parsed in the router's own process. The child process takes one body at a time, and tenants
take turns. A body that takes too much processor time or memory harms only itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from quire_common.children.child_pool import ChildFailed, ChildPool
from quire_common.children.child_process import ChildProgram
from quire_common.children.frames import framed
from quire_common.errors import TooLarge, Unavailable
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.backoff import Backoff
from quire_router.front.http.bodies.body_parsers import parse_body
from quire_router.front.http.bodies.parsed_codec import decode_parsed
from quire_router.front.http.body_budget import FREE_BYTES
from quire_router.tenant_queue import TenantTurns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_common.credit.hello import SamplingDefaults
    from quire_common.errors import QuireError
    from quire_router.front.parameters.request_limits import Limits

log = get_logger(__name__)
# A turn of the loop may parse a body of so many bytes: at most some milliseconds. Sending it to another process would
# cost the loop as much. --max-bodies-mib bounds the memory of longer bodies, also of those that wait for the process.
LONG_BYTES = FREE_BYTES
MAX_CPU_S = 2.0
# The process has a low priority: on a busy machine it gets little processor time.
_TIMEOUT_S = 30.0
# The process may take so many bytes for each byte of the longest body: a number of two characters becomes an object of
# 32 bytes, and a few copies of the body exist at a time. The second number is for code that the first body loads.
_MEMORY_FACTOR, _MEMORY_BYTES = 48, 128 << 20
# A number of two characters travels in four or eight bytes.
_ANSWER_FACTOR, _ANSWER_BYTES = 8, 1 << 20
_RETRY_AFTER_S = 1.0
_FIX = f"Retry, or send at most {LONG_BYTES >> 10} KiB; if it stays, see the router's log."


class BodyParser:
    """One per router process. `limits` are the router's own, without a model's defaults."""

    def __init__(self, limits: Limits, max_body_bytes: int, max_cpu_s: float = MAX_CPU_S) -> None:
        self._limits = limits
        memory_bytes = _MEMORY_BYTES + _MEMORY_FACTOR * max_body_bytes
        program = ChildProgram(
            "quire_router.front.http.bodies.body_child",
            (str(memory_bytes), str(max_cpu_s)),
            _ANSWER_BYTES + _ANSWER_FACTOR * max_body_bytes,
            _not_started,
        )
        # Bodies wait for their turn before they come to the pool.
        self._children = ChildPool(program, 1, 2, _TIMEOUT_S, _overloaded)
        self._turns = TenantTurns()
        self._backoff = Backoff()
        self._failed = False

    async def parse(
        self, parser: str, body: bytes, tenant: str, defaults: Mapping[str, SamplingDefaults], *, timings: bool
    ) -> Any:
        """Return what the parser with this name makes of a body. A body above LONG_BYTES waits for the tenant's turn at
        the child process; a shorter one is parsed here. `defaults`, `timings`: see `parse_body`. Raises the parser's
        InvalidArgument or Unsupported. For a short body, other exceptions of the parser pass on. For a long body, also
        raises TooLarge if it takes too much processor time or memory, Unavailable if the process failed or took more
        than 30 s, Internal for a mistake of the parser, and OSError if the system can make no process."""
        if len(body) <= LONG_BYTES:
            return parse_body(parser, body, self._limits, defaults, timings=timings)
        job = {
            "parser": parser,
            "max_n": self._limits.max_n,
            "max_logprobs": self._limits.max_logprobs,
            "defaults": defaults,
            "timings": timings,
        }
        with metrics.http_bodies_waiting.track_inprogress():
            async with self._turns.turn(tenant):
                return await self._parse_in_child(framed(job, len(body)), body)

    async def close(self) -> None:
        """End the process, if it is idle. A process that parses ends when its request is cancelled."""
        await self._children.close()

    async def _parse_in_child(self, job: bytes, body: bytes) -> Any:
        """Send a framed job and its body to the process, and return what it parsed. After a crash or a failed start,
        wait for the backoff first; a cancelled call, whose process ends too, delays nobody. If the process ends, count
        and log that, and raise the error of `_failure`. A failed start raises Unavailable directly, and is not counted.
        Raises the error of a body that was refused; a mistake of the parser is logged, and raised as Internal."""
        if self._failed:
            await self._backoff.wait()
        self._failed = True
        try:
            message, payload = await self._children.run(job, body)
        except asyncio.CancelledError:
            self._failed = False
            raise
        except ChildFailed as error:
            self._failed = error.how == "crashed"
            metrics.http_body_process_ended.labels(error.how).inc()
            log.warning("a process that parses bodies ended", how=error.how, body_bytes=len(body))
            raise _failure(error) from error
        self._failed = False
        self._backoff.reset()
        if "failed" in message:
            log.error("a body could not be parsed", reason=message["failed"])
        return decode_parsed(message, payload)


def _failure(error: ChildFailed) -> QuireError:
    """Return the error of a body whose process ended: TooLarge if it used too much processor time, otherwise
    Unavailable, for a timeout or a crash."""
    if error.out_of_cpu:
        return TooLarge(
            "BODY_TOO_COMPLEX",
            "The body takes too much processor time to parse.",
            "Send fewer values, or split the request.",
        )
    if error.how == "timeout":
        message = f"The body was not parsed within {_TIMEOUT_S:g} s."
        return Unavailable("BODY_PARSER_BUSY", message, _FIX, retry_after_s=_RETRY_AFTER_S)
    return Unavailable("BODY_PARSER_DIED", "The process that parsed the body died.", _FIX, retry_after_s=_RETRY_AFTER_S)


def _not_started() -> QuireError:
    message = "The process that parses long bodies did not start."
    return Unavailable("BODY_PARSER_FAILED", message, _FIX, retry_after_s=_RETRY_AFTER_S)


def _overloaded(waiting: int) -> QuireError:
    message = f"{waiting} long bodies are being parsed."
    return Unavailable("BODY_PARSER_BUSY", message, _FIX, retry_after_s=_RETRY_AFTER_S)

"""GenerateCall: one generate request, over one or more connections. It knows the next message to send, and the answer
so far.

Both clients use it. It opens no channel and waits for nothing. If a stream breaks after its first response, each choice
is resumed with the tokens that have arrived. The seed is chosen before the first send, so the answer is the same as
that of an unbroken stream. Answers that arrive all at once (searches and the best of several) are not resumed. If a
stream breaks after the last choice has ended, the answer is complete; the call counts its tokens if the router's usage
has not arrived.
"""

from __future__ import annotations

import random
import uuid
from collections import deque
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypedDict

import grpc

from quire import errors, wire
from quire.columns import pack_i32
from quire.outputs import Delta, Usage
from quire.prompts import Prompt
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.v1 import inference_pb2

_FIRST_WAIT_S, _MOST_WAIT_S = 0.1, 2.0
# What a connection that broke, a router that goes away, and one that has just started and knows no peers yet look like;
# any other code says why a service has refused.
_BROKEN = frozenset({"UNREACHABLE", "UNAVAILABLE", "CANCELLED", "DRAINING", "NO_HEALTHY_REPLICA", "NO_TOKENIZER"})
# A router that goes away refuses calls that it has not begun with this code.
_REFUSED = "DRAINING"
# gRPC gives this code to a call that came as a port closed, and that no handler got (grpc/grpc issue 41785); but also
# to one that ran when a router had waited long enough. A router sends initial metadata when it begins a call: a call
# without them was not begun. gRPC's asyncio client may lose them where the status follows at once. gRPC cancels no call
# as early as that, and calls that a router itself ends have codes of ours.
_UNSEEN = "CANCELLED"

Params = SamplingParams | BeamSearchParams


class GenerateOptions(TypedDict, total=False):
    """`request_id` is chosen if it is absent or empty. Requests of a lower `priority` go first, unless the scheduler's
    policy ignores it. `timeout_s` counts from the arrival at the router, and anew for each request that resumes a
    choice. Cached pages are shared only with requests of an equal `cache_salt`; a prompt may have its own."""

    model: str
    request_id: str
    priority: int
    timeout_s: float
    cache_salt: str
    return_token_ids: bool
    return_timings: bool


@dataclass
class _Progress:
    """The state of one choice."""

    ids: list[int]
    characters: int = 0
    ended: bool = False


class GenerateCall:
    """The state of one call. `request` is the message to send now. After its responses, call `more`; after a failure,
    call `wait_s`. The constructor chooses a request id, and a seed if the temperature is above 0, unless the caller has
    given them (a seed of -1 counts as none). It raises the errors of `wire.build_request`."""

    def __init__(
        self,
        prompt: Prompt,
        params: Params | None,
        options: GenerateOptions,
        address: str,
        reconnect_s: float,
    ) -> None:
        beams = params if isinstance(params, BeamSearchParams) else None
        params = params.sampling() if isinstance(params, BeamSearchParams) else params or SamplingParams()
        self.request_id = options.get("request_id") or f"req-{uuid.uuid4().hex}"
        if params.temperature > 0 and (params.seed is None or params.seed < 0):
            params = params.clone(seed=random.getrandbits(63))
        self._params, self._at_once = params, beams is not None or params.told_at_once
        self._wants_ids = options.get("return_token_ids", False)
        self._address, self._reconnect_s = address, reconnect_s
        self._first = self.request = wire.build_request(
            prompt,
            params,
            request_id=self.request_id,
            model=options.get("model", ""),
            priority=options.get("priority", 0),
            timeout_s=options.get("timeout_s", 0.0),
            cache_salt=options.get("cache_salt", ""),
            return_token_ids=True,
            return_timings=options.get("return_timings", False),
            beams=beams,
        )
        self._choices = [_Progress([]) for _ in range(params.n)]
        # Choices that are yet to be taken up; and the one that is being, None while all come in one stream.
        self._left: deque[int] = deque()
        self._current: int | None = None
        self._begun = self._prompt_sent = False
        self._prompt_tokens = 0
        self._prompt_usage: Usage | None = None
        self._usage_sent = False
        self._failures, self._last_delta_s = 0, monotonic()

    def read(self, response: inference_pb2.GenerateResponse) -> Delta:
        """Record a response, and return it as the Delta for the caller. In a resumed stream, the Delta gets the index
        of the choice that is resumed. Token ids, also the prompt's, are left out unless the caller asked for them; the
        prompt's come only once. Without `detokenize`, there are no text, reasoning and tool calls. The usage is that of
        `_usage`. Each response also resets the pauses and the time limit of `wait_s`. Raises the typed error if the
        response carries one."""
        delta = wire.read_response(response, self.request_id)
        if self._current is not None:
            delta = replace(delta, index=self._current)
        progress = self._choices[delta.index]
        progress.ids += delta.token_ids
        progress.characters += delta.characters
        progress.ended = progress.ended or delta.finish_reason is not None
        self._begun, self._failures, self._last_delta_s = True, 0, monotonic()
        self._prompt_tokens = self._prompt_tokens or len(delta.prompt_token_ids)
        prompt_ids = delta.prompt_token_ids if self._wants_ids and not self._prompt_sent else ()
        self._prompt_sent = self._prompt_sent or bool(delta.prompt_token_ids)
        if not self._params.detokenize:
            delta = replace(delta, text="", reasoning="", tool_calls=())
        return replace(
            delta,
            token_ids=delta.token_ids if self._wants_ids else (),
            prompt_token_ids=prompt_ids,
            usage=self._usage(delta.usage),
        )

    def more(self) -> bool:
        """Call when the stream has ended without an error. Returns False if the answer is complete. Otherwise makes
        `request` resume the next unfinished choice and returns True: the caller must send it. An unbroken stream that
        ended counts as complete, and so does a resumed choice, whatever its choices told."""
        if self._current is None or not self._left:
            return False
        self._take_up(self._left.popleft())
        return True

    def wait_s(self, error: grpc.RpcError | errors.QuireError, *, begun: bool, closed: bool = False) -> float | None:
        """Decide on a stream that broke with `error`. Returns the seconds to wait before `request` is sent, or None if
        the connection broke after all choices had ended: then the answer ends with `last_delta`. Raises the error if
        the call must not be sent again.

        After the first response, `request` resumes the first choice that has not ended. Before the first response, the
        unchanged call is sent again in two cases only: a draining router refused it, or gRPC cancelled it before the
        router had `begun` it.

        Raises the typed error for codes that do not mean a broken connection, a router that drains or one that knows no
        peers; more than `reconnect_s` seconds after the last response (or the making of this call, before the first);
        and after the first response of an answer that arrives all at once. Raises `client_closed` if the connection
        broke because the client is `closed`.
        """
        typed = wire.read_error(error, self._address, self.request_id) if isinstance(error, grpc.RpcError) else error
        if closed and typed.code in _BROKEN:
            raise self.client_closed() from error
        left = [index for index, progress in enumerate(self._choices) if not progress.ended]
        if not left and typed.code in _BROKEN:
            return None
        over = monotonic() - self._last_delta_s > self._reconnect_s
        if self._begun:
            again = typed.code in _BROKEN and not self._at_once
        else:
            again = typed.code == _REFUSED or (typed.code == _UNSEEN and not begun)
        if over or not again:
            raise typed from error
        if not self._begun:
            return self._pause_s()
        self._left = deque(left)
        self._take_up(self._left.popleft())
        return self._pause_s()

    def last_delta(self) -> Delta | None:
        """Return the delta that ends a complete answer whose connection broke before the router's usage arrived; else
        None. The delta has an empty text, and the usage that this call can count: the tokens of the prompt and of all
        choices. Numbers that only the router knows are those of the first usage, else 0. A second call returns None."""
        if self._usage_sent:
            return None
        self._usage_sent = True
        return Delta(self.request_id, index=0, text="", usage=self._counted_usage())

    def client_closed(self) -> errors.Aborted:
        """Return the error CLIENT_CLOSED, for a call that ended because its client was closed."""
        return errors.Aborted(
            "CLIENT_CLOSED",
            f"The client of {self._address} was closed before the answer was complete.",
            "Close the client after its last answer, or make a new one.",
            request_id=self.request_id,
        )

    def _pause_s(self) -> float:
        """Count a failure in a row, and return the seconds to wait: 0.1, then twice as long each time, at most 2."""
        self._failures += 1
        return float(min(_MOST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self._failures - 1, 8)))

    def _take_up(self, index: int) -> None:
        """Make `request` ask for this choice alone, with its sample index. If tokens of the choice have arrived, the
        request resumes after them."""
        progress = self._choices[index]
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._first)
        request.n, request.sampling.sample = 1, index
        if progress.ids:
            request.resume.output_ids = pack_i32(progress.ids, "resume")
            request.resume.characters = progress.characters
        self._current, self.request = index, request

    def _usage(self, usage: Usage | None) -> Usage | None:
        """Return the usage to pass on, and note for `last_delta` what was passed on. In an unbroken stream, this is
        `usage` itself. If choices are resumed one by one, the result is None until the last choice has ended. Then the
        result has the prompt's numbers of the first usage, and the completion tokens of all choices."""
        if usage is None:
            return None
        self._prompt_usage = self._prompt_usage or usage
        if self._left:
            return None
        self._usage_sent = True
        return usage if self._current is None else self._counted_usage()

    def _counted_usage(self) -> Usage:
        """Return the prompt's numbers of the first usage, and the completion tokens of all choices."""
        tokens = sum(len(progress.ids) for progress in self._choices)
        known = self._prompt_usage or Usage(self._prompt_tokens, 0, cached_tokens=0)
        return replace(known, completion_tokens=tokens)

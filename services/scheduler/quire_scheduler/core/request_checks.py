"""RequestChecks: decides whether a request may enter the queue. A request that can never run on this replica gets an
error with the reason. If the queue is full, a request gets Overloaded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import DeadlineExceeded, InvalidArgument, Overloaded, Unavailable, spread_retry_s
from quire_common.structured.capability import check_capable

if TYPE_CHECKING:
    from quire_common.credit import WorkerHello
    from quire_common.sequence import RequestContext, Sequence
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.expected_wait import ExpectedWait
    from quire_scheduler.core.pending_queue import PendingQueue
    from quire_scheduler.core.request import Request
    from quire_scheduler.kv.page_pools import PagePools

# A place in a full queue is expected to be free once this share of the waiting requests has been served.
_PLACE_SHARE = 0.1


class RequestChecks:
    """The limits of one replica. `max_len` is the largest number of tokens that prompt and output may have together. It
    follows from the model, the configuration, and the number of pages; the smallest counts."""

    def __init__(
        self,
        config: SchedulerConfig,
        hello: WorkerHello,
        pools: PagePools,
        waiting: PendingQueue,
        expected_wait: ExpectedWait,
    ) -> None:
        self._max_waiting = config.max_waiting
        self._max_wait_s = config.max_queue_wait_s or math.inf
        self._vocab_size = hello.model.vocab_size
        self._capabilities = hello.model.capabilities
        self._waiting = waiting
        self._expected_wait = expected_wait
        of_model = min(hello.model.max_model_len, config.max_model_len or hello.model.max_model_len)
        of_pages = pools.capacity * pools.page_size
        self.max_len = min(of_model, of_pages)
        self._bound_by_pages = of_pages < of_model
        self.draining = False

    def drain(self) -> None:
        """Refuse every request from now on."""
        self.draining = True

    def check_request(self, context: RequestContext, sequence: Sequence, deadline_s: float, now: float) -> None:
        """Raise the QuireError that refuses the request: Unavailable if the replica drains, InvalidArgument if the
        request can never run here, DeadlineExceeded if its deadline has passed. Raise Overloaded if the queue or the
        tenant's part of it is full, or if the request would wait too long. A request with output ids, as of an earlier
        attempt, is not refused for its wait. `deadline_s` is in seconds of the same clock as `now`."""
        if self.draining:
            raise draining_error()
        self._check_sequence(sequence)
        if deadline_s <= now:
            raise deadline_error()
        wait_s = self._expected_wait.wait_s(context)
        free = self._max_waiting - len(self._waiting)
        if free <= 0:
            message = f"{len(self._waiting)} requests wait already, which is the most."
            raise _overloaded("QUEUE_FULL", message, wait_s * _PLACE_SHARE)
        if not self._waiting.policy.room(context, free):
            message = "Too many requests of this tenant wait already."
            raise _overloaded("TENANT_QUEUE_FULL", message, wait_s * _PLACE_SHARE)
        if not len(sequence.output_ids):
            # A request that ran before has waited already, and would lose its tokens.
            self._check_wait(wait_s, deadline_s - now)

    def check_tokens(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Raise InvalidArgument if the request could not go on after these tokens, which another engine sampled."""
        output = np.array([*request.output, *tokens], np.int32)
        self._check_sequence(replace(request.sequence, output_ids=output))

    def _check_sequence(self, sequence: Sequence) -> None:
        """Raise InvalidArgument for an empty prompt, for prompt and output that leave no room for a token within
        `max_len`, a token id outside the vocabulary, or if max_tokens is below 1 or leaves no token to generate. Raise
        Unsupported, which is an InvalidArgument too, for a constraint that the worker cannot apply."""
        prompt, known, stop = sequence.prompt_ids, sequence.known_len, sequence.stop
        if not len(prompt):
            raise InvalidArgument("EMPTY_PROMPT", "The prompt has no tokens.", "Send at least one.", param="prompt")
        if known >= self.max_len:
            raise self._too_long(known)
        for ids in (prompt, sequence.output_ids):
            # A negative id, taken as unsigned, is outside too.
            if len(ids) and int(ids.view(np.uint32).max()) >= self._vocab_size:
                raise InvalidArgument(
                    "BAD_TOKEN_ID",
                    f"A token id lies outside the vocabulary of {self._vocab_size}.",
                    "Tokenize with this model's tokenizer.",
                    param="prompt",
                )
        if stop.max_tokens < 1:
            raise InvalidArgument(
                "BAD_MAX_TOKENS", f"max_tokens is {stop.max_tokens}.", "Ask for at least one token.", param="max_tokens"
            )
        if len(sequence.output_ids) >= stop.max_tokens:
            raise InvalidArgument(
                "NOTHING_TO_GENERATE",
                f"{len(sequence.output_ids)} tokens were emitted already, max_tokens is {stop.max_tokens}.",
                "Resume only what has tokens left.",
                param="max_tokens",
            )
        if sequence.constraint is not None:
            check_capable(self._capabilities, sequence.constraint)

    def _too_long(self, known: int) -> InvalidArgument:
        """Return the InvalidArgument for a sequence of `known` tokens that is too long. If this replica's pages hold
        less than the model's context, the code is PROMPT_EXCEEDS_PAGES, else PROMPT_TOO_LONG."""
        if self._bound_by_pages:
            return InvalidArgument(
                "PROMPT_EXCEEDS_PAGES",
                f"The prompt has {known} tokens, this replica's KV pages hold {self.max_len} with the output.",
                "Shorten the prompt, or give the worker more KV memory.",
                param="prompt",
            )
        return InvalidArgument(
            "PROMPT_TOO_LONG",
            f"The prompt has {known} tokens, the model's context is {self.max_len} with at least one of output.",
            "Shorten the prompt.",
            param="prompt",
        )

    def _check_wait(self, wait_s: float, left_s: float) -> None:
        """Raise Overloaded if the expected wait is at least as long as the `left_s` seconds until the request's
        deadline, or longer than the configured maximum. The error says after how many seconds to retry."""
        if wait_s >= left_s:
            message = f"The request would wait about {wait_s:.1f} s, and its deadline is in {left_s:.1f} s."
            raise _overloaded("DEADLINE_TOO_NEAR", message, wait_s - left_s)
        if wait_s > self._max_wait_s:
            message = f"The request would wait about {wait_s:.1f} s; {self._max_wait_s:g} s are allowed."
            raise _overloaded("QUEUE_WAIT_TOO_LONG", message, wait_s - self._max_wait_s)


def _overloaded(code: str, message: str, wait_s: float) -> Overloaded:
    """Return the Overloaded error of a request that may be tried again in about `wait_s` seconds; the time is spread so
    that not all clients retry at once."""
    fix = "Retry after the given time, or add replicas."
    return Overloaded(code, message, fix, retry_after_s=spread_retry_s(wait_s))


def draining_error() -> Unavailable:
    """Return the error for requests at a draining replica; a router sends the request elsewhere."""
    return Unavailable("DRAINING", "This replica is draining.", "Send the request to another replica.")


def deadline_error() -> DeadlineExceeded:
    """Return the error for a request whose deadline has passed."""
    return DeadlineExceeded(
        "DEADLINE_EXCEEDED", "The request's deadline passed.", "Allow more time, or lower the load."
    )

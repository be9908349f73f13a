"""Whether a request may enter: typed refusals for what can never run here, and Overloaded when the queue is full."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import DeadlineExceeded, InvalidArgument, Overloaded, Unavailable

if TYPE_CHECKING:
    from quire_common.credit import WorkerHello
    from quire_common.sequence import RequestContext, Sequence
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.pending_queue import PendingQueue
    from quire_scheduler.core.request import Request
    from quire_scheduler.core.stats import Rates
    from quire_scheduler.kv.page_pools import PagePools

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class RequestChecks:
    """The bounds of one replica. `max_len` is the longest prompt and output together."""

    def __init__(
        self, config: SchedulerConfig, hello: WorkerHello, pools: PagePools, waiting: PendingQueue, rates: Rates
    ) -> None:
        self._max_waiting = config.max_waiting
        self._vocab_size = hello.model.vocab_size
        self._waiting = waiting
        self._rates = rates
        of_model = min(hello.model.max_model_len, config.max_model_len or hello.model.max_model_len)
        of_pages = pools.capacity * pools.page_size
        self.max_len = min(of_model, of_pages)
        self._bound_by_pages = of_pages < of_model
        self.draining = False

    def drain(self) -> None:
        """Refuse every request from now on."""
        self.draining = True

    def check_request(self, context: RequestContext, sequence: Sequence, deadline_s: float, now: float) -> None:
        """Raise the QuireError that refuses the request: it can never run here, has passed its deadline, the queue is
        full or the replica drains. Returns if it may wait. `deadline_s` is on the clock of `now`."""
        if self.draining:
            raise draining_error()
        self._check_sequence(sequence)
        if deadline_s <= now:
            raise deadline_error()
        if len(self._waiting) >= self._max_waiting:
            raise self._overloaded("QUEUE_FULL", f"{len(self._waiting)} requests wait already, which is the most.")
        if not self._waiting.policy.room(context.tenant, self._max_waiting):
            raise self._overloaded("TENANT_QUEUE_FULL", "Too many requests of this tenant wait already.")

    def check_tokens(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Raise InvalidArgument if the request could not go on after these tokens, which another engine drew."""
        output = np.array([*request.output, *tokens], np.int32)
        self._check_sequence(replace(request.sequence, output_ids=output))

    def _check_sequence(self, sequence: Sequence) -> None:
        """Raise InvalidArgument for an empty or too long prompt, a token id outside the vocabulary, or no token left to
        generate."""
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

    def _too_long(self, known: int) -> InvalidArgument:
        """Return the error for a sequence of `known` tokens that exceeds this replica's pages or the model's
        context."""
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

    def _overloaded(self, code: str, message: str) -> Overloaded:
        return Overloaded(code, message, "Retry later, or add replicas.", retry_after_s=self.retry_after_s())

    def retry_after_s(self) -> float:
        """Return in how many seconds a place should be free: the time to serve a tenth of those who wait, at the recent
        rate and within bounds."""
        rate = self._rates.finishes_per_s
        wait = len(self._waiting) / rate / 10 if rate else _MIN_RETRY_S
        return float(round(min(max(wait, _MIN_RETRY_S), _MAX_RETRY_S), 1))


def draining_error() -> Unavailable:
    """What a draining replica answers; a router sends the request elsewhere."""
    return Unavailable("DRAINING", "This replica is draining.", "Send the request to another replica.")


def deadline_error() -> DeadlineExceeded:
    """The request's own deadline has passed."""
    return DeadlineExceeded(
        "DEADLINE_EXCEEDED", "The request's deadline passed.", "Allow more time, or lower the load."
    )

"""Outcome: the result of one request, with times on the monotonic clock, which all processes of a machine share."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Times are in seconds. `ended_s` is the time at which the answer, or the refusal, was complete. `frames` counts
    the events that carried a choice; a server may put several tokens into one event."""

    index: int = 0
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    frames: int = 0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    told_tokens: list[int] = field(default_factory=list)
    """Of each event that says how many it carries."""
    events: list[str] = field(default_factory=list)
    """The events themselves, where they were asked for."""
    ended_s: float = 0.0

    def fail(self, error: str) -> None:
        """Record that the request has no complete answer."""
        self.error = error

    def add_event(self, now_s: float) -> None:
        """Count an event with a choice, which has arrived at this time (`last_s`): the first sets `first_s`, each later
        one adds the gap since the last event."""
        if self.frames:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.frames += 1
        self.last_s = now_s

    def set_ended(self, now_s: float) -> None:
        """Record the time at which the answer, or the refusal, was complete."""
        self.ended_s = now_s

    def set_usage(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take the server's own counts of tokens."""
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens

    def end(self) -> None:
        """Check and count a complete answer; no time is set here. If the server has sent no usage, or one of 0 output
        tokens, the output tokens are the sum of the counts that events told, or else one per event. An answer without
        any event is a failure; an earlier error stays."""
        if not self.frames and not self.error:
            self.error = "the answer has no token"
        elif not self.output_tokens:
            self.output_tokens = sum(self.told_tokens) or self.frames

    @property
    def ok(self) -> bool:
        """Whether the request has an answer."""
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.sent_s

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 if there is no second token."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def event_tokens(self) -> list[int] | None:
        """Return the number of tokens of each event, as the server reported it, or else one for each. None if these
        numbers do not add up to the output tokens, so that they are not known."""
        counts = self.told_tokens or [1] * self.frames
        return counts if len(counts) == self.frames and sum(counts) == self.output_tokens else None

"""The results of calls in vLLM's form, with timings in addition. They are plain data, which knows nothing of how it was
transferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    # What `decoded_token` shows; may be part of a character.
    token_bytes: bytes = b""


@dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token of a position, and its alternatives by token id, the chosen token included."""

    token_id: int
    logprob: float
    candidates: dict[int, Logprob]


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """The completion has so many tokens of reasoning; 0 if the text contains reasoning."""


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call. `index` is that of the call in its choice. The first piece has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class ToolCall:
    """A tool call. `arguments` are JSON, as the model wrote them."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class HopTiming:
    """Microseconds that a service spent in a phase of this request, over `count` operations. `instance`: the scheduler
    that reported it, if that is known."""

    service: str
    phase: str
    us: int
    count: int
    instance: str = ""


@dataclass(frozen=True)
class Delta:
    """One part of a streamed answer. `finish_reason` is set on the last delta of its choice, and `usage` on the last
    delta of all."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    timings: tuple[HopTiming, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's second token and all that follow."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    hidden_characters: int = 0
    """Characters of tool calls that the request does not want."""

    @property
    def characters(self) -> int:
        """Number of characters of the answer that this delta stands for, as routers count them: text, reasoning, names
        and arguments of tool calls, and hidden characters."""
        calls = sum(len(piece.name) + len(piece.arguments) for piece in self.tool_calls)
        return len(self.text) + len(self.reasoning) + calls + self.hidden_characters


@dataclass
class CompletionOutput:
    """One continuation. `reasoning` and `tool_calls` are apart from the text if the prompt asks for that."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The whole result of a request, which grows by deltas."""

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One for each token of the prompt, the first of which has none."""
    usage: Usage | None = None
    timings: list[HopTiming] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether there is a choice, and every choice has its finish reason."""
        return bool(self.outputs) and all(output.finished() for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int | None:
        """Return the number of prompt tokens that came from a cache; None before the end."""
        return self.usage.cached_tokens if self.usage else None

    def add(self, delta: Delta) -> None:
        """Add a delta. Text, reasoning, tool calls, tokens and logprobs are appended to the choice `delta.index`, which
        is made, with all before it, if it is new. The finish and stop reasons, the usage and the request id replace
        earlier ones, if the delta has them. Pieces of a tool call are joined, and logprobs summed in
        `cumulative_logprob`. The prompt's ids and the timings are appended to the whole result; the prompt's logprobs,
        with None for the first token, replace earlier ones."""
        self.request_id = delta.request_id or self.request_id
        self.prompt_token_ids.extend(delta.prompt_token_ids)
        self.timings.extend(delta.timings)
        self.usage = delta.usage or self.usage
        if delta.prompt_logprobs:
            self.prompt_logprobs = [None, *(entry.candidates for entry in delta.prompt_logprobs)]
        while len(self.outputs) <= delta.index:
            self.outputs.append(CompletionOutput(len(self.outputs)))
        output = self.outputs[delta.index]
        output.text += delta.text
        output.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            while len(output.tool_calls) <= piece.index:
                output.tool_calls.append(ToolCall())
            call = output.tool_calls[piece.index]
            call.id, call.name = call.id or piece.id, call.name or piece.name
            call.arguments += piece.arguments
        output.token_ids.extend(delta.token_ids)
        for entry in delta.logprobs:
            output.logprobs = output.logprobs or []
            output.logprobs.append(entry.candidates)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.logprob
        output.finish_reason = delta.finish_reason or output.finish_reason
        if delta.stop_reason is not None:
            output.stop_reason = delta.stop_reason


@dataclass(frozen=True)
class ModelCard:
    """A model that is being served."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    parameters: int
    capabilities: tuple[str, ...]
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own values of sampling parameters, as its generation_config.json has them."""

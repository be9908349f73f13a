"""A client's request as plain values, the same for HTTP and gRPC. This module knows nothing of replicas or formats, and
does not interpret tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.sequence import Sampling
from quire_router.principal import NO_LIMITS, KeyLimits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire_common.repetition import RepetitionDetection
    from quire_common.structured.constraint import Constraint
    from quire_common.thinking import ThinkingBudget
    from quire_router.sequences.structured import AnswerStructure


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, to be encoded."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """int32 token ids, used as they are."""

    ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, as JSON, to be rendered by the model's template."""

    messages_json: str
    tools_json: str = ""
    template_kwargs_json: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""
    """A template to use instead of the model's. Tokenizers refuse it unless they run with
    --allow-request-chat-template."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Parsing:
    """The parts that a tokenizer separates in an answer's text: tool calls, reasoning, or both. `tools_json` is
    OpenAI's list of tools. `prompt_end` is a quire.v1.PromptEnd, which is set when the prompt is rendered."""

    tool_calls: bool = False
    reasoning: bool = False
    tools_json: str = ""
    prompt_end: int = 0


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for turning tokens into text, and the strings that end the text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    parsing: Parsing | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: tenant and limits of the API key, request id, trace headers, priority and timeout.
    `tenant_name` is the tenant's label in metrics. `timeout_s` 0: no timeout."""

    request_id: str
    tenant: str = ""
    tenant_name: str = ""
    traceparent: str = ""
    tracestate: str = ""
    priority: int = 0
    timeout_s: float = 0.0
    limits: KeyLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class Wants:
    """The contents that the client wants in the answer beside the text. `stream`: deltas are sent as they come;
    otherwise one delta is sent at a sequence's end. `every_token`: a token without text is a delta, too."""

    stream: bool = False
    every_token: bool = False
    token_ids: bool = False
    tokens_by_id: bool = False
    """Whether logprobs name their tokens by ids."""
    timings: bool = False
    echo: bool = False
    logprobs: bool = True
    """Whether logprobs are shown if `sampling` asks for them. `sampling` may also ask for them to find the best of
    several answers."""
    reasoning: bool = True
    """Whether reasoning that was parsed is shown."""
    parallel_calls: bool = True
    """Whether more than the first tool call is shown."""
    prompt_logprobs: int = -1
    """Alternatives that are shown for each prompt token; -1: no prompt logprobs are shown. For echo, `sampling` may ask
    for prompt logprobs all the same."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The output that the client has of its one choice from a broken stream: the bytes of int32 tokens, and the number
    of characters of text."""

    output_ids: bytes
    characters: int

    @property
    def tokens(self) -> int:
        """How many tokens the client has."""
        return len(self.output_ids) // 4


@dataclass(frozen=True, slots=True)
class KvSource:
    """The engine and transfer that have a prompt's KV pages, as the client names them. The router looks the engine up,
    and compares the address with that of discovery. It never connects to the client's address."""

    engine: str
    transfer_id: bytes
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One request to generate. Every prompt yields n choices; choice i of prompt p has the index p * n + i. The
    sequences of one prompt are siblings.

    With `best_of`, more siblings than n run, and the client gets the n likeliest. `prompt_only`: the client gets no
    generated output; the engine samples one token, because every sequence has at least one.

    `seed` None: the router picks a seed. `max_tokens` None: `default_max_tokens` applies; if that is None, too, the
    rest of the context. Some fields are completed later. When the prompts are encoded, `bad_words` are added to
    `sampling.controls`, `thinking` is made from `thinking_tokens`, and `constraint` from `structure`. When the
    sequences are made, `sampling.seed` and `sampling.sample` are set.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition: RepetitionDetection | None = None
    thinking_tokens: int | None = None
    """The most tokens that the model may think."""
    thinking: ThinkingBudget | None = None
    structure: AnswerStructure | None = None
    """The constraint that the answer must match."""
    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()
    """The parts of `structure` that are not enforced."""
    truncate_to: int | None = None
    """The number of tokens at the end of each prompt that are kept; -1: as many as the context has room for."""
    text: TextOptions = field(default_factory=TextOptions)
    add_special_tokens: bool = True
    cache_salt: str = ""
    first_sample: int = 0
    """Sample index of the first choice; part of the random key."""
    resume: Resume | None = None
    session: str = ""
    """Requests of equal sessions may be placed together."""
    wants: Wants = field(default_factory=Wants)
    beams: bool = False
    """Whether to find the n likeliest answers by beam search, instead of sampling n answers."""
    length_penalty: float = 1.0
    best_of: int = 1
    prompt_only: bool = False
    kv_export: bool = False
    """Whether to compute the prompt, sample one token, and keep the KV pages. The answer says how to pull them."""
    kv_source: KvSource | None = None

    @property
    def siblings(self) -> int:
        """Sequences that each prompt needs."""
        return max(self.n, self.best_of)

    @property
    def weight(self) -> int:
        """Sequences that all prompts together need."""
        return len(self.prompts) * self.siblings

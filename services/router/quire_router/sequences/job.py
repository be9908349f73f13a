"""What a client asked for, the same over HTTP and gRPC. Knows nothing of tokens' meaning, replicas or formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.sequence import Sampling
from quire_router.principal import KeyLimits

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
    """In the place of the model's; tokenizers refuse it unless they were told not to."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Parsing:
    """The parts that a tokenizer takes out of an answer's text. `tools_json` is OpenAI's list; `prompt_end` a
    quire.v1.PromptEnd, known once the prompt is rendered."""

    tool_calls: bool = False
    reasoning: bool = False
    tools_json: str = ""
    prompt_end: int = 0


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text, and which strings end it."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    parsing: Parsing | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller: the tenant and the limits of the API key, ids, the trace, and when to give up. `tenant_name` is the
    tenant's label in metrics."""

    request_id: str
    tenant: str = ""
    tenant_name: str = ""
    traceparent: str = ""
    tracestate: str = ""
    priority: int = 0
    timeout_s: float = 0.0
    limits: KeyLimits = field(default_factory=KeyLimits)


@dataclass(frozen=True, slots=True)
class Wants:
    """What the answer must carry beside text. `stream`: deltas as they come; otherwise one at a sequence's
    end."""

    stream: bool = False
    every_token: bool = False
    token_ids: bool = False
    tokens_by_id: bool = False
    """Whether logprobs name their tokens by ids."""
    timings: bool = False
    echo: bool = False
    logprobs: bool = True
    """Whether logprobs are shown where `sampling` asks for them; it may do so to find the best of several."""
    reasoning: bool = True
    """Whether reasoning that was parsed is shown."""
    parallel_calls: bool = True
    """Whether more than the first tool call is shown."""
    prompt_logprobs: int = -1
    """Alternatives of each prompt token; -1: none are shown, though `sampling` may ask for them, for echo's sake."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What the client has of the one choice: int32 tokens, as a column, and characters of text."""

    output_ids: bytes
    characters: int

    @property
    def tokens(self) -> int:
        """How many tokens the client has."""
        return len(self.output_ids) // 4


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where a client says that its prompt was prefilled. Its words: looked up and compared, never followed."""

    engine: str
    transfer_id: bytes
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Every prompt yields n choices; choice i of prompt p has the index p * n + i.

    With `best_of`, more siblings than n run, and the n likeliest are told. `prompt_only`: nothing is generated that
    anybody is told of; one token is drawn, since that is what an engine does.

    `seed` None: the router picks one. `max_tokens` None: `default_max_tokens`, or the rest of the context where that is
    None too. `sampling.seed` and `.sample` are set when the choices are made, `bad_words` join `sampling.controls` and
    `thinking_tokens` become `thinking` when prompts are encoded, as `structure` becomes `constraint`.
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
    """How much the model may think."""
    thinking: ThinkingBudget | None = None
    structure: AnswerStructure | None = None
    """The constraint that the answer must match."""
    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()
    """The parts of `structure` that are not enforced."""
    truncate_to: int | None = None
    """Keep so many tokens of each prompt, the last ones; -1: as many as the context has room for."""
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
    """Whether to search for the n likeliest answers instead of drawing n."""
    length_penalty: float = 1.0
    best_of: int = 1
    prompt_only: bool = False
    kv_export: bool = False
    """Compute the prompt, draw one token, and keep the pages for whoever has what the answer says."""
    kv_source: KvSource | None = None

    @property
    def siblings(self) -> int:
        """Sequences that each prompt needs."""
        return max(self.n, self.best_of)

    @property
    def weight(self) -> int:
        """Sequences that all prompts together need."""
        return len(self.prompts) * self.siblings

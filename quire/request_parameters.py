"""The parameters of a request, each declared once: name, type, bounds, default, place in the contract, description.

`SamplingParams`, the HTTP tables and with them OpenAPI, the gRPC codecs, the flags of `quire bench serve`, the worker's
columns and docs/parameters.md derive from this table; services read it through quire_common.request_parameters. A
parameter has one name in Python, HTTP, gRPC and in the domain records. Knows no service, and no route but by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["number", "int", "bool", "strings", "ints", "biases", "object"]
Group = Literal["temperature", "limit", "penalty", "control", "seed", "report", "length", "stop", "text", "choice"]
"""`limit`: a number that limits which tokens may be drawn. `penalty`: a number of a logit control."""

MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1
# The least float32 that is held in full: below it a GPU computes with 0.
MIN_FLOAT32 = 2.0**-126
MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Bounds are of one value; `high` is the most characters of each string where these are several."""

    name: str
    group: Group
    kind: Kind
    wire: str
    """The field of quire.v1.GenerateRequest that carries the value."""
    description: str
    cost: str
    """The cost class of docs/limits.md: what the cost of a value grows with."""
    default: Any = None
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    """`low` itself is refused."""
    least: float | None = None
    """The least value that engines take, if other than `low`."""
    instead_of_low: str = ""
    """The fix that the error for a refused `low` gives."""
    engine_bounds: str = ""
    """The bounds in the words of the engine's error, where these are not made of the numbers."""
    max_items: int = 0
    limit: str = ""
    """The bound in words, if the numbers do not say all."""
    client_checks_high: bool = True
    """Whether the Python client refuses more than `high`; otherwise the router alone does."""
    always_sent: bool = True
    """Whether engines are told a value that changes nothing."""
    also_in: tuple[str, ...] = ()
    """Routes beside completions, chat and generate that take it: responses, messages."""
    bench_flag: bool = False
    """Whether `quire bench serve` has a flag of this name."""

    @property
    def is_number(self) -> bool:
        """Whether requests carry one number of it, to which engines apply the table's bounds."""
        return self.group in ("temperature", "limit", "penalty")

    @property
    def engine_low(self) -> float:
        """The least value that an engine takes. A negative integer of a limit asks for no limit, and does not reach an
        engine."""
        if self.least is not None:
            return self.least
        if self.above_low:
            return math.nextafter(self.low, math.inf)
        return max(self.low, 0) if self.group == "limit" else self.low

    @property
    def engine_range(self) -> str:
        """Return the bounds in the words of an engine's error."""
        if self.engine_bounds:
            return self.engine_bounds
        if self.above_low:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"between {self.low:g} and {self.high:g}"


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        name="temperature", group="temperature", kind="number", wire="sampling.temperature", cost="token",
        default=1.0, low=0, high=100, client_checks_high=False, also_in=("responses", "messages"),
        description="Divides the logits before a token is drawn; 0 is greedy.",
    ),
    Parameter(
        name="top_k", group="limit", kind="int", wire="sampling.top_k", cost="token",
        default=0, low=-1, high=MAX_INT32, engine_bounds="0 or -1 (all), or positive",
        also_in=("responses", "messages"), bench_flag=True,
        description="Keeps so many of the likeliest tokens, and the equals of the last; 0 and -1 keep all.",
    ),
    Parameter(
        name="top_p", group="limit", kind="number", wire="sampling.top_p", cost="token",
        default=1.0, low=0, high=1, above_low=True, instead_of_low="temperature 0 is greedy",
        also_in=("responses", "messages"), bench_flag=True,
        description="Keeps the likeliest tokens whose mass reaches this share; 1 keeps all.",
    ),
    Parameter(
        name="min_p", group="limit", kind="number", wire="sampling.min_p", cost="token",
        default=0.0, low=0, high=1, also_in=("responses",), bench_flag=True,
        description="Keeps tokens at least this many times as likely as the likeliest; 0 keeps all.",
    ),
    Parameter(
        name="typical_p", group="limit", kind="number", wire="sampling.typical_p", cost="token",
        default=1.0, low=0, high=1, above_low=True, instead_of_low="1 keeps all", always_sent=False,
        also_in=("responses",), bench_flag=True,
        description="Keeps the tokens whose logprobs are nearest to the mean, until their mass reaches this share; 1 "
        "keeps all.",
    ),
    Parameter(
        name="presence_penalty", group="penalty", kind="number", wire="sampling.presence_penalty", cost="token",
        default=0.0, low=-2, high=2, engine_bounds="from -2 to 2", also_in=("responses",),
        description="Taken off the logit of each token that the output has.",
    ),
    Parameter(
        name="frequency_penalty", group="penalty", kind="number", wire="sampling.frequency_penalty", cost="token",
        default=0.0, low=-2, high=2, engine_bounds="from -2 to 2", also_in=("responses",),
        description="Taken off a token's logit once for each time that the output has the token.",
    ),
    Parameter(
        name="repetition_penalty", group="penalty", kind="number", wire="sampling.repetition_penalty", cost="token",
        default=1.0, low=0, high=MAX_FLOAT32, above_low=True, least=MIN_FLOAT32, instead_of_low="1 is none",
        engine_bounds=f"above 0, from {MIN_FLOAT32:.2g} to {MAX_FLOAT32:.2g}", client_checks_high=False,
        also_in=("responses",), bench_flag=True,
        description="Divides positive logits of tokens that prompt or output have, and multiplies negative ones.",
    ),
    Parameter(
        name="logit_bias", group="control", kind="biases", wire="sampling.logit_bias", cost="token",
        low=0, high=MAX_INT32, max_items=1024,
        description="Added to the logits of tokens, by token id; cut to -100 and 100.",
    ),
    Parameter(
        name="allowed_token_ids", group="control", kind="ints", wire="sampling.allowed_token_ids", cost="sequence",
        low=0, high=MAX_INT32, max_items=16_384,
        description="Only these tokens may be drawn.",
    ),
    Parameter(
        name="bad_words", group="control", kind="strings", wire="bad_words", cost="token",
        default=(), high=256, max_items=512,
        description="Texts that the output may not come to contain; with and without a space before each.",
    ),
    Parameter(
        name="logits_processors", group="control", kind="strings", wire="sampling.logits_processors", cost="token",
        default=(), high=256, max_items=16,
        description="Names of processors that the worker allows; see docs/python.md.",
    ),
    Parameter(
        name="seed", group="seed", kind="int", wire="sampling.seed", cost="once",
        low=-(2**63), high=MAX_UINT64, also_in=("responses",),
        description="The key of the random draws; without one, and for -1, the router chooses.",
    ),
    Parameter(
        name="logprobs", group="report", kind="int", wire="sampling.logprobs", cost="answer",
        low=0, high=MAX_INT32, limit="`--max-logprobs`",
        description="So many alternatives are reported for each token; 0: the token alone. Chat: a boolean, with "
        "`top_logprobs`.",
    ),
    Parameter(
        name="prompt_logprobs", group="report", kind="int", wire="sampling.prompt_logprobs", cost="prompt",
        low=0, high=MAX_INT32, limit="`--max-logprobs`",
        description="The same for each token of the prompt.",
    ),
    Parameter(
        name="max_tokens", group="length", kind="int", wire="max_tokens", cost="answer",
        low=1, high=MAX_INT32, limit="the model's context",
        description="Tokens at most. Without it: 16; in conversations, what the context has room for.",
    ),
    Parameter(
        name="min_tokens", group="length", kind="int", wire="min_tokens", cost="answer",
        default=0, low=0, high=MAX_INT32, limit="max_tokens", also_in=("responses",),
        description="No stop token is drawn before so many tokens.",
    ),
    Parameter(
        name="truncate_prompt_tokens", group="length", kind="int", wire="truncate_prompt_tokens", cost="prompt",
        low=-1, high=MAX_INT32,
        description="Keeps so many tokens of the prompt, the last ones; -1: as many as the context has room for.",
    ),
    Parameter(
        name="thinking_token_budget", group="length", kind="int", wire="thinking_token_budget", cost="token",
        low=-1, high=MAX_INT32,
        description="Tokens that a model may think before the end of thinking is forced; -1: no bound.",
    ),
    Parameter(
        name="stop", group="stop", kind="strings", wire="stop", cost="sequence",
        default=(), high=512, max_items=64, also_in=("responses",),
        description="Texts that end the answer.",
    ),
    Parameter(
        name="stop_token_ids", group="stop", kind="ints", wire="stop_token_ids", cost="sequence",
        default=(), low=0, high=MAX_INT32, max_items=1024,
        description="Tokens that end the answer.",
    ),
    Parameter(
        name="ignore_eos", group="stop", kind="bool", wire="ignore_eos", cost="answer",
        default=False, also_in=("responses",),
        description="The model's own end of sequence does not end the answer.",
    ),
    Parameter(
        name="repetition_detection", group="stop", kind="object", wire="repetition_detection", cost="token",
        limit="see the fields of its own",
        description="Ends an answer whose last tokens are one pattern several times.",
    ),
    Parameter(
        name="include_stop_str_in_output", group="text", kind="bool", wire="include_stop_str_in_output", cost="once",
        default=False,
        description="The text that ended the answer is part of it.",
    ),
    Parameter(
        name="skip_special_tokens", group="text", kind="bool", wire="skip_special_tokens", cost="once",
        default=True,
        description="Special tokens have no text.",
    ),
    Parameter(
        name="spaces_between_special_tokens", group="text", kind="bool", wire="spaces_between_special_tokens",
        cost="once", default=True,
        description="Special tokens that have text are parted by spaces.",
    ),
    Parameter(
        name="n", group="choice", kind="int", wire="n", cost="sequence",
        default=1, low=1, high=MAX_INT32, limit="`--max-n`",
        description="Answers to each prompt.",
    ),
    Parameter(
        name="use_beam_search", group="choice", kind="bool", wire="beam_search", cost="sequence",
        default=False, limit="n beams",
        description="The n likeliest answers are searched for.",
    ),
    Parameter(
        name="length_penalty", group="choice", kind="number", wire="beam_search.length_penalty", cost="once",
        default=1.0, low=-10, high=10,
        description="The power of its length by which a beam's logprob is divided.",
    ),
)  # fmt: skip  # one row is one paragraph
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
LIMITS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.group == "limit")
DRAW_NUMBERS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.group in ("temperature", "limit"))
"""The numbers that a draw depends on, beside its logits and its random key."""
PENALTIES: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.group == "penalty")
NUMBERS: tuple[Parameter, ...] = (*DRAW_NUMBERS, *PENALTIES)
BENCH_FLAGS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.bench_flag)

"""The parameters of a request, each declared once: name, type, bounds, default, place in the contract, description.

Many parts of Quire derive from this table: `SamplingParams`, the HTTP tables, OpenAPI, the gRPC codecs, the flags of
`quire bench serve`, the worker's columns and docs/parameters.md. Services read it through
quire_common.request_parameters. A parameter has one name in Python, HTTP, gRPC and in the domain records. This module
knows no service, and knows routes only by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["number", "int", "bool", "strings", "ints", "biases", "object"]
Group = Literal["temperature", "limit", "penalty", "control", "seed", "report", "length", "stop", "text", "choice"]
"""`limit`: a number that limits which tokens may be sampled. `penalty`: a number of a logit control."""

MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1
# The least float32 that is held in full: below it a GPU computes with 0.
MIN_FLOAT32 = 2.0**-126
MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter. The bounds apply to one value; if there are several strings, `high` is the greatest number of
    characters of each."""

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
    generation_config: str = ""
    """The field of generation_config.json in which a model has a default of its own."""

    @property
    def is_number(self) -> bool:
        """Whether the parameter is a single number, to which engines apply the table's bounds."""
        return self.group in ("temperature", "limit", "penalty")

    @property
    def engine_low(self) -> float:
        """Return the least value that an engine accepts: `least` if it is set, the next float above `low` if `low` is
        refused, else `low`. For a parameter of the group "limit", the result is at least 0, since a negative limit
        means none and is not sent to engines."""
        if self.least is not None:
            return self.least
        if self.above_low:
            return math.nextafter(self.low, math.inf)
        return max(self.low, 0) if self.group == "limit" else self.low

    @property
    def engine_range(self) -> str:
        """Return the bounds in the words of an engine's error: `engine_bounds`, or else a text made of `low` and
        `high`."""
        if self.engine_bounds:
            return self.engine_bounds
        if self.above_low:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"between {self.low:g} and {self.high:g}"


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        name="temperature", group="temperature", kind="number", wire="sampling.temperature", cost="token",
        default=1.0, low=0, high=100, client_checks_high=False, also_in=("responses", "messages"),
        generation_config="temperature",
        description="The worker divides the logits by this number before it samples a token. With 0, the worker always "
        "takes the likeliest token.",
    ),
    Parameter(
        name="top_k", group="limit", kind="int", wire="sampling.top_k", cost="token",
        default=0, low=-1, high=MAX_INT32, engine_bounds="0 or -1 (all), or positive",
        also_in=("responses", "messages"), bench_flag=True,
        generation_config="top_k",
        description="The worker keeps this number of the likeliest tokens, and further tokens that are as likely as "
        "the last of them. 0 and -1 keep all tokens.",
    ),
    Parameter(
        name="top_p", group="limit", kind="number", wire="sampling.top_p", cost="token",
        default=1.0, low=0, high=1, above_low=True, instead_of_low="temperature 0 is greedy",
        also_in=("responses", "messages"), bench_flag=True,
        generation_config="top_p",
        description="The worker keeps the likeliest tokens until their probabilities add up to this share. 1 keeps all "
        "tokens.",
    ),
    Parameter(
        name="min_p", group="limit", kind="number", wire="sampling.min_p", cost="token",
        default=0.0, low=0, high=1, also_in=("responses",), bench_flag=True,
        generation_config="min_p",
        description="The worker keeps tokens with at least this share of the likeliest token's probability. 0 keeps "
        "all tokens.",
    ),
    Parameter(
        name="typical_p", group="limit", kind="number", wire="sampling.typical_p", cost="token",
        default=1.0, low=0, high=1, above_low=True, instead_of_low="1 keeps all", always_sent=False,
        also_in=("responses",), bench_flag=True,
        description="The worker keeps the tokens whose logprobs are nearest to the mean logprob (weighted by "
        "probability), until their probabilities add up to this share. 1 keeps all tokens.",
    ),
    Parameter(
        name="presence_penalty", group="penalty", kind="number", wire="sampling.presence_penalty", cost="token",
        default=0.0, low=-2, high=2, engine_bounds="from -2 to 2", also_in=("responses",),
        description="This number is subtracted from the logit of each token that the answer contains.",
    ),
    Parameter(
        name="frequency_penalty", group="penalty", kind="number", wire="sampling.frequency_penalty", cost="token",
        default=0.0, low=-2, high=2, engine_bounds="from -2 to 2", also_in=("responses",),
        description="This number is subtracted from a token's logit once for each time that the answer contains the "
        "token.",
    ),
    Parameter(
        name="repetition_penalty", group="penalty", kind="number", wire="sampling.repetition_penalty", cost="token",
        default=1.0, low=0, high=MAX_FLOAT32, above_low=True, least=MIN_FLOAT32, instead_of_low="1 is none",
        engine_bounds=f"above 0, from {MIN_FLOAT32:.2g} to {MAX_FLOAT32:.2g}", client_checks_high=False,
        also_in=("responses",), bench_flag=True,
        generation_config="repetition_penalty",
        description="This number makes tokens that the prompt or the answer contains less likely. It divides positive "
        "logits of these tokens, and multiplies negative ones.",
    ),
    Parameter(
        name="logit_bias", group="control", kind="biases", wire="sampling.logit_bias", cost="token",
        low=0, high=MAX_INT32, max_items=1024,
        description="Maps token ids to numbers that are added to the logits of these tokens. Numbers below -100 "
        "count as -100, and numbers above 100 count as 100.",
    ),
    Parameter(
        name="allowed_token_ids", group="control", kind="ints", wire="sampling.allowed_token_ids", cost="sequence",
        low=0, high=MAX_INT32, max_items=16_384,
        description="Only these tokens may be sampled.",
    ),
    Parameter(
        name="bad_words", group="control", kind="strings", wire="bad_words", cost="token",
        default=(), high=256, max_items=512,
        description="The answer contains none of these texts, with or without a space before it.",
    ),
    Parameter(
        name="logits_processors", group="control", kind="strings", wire="sampling.logits_processors", cost="token",
        default=(), high=256, max_items=16,
        description="Names of logits processors that the worker has loaded ([how](python.md#logits-processors)).",
    ),
    Parameter(
        name="seed", group="seed", kind="int", wire="sampling.seed", cost="once",
        low=-(2**63), high=MAX_UINT64, also_in=("responses",),
        description="The seed of the random numbers. If the seed is missing or -1, the router chooses a random seed.",
    ),
    Parameter(
        name="logprobs", group="report", kind="int", wire="sampling.logprobs", cost="answer",
        low=0, high=MAX_INT32, limit="at most `--max-logprobs`",
        description="For each token of the answer, the logprobs of this number of likeliest tokens are returned. 0 "
        "returns only the logprob of the answer's token. In chat requests, `logprobs` is true or false, and "
        "`top_logprobs` is the number.",
    ),
    Parameter(
        name="prompt_logprobs", group="report", kind="int", wire="sampling.prompt_logprobs", cost="prompt",
        low=0, high=MAX_INT32, limit="at most `--max-logprobs`",
        description="For each token of the prompt, the logprobs of this number of likeliest tokens are returned.",
    ),
    Parameter(
        name="max_tokens", group="length", kind="int", wire="max_tokens", cost="answer",
        low=1, high=MAX_INT32, limit="at most the model's context length",
        generation_config="max_new_tokens",
        description="The largest number of tokens in the answer. The default is 16. In chat requests, the default is "
        "as many as the context has room for.",
    ),
    Parameter(
        name="min_tokens", group="length", kind="int", wire="min_tokens", cost="answer",
        default=0, low=0, high=MAX_INT32, limit="at most max_tokens", also_in=("responses",),
        description="No stop token is sampled before the answer has this number of tokens.",
    ),
    Parameter(
        name="truncate_prompt_tokens", group="length", kind="int", wire="truncate_prompt_tokens", cost="prompt",
        low=-1, high=MAX_INT32,
        description="The router keeps only this number of tokens at the prompt's end. -1 leaves room for the answer, "
        "and keeps at least one token.",
    ),
    Parameter(
        name="thinking_token_budget", group="length", kind="int", wire="thinking_token_budget", cost="token",
        low=-1, high=MAX_INT32,
        description="The largest number of tokens of the model's reasoning. After these, the worker forces the "
        "reasoning to end. With -1, there is no limit.",
    ),
    Parameter(
        name="stop", group="stop", kind="strings", wire="stop", cost="sequence",
        default=(), high=512, max_items=64, also_in=("responses",),
        description="Texts that end the answer.",
    ),
    Parameter(
        name="stop_token_ids", group="stop", kind="ints", wire="stop_token_ids", cost="sequence",
        default=(), low=0, high=MAX_INT32, max_items=1024,
        description="Token ids that end the answer.",
    ),
    Parameter(
        name="ignore_eos", group="stop", kind="bool", wire="ignore_eos", cost="answer",
        default=False, also_in=("responses",),
        description="The model's end-of-sequence token does not end the answer.",
    ),
    Parameter(
        name="repetition_detection", group="stop", kind="object", wire="repetition_detection", cost="token",
        limit="an object; [limits.md](limits.md) has its fields",
        description="An answer ends if its last tokens repeat one pattern several times.",
    ),
    Parameter(
        name="include_stop_str_in_output", group="text", kind="bool", wire="include_stop_str_in_output", cost="once",
        default=False,
        description="If a text of `stop` ends the answer, the answer includes this text.",
    ),
    Parameter(
        name="skip_special_tokens", group="text", kind="bool", wire="skip_special_tokens", cost="once",
        default=True,
        description="Special tokens are left out of the answer's text.",
    ),
    Parameter(
        name="spaces_between_special_tokens", group="text", kind="bool", wire="spaces_between_special_tokens",
        cost="once", default=True,
        description="Special tokens in the answer's text are separated by spaces.",
    ),
    Parameter(
        name="n", group="choice", kind="int", wire="n", cost="sequence",
        default=1, low=1, high=MAX_INT32, limit="at most `--max-n`",
        description="Number of answers to each prompt.",
    ),
    Parameter(
        name="use_beam_search", group="choice", kind="bool", wire="beam_search", cost="sequence",
        default=False, limit="`n`, the number of beams, is at most `--max-n`",
        description="Quire searches for the `n` likeliest answers instead of sampling. In Python: `BeamSearchParams`.",
    ),
    Parameter(
        name="length_penalty", group="choice", kind="number", wire="beam_search.length_penalty", cost="once",
        default=1.0, low=-10, high=10,
        description="Beam search divides an answer's logprob by a power of the answer's length. This number is the "
        "exponent.",
    ),
)  # fmt: skip  # one row is one paragraph
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
LIMITS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.group == "limit")
SAMPLING_NUMBERS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.group in ("temperature", "limit"))
"""The numbers on which sampling depends, beside the logits and the random key."""
PENALTIES: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.group == "penalty")
NUMBERS: tuple[Parameter, ...] = (*SAMPLING_NUMBERS, *PENALTIES)
BENCH_FLAGS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.bench_flag)
MODEL_DEFAULTS: tuple[Parameter, ...] = tuple(each for each in PARAMETERS if each.generation_config)
"""The parameters of which a model may have a default of its own."""

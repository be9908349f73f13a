"""SamplingParams: the parameters of a continuation, with vLLM's names, meanings and defaults. A bad value raises a
typed error at once."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import InvalidArgument
from quire.request_parameters import NUMBERS, Parameter

_MAX_U32 = 2**32 - 1
_MAX_U64 = 2**64 - 1
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """An answer ends when its last tokens repeat a pattern of `min_pattern_size` to `max_pattern_size` tokens
    `min_count` times. Raises InvalidArgument for `min_count` below 2, which its default is, or a size out of bounds."""

    max_pattern_size: int
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        _integer("max_pattern_size", self.max_pattern_size, 1, 2**31 - 1)
        _integer("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        _integer("min_count", self.min_count, 2, 2**31 - 1)


@dataclass(frozen=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, and of a beam search that the router runs, with vLLM's names and defaults.
    Raises InvalidArgument for a number of a wrong type or out of bounds."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, 1024)
        _integer("max_tokens", self.max_tokens, 1, _MAX_U32)
        _number("temperature", self.temperature, 0, math.inf)
        _number("length_penalty", self.length_penalty, 0, math.inf)

    def sampling(self) -> SamplingParams:
        """Return the SamplingParams of a beam search that the router runs: `n` is the beam width, the temperature is 0,
        whatever this object has. The length penalty is sent apart from them."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The constraint that an answer must match, by vLLM's names. Exactly one of the first six fields is set (not None
    or False); otherwise, or for a text, an object or a list of choices of a wrong type, raises InvalidArgument."""

    # A JSON schema, as an object or as text.
    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    # EBNF (GBNF) or Lark.
    grammar: str | None = None
    # Any JSON object.
    json_object: bool | None = None
    # Free text with tags in it, as JSON.
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    # A regular expression for the whitespace between values of JSON.
    whitespace_pattern: str | None = None
    # Ours: refuse what of a schema cannot be enforced, instead of passing over it.
    strict: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _bad_structure(" and ".join(given) or "nothing", f"exactly one of {', '.join(_STRUCTURES)}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise _bad_structure(f"{name}={getattr(self, name)!r}", f"a string as {name}")
        for name in ("json", "structural_tag"):
            if not isinstance(getattr(self, name), str | Mapping | None):
                raise _bad_structure(f"{name}={getattr(self, name)!r}", f"an object or a string as {name}")
        choice = self.choice
        if choice is not None and not (_is_list(choice) and all(isinstance(each, str) for each in choice)):
            raise _bad_structure(f"choice={choice!r}", "a list of strings as choice")

    @property
    def kind(self) -> str:
        """Return the name of the one field that is set, as the contract calls it: `json_schema` for `json`, else the
        field's own name."""
        (name,) = (name for name in _STRUCTURES if getattr(self, name) not in (None, False))
        return "json_schema" if name == "json" else name

    @property
    def text(self) -> str:
        """Return the value of the one field that is set, as the contract's text: a string as it is, an object or a list
        of choices as JSON. Empty for `json_object`."""
        value = {"json_schema": self.json, "json_object": ""}.get(self.kind, getattr(self, self.kind, None))
        if isinstance(value, str):
            return value
        return json_module.dumps(value if isinstance(value, Mapping) else list(value or ()), default=dict)


@dataclass(frozen=True)
class SamplingParams:
    """Immutable; `clone(temperature=0)` gives a changed copy. Raises InvalidArgument for a number, a list or a mapping
    of a wrong type, a number out of bounds (some upper bounds are left to the router), an empty string, `best_of` below
    `n`, `min_tokens` above `max_tokens`, and `ignore_eos` beside `structured_outputs`."""

    n: int = 1
    # The number of answers that are sampled; None: n. The n likeliest by mean logprob per token are returned, in this
    # order.
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # 0 is greedy.
    temperature: float = 1.0
    top_p: float = 1.0
    # 0 or -1: all.
    top_k: int = 0
    min_p: float = 0.0
    # None or -1: chosen by the router.
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    # None: up to the model's context; for conversations alone so far.
    max_tokens: int | None = 16
    min_tokens: int = 0
    # Alternatives per token: None no logprobs, 0 the chosen token alone.
    logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    # Alternatives per prompt token; None: nothing is said of the prompt.
    prompt_logprobs: int | None = None
    # Keep so many tokens of the prompt, the last ones; -1: as many as the context has room for.
    truncate_prompt_tokens: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    # Most tokens that the model may think before its answer; None or -1: as many as it likes.
    thinking_token_budget: int | None = None
    # False: token ids alone, no text.
    detokenize: bool = True
    # Of those that the worker allows, by name; see docs/python.md. Code does not travel.
    logits_processors: Sequence[str] | None = None
    # The constraint that the answer must match.
    structured_outputs: StructuredOutputsParams | None = None
    # Locally typical sampling; 1: all.
    typical_p: float = 1.0

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, _MAX_U32)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, _MAX_U32)
        for parameter in NUMBERS:
            _check_number(parameter, getattr(self, parameter.name))
        if self.seed is not None:
            _integer("seed", self.seed, -1, _MAX_U64)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _MAX_U32)
        _integer("min_tokens", self.min_tokens, 0, _MAX_U32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, _MAX_U32)
        for name in ("truncate_prompt_tokens", "thinking_token_budget"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, 2**31 - 1)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "logits_processors"):
            if getattr(self, name) and not _is_list(getattr(self, name)):
                raise _bad(name, getattr(self, name), "a list")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _integer(name, token, 0, 2**31 - 1)
        if not isinstance(self.logit_bias or {}, Mapping):
            raise _bad("logit_bias", self.logit_bias, "an object of token ids and numbers")
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100, 100)
        if not isinstance(self.stop, Iterable | None) or not all(isinstance(t, str) and t for t in self.stop_strings):
            raise _bad("stop", self.stop, "strings that are not empty")
        if any(not isinstance(word, str) or not word for word in self.bad_words or ()):
            raise _bad("bad_words", self.bad_words, "strings that are not empty")
        if any(not isinstance(name, str) or not name for name in self.logits_processors or ()):
            raise _bad("logits_processors", self.logits_processors, "names of processors that the worker allows")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise _bad("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
        if self.structured_outputs is not None and self.ignore_eos:
            raise _bad("ignore_eos", True, "false with structured_outputs, which say where the answer ends")

    @property
    def told_at_once(self) -> bool:
        """Whether the answer arrives as a whole, and not as a stream: the best `n` of more answers are known only at
        the end."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple: empty for None, of one item for a single string."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with these changes, which are checked as in a new object."""
        return replace(self, **changes)


def _bad_structure(value: str, wanted: str) -> InvalidArgument:
    """Return the InvalidArgument that says which value of structured_outputs is wrong, cut to 200 characters, and what
    must be there."""
    return InvalidArgument(
        "BAD_SAMPLING_PARAM",
        f"structured_outputs has {value[:200]}.",
        f"structured_outputs must have {wanted}.",
        param="structured_outputs",
    )


def _is_list(value: object) -> bool:
    """Whether the value has items, and is no text."""
    return isinstance(value, Iterable) and not isinstance(value, str)


def _bad(name: str, value: object, wanted: str) -> InvalidArgument:
    return InvalidArgument("BAD_SAMPLING_PARAM", f"{name} is {value!r}.", f"{name} must be {wanted}.", param=name)


def _check_number(parameter: Parameter, value: object) -> None:
    """Raise InvalidArgument for a value of a wrong type, or outside the parameter's bounds. If only the router checks
    the parameter's upper bound, this does not."""
    name, low, high = parameter.name, parameter.low, parameter.high if parameter.client_checks_high else math.inf
    if parameter.kind == "int":
        _integer(name, value, int(low), int(high))
    else:
        _number(name, value, low, high)
    if parameter.above_low and value == low:
        raise _bad(name, value, f"more than {low}" if high == math.inf else f"more than {low} and at most {high}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidArgument unless the value is a finite int or float from `low` to `high`. Raises OverflowError for an
    int that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _bad(name, value, "a finite number")
    if not low <= value <= high:
        raise _bad(name, value, f"at least {low}" if high == math.inf else f"from {low} to {high}")

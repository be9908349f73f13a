"""300 schemas and 100 regular expressions and grammars, compiled, answered by models, and validated by `jsonschema`.

QUIRE_STRUCTURED_STEP (1) takes every so manieth case; QUIRE_STRUCTURED_TOKENS (512) is the most tokens of an answer.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from quire.errors import QuireError
from quire_tokenizer.grammar.grammar_compiler import GrammarCompiler, GrammarLimits
from quire_tokenizer.grammar.grammar_source import GrammarRefused, GrammarSource
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from tests.parity.real_models import real_model
from tests.structured import corpus
from tests.structured.corpus import Case

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
STEP = int(os.environ.get("QUIRE_STRUCTURED_STEP", "1"))
MAX_TOKENS = int(os.environ.get("QUIRE_STRUCTURED_TOKENS", "512"))
MAX_NUM_SEQS = 32
LIMITS = GrammarLimits(2, 1024, 2.0, 1 << 30, 1024)
# llguidance's warnings about those that compile: the parts that it does not enforce.
Compiled = dict[str, tuple[str, ...]]


def all_cases() -> list[Case]:
    return [*corpus.schemas(), *corpus.patterns()]


async def compile_all(vocabulary: Vocabulary, cases: list[Case], *, strict: bool) -> tuple[Compiled, dict[str, str]]:
    """Warnings by case, and refusals by case."""
    compiler = GrammarCompiler(vocabulary, LIMITS)
    done: Compiled = {}
    refused: dict[str, str] = {}
    times = list[float]()
    for case in cases:
        began = time.perf_counter()
        try:
            done[case.name] = (await compiler.compile(GrammarSource(case.kind, case.text, strict=strict))).warnings
        except GrammarRefused as error:
            refused[case.name] = f"{error.code} {error.param} {error.message}"
        times.append(time.perf_counter() - began)
    await compiler.close()
    times.sort()
    print(
        f"  compile times: median {times[len(times) // 2] * 1e3:.1f} ms, p99 {times[-len(times) // 100] * 1e3:.0f} ms"
    )
    return done, refused


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return asyncio.run(compile_all(Vocabulary(read_model_files(str(DEMO))), all_cases(), strict=False))[0]


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_every_case_compiles_or_is_refused_with_a_cause(strict: bool) -> None:
    cases = all_cases()
    print(f"\n{'strict' if strict else 'lenient'}:")
    done, refused = asyncio.run(compile_all(Vocabulary(read_model_files(str(DEMO))), cases, strict=strict))
    schemas = {case.name for case in cases if case.schema is not None}
    print(f"  schemas: {len(schemas & done.keys())} of {len(schemas)} compile, ", end="")
    print(f"others: {len(done.keys() - schemas)} of {len(cases) - len(schemas)}")
    keywords = Counter(key for each in done.values() for said in each for key in re.findall(r'"([\w$]+)"', said))
    print(f"  not enforced: {dict(keywords)}")
    print(f"  refused: {dict(Counter(' '.join(each.split()[:2]) for each in refused.values()))}")
    for name, said in refused.items():
        print(f"    {name}: {said[:160]}")
    assert not any("CRASHED" in said for said in refused.values())
    assert len(done) >= (0.75 if strict else 0.9) * len(cases)


@dataclass(frozen=True)
class Model:
    """A model, and sampling parameters with which nearly all of its answers end. With others, a small model repeats
    itself, or writes a text of 512 tokens, wherever a form lets it."""

    llm: LLM
    ending: SamplingParams


@pytest.fixture(scope="module", params=["demo", "smollm2"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    # The demo model has read plays, in which there is neither a quotation mark nor a bracket of JSON.
    is_demo = request.param == "demo"
    path, penalty, bias = (DEMO, 0.4, 25.0) if is_demo else (real_model("smollm2"), 1.0, 4.0)
    vocabulary = json.loads(read_model_files(str(path)).tokenizer_json)["model"]["vocab"]
    ending = SamplingParams(frequency_penalty=penalty, logit_bias={vocabulary[text]: bias for text in '"]}'})
    with LLM(model=str(path), max_num_seqs=MAX_NUM_SEQS) as llm:
        yield Model(llm, ending)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_that_end_are_valid(model: Model, compiled: Compiled, temperature: float) -> None:
    cases = compiled_cases(compiled)
    plain = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=1)
    judge("constrained", cases, answer_all(model.llm, cases, plain, constrained=True), compiled)
    schemas = [case for case in cases if case.schema is not None]
    some = schemas[:: max(1, len(schemas) // 20)]
    judge("unconstrained", some, answer_all(model.llm, some, plain, constrained=False), compiled, expect=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nearly_all_answers_end_if_loops_are_penalized(model: Model, compiled: Compiled, temperature: float) -> None:
    cases = compiled_cases(compiled)
    params = model.ending.clone(temperature=temperature, max_tokens=MAX_TOKENS, seed=1)
    answers = answer_all(model.llm, cases, params, constrained=True)
    judge("constrained, with penalties", cases, answers, compiled)
    ended = sum(isinstance(each, CompletionOutput) and each.finish_reason == "stop" for each in answers)
    print(f"  {ended} of {len(answers)} ended")
    assert ended >= 0.95 * len(answers)


def compiled_cases(compiled: Compiled) -> list[Case]:
    return [case for case in all_cases() if case.name in compiled][::STEP]


def answer_all(
    llm: LLM, cases: list[Case], params: SamplingParams, *, constrained: bool
) -> list[CompletionOutput | QuireError]:
    """Return the answer to each case, or its error. MAX_NUM_SEQS cases are answered at a time."""
    each = [params.clone(structured_outputs=asked(case)) if constrained else params for case in cases]
    with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
        return list(pool.map(functools.partial(answer, llm), cases, each))


def asked(case: Case) -> StructuredOutputsParams:
    name = "json" if case.kind == "json_schema" else case.kind
    return StructuredOutputsParams(**{name: case.text})  # type: ignore[arg-type]  # a kind that takes a text


def answer(llm: LLM, case: Case, params: SamplingParams) -> CompletionOutput | QuireError:
    prompt = f"Answer in this form: {case.text[:400]}\nAnswer: "
    try:
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    except QuireError as error:
        return error


def judge(
    title: str,
    cases: list[Case],
    answers: list[CompletionOutput | QuireError],
    compiled: Compiled,
    *,
    expect: bool = True,
) -> None:
    """Print the numbers of answers that ended and that are valid. Those of grammars with warnings may be invalid."""
    counts, wrong = Counter[str](), list[str]()
    for case, found in zip(cases, answers, strict=True):
        if isinstance(found, QuireError):
            counts[f"failed: {found.code}"] += 1
            wrong.append(f"{case.name}: {found.code} {found.message[:200]}")
        elif found.finish_reason != "stop":
            counts[f"ended by {found.finish_reason}"] += 1
        elif fault := fault_of(case, found.text):
            counts["invalid, as warned" if compiled[case.name] else "invalid"] += 1
            if not compiled[case.name]:
                wrong.append(f"{case.name}: {fault[:120]}: {found.text[:200]!r}")
        else:
            counts["valid"] += 1
    print(f"\n{title}: {dict(counts)}")
    for each in wrong:
        print(f"  {each}")
    assert not expect or (not wrong and counts["valid"] > 0)


@functools.cache
def _format_checker() -> jsonschema.FormatChecker:
    """Formats as of draft 2020-12. The checker of all drafts takes `time` from draft 3, which allows neither fractions
    of a second nor an offset; that of 2020-12 has none, unless further packages are installed."""
    checker = jsonschema.FormatChecker()
    checker.checkers = {**jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers}

    @checker.checks("time", raises=ValueError)
    def is_time(value: object) -> bool:
        return not isinstance(value, str) or bool(datetime.time.fromisoformat(value.replace(":60", ":59")).tzinfo)

    return checker


def fault_of(case: Case, text: str) -> str:
    """Why an answer is invalid; empty where it is valid. Grammars are not checked."""
    if case.kind == "regex":
        try:
            return "" if re.fullmatch(case.text, text) else "no match"
        except (re.error, FutureWarning):
            return ""  # a form that Python's expressions lack, as `[[:alpha:]]`
    if case.schema is None:
        return ""
    try:
        value: Any = json.loads(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # patterns of others, in `jsonschema`
            jsonschema.validate(value, case.schema, format_checker=_format_checker())
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""

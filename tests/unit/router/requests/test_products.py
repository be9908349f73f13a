from __future__ import annotations

from dataclasses import replace

import pytest

from quire_common.errors import InvalidArgument
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling
from quire_common.structured.constraint import MAX_GRAMMAR_BYTES, Constraint
from quire_router.requests.products import check_compiled, check_encoded, check_request
from quire_router.sequences.job import GenerateJob, TextOptions, TextPrompt, Wants

LONG = tuple(f"{i:02d}" + "x" * 510 for i in range(64))
FEW = ("\n\nUser:", "<|im_end|>", "###", "</answer>")


def job_of(prompts: int = 1, **fields: object) -> GenerateJob:
    return replace(GenerateJob("m", (TextPrompt("a"),) * prompts), **fields)  # type: ignore[arg-type]  # tests' shorthand


def stops(*texts: str) -> TextOptions:
    return TextOptions(stop=texts)


@pytest.mark.parametrize(
    "job",
    [
        job_of(text=stops(*LONG)),
        job_of(n=128, text=stops(*FEW)),
        job_of(2048, text=stops(*FEW)),
        job_of(n=128, stop_token_ids=tuple(range(1024))),
    ],
)
def test_ordinary_requests_are_accepted(job: GenerateJob) -> None:
    check_request(job)


@pytest.mark.parametrize(
    "job",
    [
        job_of(n=128, text=stops(*LONG)),
        job_of(best_of=128, text=stops(*LONG)),
        job_of(128, text=stops(*LONG)),
        job_of(16, n=16, text=stops(*("汉" * 512,) * 4)),
        job_of(1024, stop_token_ids=tuple(range(1024))),
    ],
)
def test_stop_strings_times_sequences_are_bounded(job: GenerateJob) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(job)
    assert (caught.value.code, caught.value.param) == ("PRODUCT_TOO_LARGE", "stop")
    assert "at most 1048576" in caught.value.message and caught.value.fix


def grammar(size: int) -> Constraint:
    return Constraint.of("x" * size)


@pytest.mark.parametrize(
    "job",
    [job_of(n=128), job_of(n=32, constraint=grammar(MAX_GRAMMAR_BYTES)), job_of(128, constraint=grammar(1 << 17))],
)
def test_ordinary_grammars_are_accepted(job: GenerateJob) -> None:
    check_compiled(job)


@pytest.mark.parametrize(
    "job",
    [
        job_of(n=33, constraint=grammar(MAX_GRAMMAR_BYTES)),
        job_of(3, best_of=11, constraint=grammar(MAX_GRAMMAR_BYTES)),
        job_of(n=128, constraint=grammar((1 << 17) + 1)),
        job_of(n=128, constraint=Constraint.of("\u00fc" * ((1 << 16) + 1))),
    ],
)
def test_bytes_of_a_grammar_times_sequences_are_bounded(job: GenerateJob) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_compiled(job)
    assert (caught.value.code, caught.value.param) == ("PRODUCT_TOO_LARGE", "n")
    assert "at most 16777216" in caught.value.message and caught.value.fix


BIASES = LogitControls(logit_bias=tuple((i, 1.0) for i in range(1024)), allowed_token_ids=tuple(range(16_384)))
ALLOWED = LogitControls(allowed_token_ids=tuple(range(16_384)))


@pytest.mark.parametrize(
    ("job", "prompt", "answer"),
    [
        (job_of(n=128), 131_071, 1),
        (job_of(n=128, sampling=Sampling(logprobs=1), max_tokens=4096), 100, 4096),
        (job_of(sampling=Sampling(logprobs=20)), 100, 1 << 20),  # a chat without max_tokens
        (job_of(sampling=Sampling(prompt_logprobs=7)), 131_071, 1),
        (job_of(n=128, sampling=Sampling(controls=ALLOWED)), 100, 16),
        (job_of(n=16, wants=Wants(echo=True)), 100_000, 16),
        (job_of(n=128, beams=True), 7000, 1000),
        (job_of(n=8, beams=True), 1000, 130_072),  # a chat without max_tokens
    ],
)
def test_long_requests_are_accepted(job: GenerateJob, prompt: int, answer: int) -> None:
    check_encoded(job, [prompt], [answer])


@pytest.mark.parametrize(
    ("job", "prompt", "answer", "param"),
    [
        (job_of(n=128), 200_000, 1, "prompt"),
        (job_of(n=128, sampling=Sampling(logprobs=20), max_tokens=4096), 100, 4096, "logprobs"),
        (job_of(best_of=128, sampling=Sampling(logprobs=20), max_tokens=4096), 100, 4096, "logprobs"),
        (job_of(n=8, sampling=Sampling(logprobs=20)), 100, 1 << 20, "logprobs"),
        (job_of(n=2, sampling=Sampling(prompt_logprobs=7)), 131_071, 1, "prompt_logprobs"),
        (job_of(n=128, sampling=Sampling(controls=BIASES)), 100, 16, "n"),
        (job_of(n=128, wants=Wants(echo=True)), 100_000, 16, "n"),
        (job_of(n=128, wants=Wants(token_ids=True)), 100_000, 16, "n"),
        (job_of(n=128, beams=True), 100, 16_000, "n"),
        (job_of(n=128, beams=True), 16_000, 100, "n"),
    ],
)
def test_too_large_products_of_length_and_sequences_are_refused(
    job: GenerateJob, prompt: int, answer: int, param: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_encoded(job, [prompt], [answer])
    assert (caught.value.code, caught.value.param) == ("PRODUCT_TOO_LARGE", param)


def test_beams_of_all_prompts_share_one_bound() -> None:
    check_encoded(job_of(8, n=128, beams=True), [24] * 8, [1000] * 8)
    with pytest.raises(InvalidArgument, match="beam search"):
        check_encoded(job_of(8, n=128, beams=True), [25] * 8, [1000] * 8)

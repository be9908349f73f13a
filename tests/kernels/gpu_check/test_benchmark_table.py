"""The GPU table of docs/benchmarks.md: what is wanted and vLLM's are the benchmarks' own figures, what was reached is
what the bench log's entries say, and bold is what misses what is wanted."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from bench import ROOT
from bench.gpu.figures import COLD_START, ITL, OVER_GREEDY, OVER_HTTP, ROWS, SERVICES_COST, Target
from bench.gpu.kernel_table.decoder_kernels import ATTENTION_WANTED
from bench.harness.bench_log import read_entries

RESULTS = "`make gpu-check` stages 1, 2, 4, 5 and 6, and the grammars of stage 3"
SAMPLING = "`make gpu-check` stages 1 to 6 but for real models"
PULLS = '`make gpu-check STAGE=5 ARGS="--parts soak"` beside `make fuzz`'
COLD = [COLD_START[f"cold start, {cache} kernel cache"] for cache in ("warm", "empty")]
COLD_SHARDS = [COLD_START[f"cold start, 8B shards, {cache} kernel cache"] for cache in ("warm", "empty")]
COLD_DISK = COLD_START["cold start, 8B shards, warm kernel cache, empty page cache"]
# Shares of something: more is better, as with tokens per second.
PULLS_WANTED, ATTENTION = (Target("share, not tok_s", None, wanted) for wanted in (0.8, ATTENTION_WANTED))


class Claim(NamedTuple):
    """A row of the table of results. `said`: how the log's entry has its figures; `targets`: one for each figure of a
    cell."""

    begins: str
    targets: list[Target]
    said: tuple[str, ...]


CLAIMS = [
    Claim(
        "time between tokens of 0.6B", [*ITL["0.6B"].values()], ("sequences {services} (three", "against {inside} ms")
    ),
    Claim("time between tokens of 8B", [*ITL["8B"].values()], ("8B {services} against {inside} ms",)),
    Claim("0.6B, 512 requests", [ROWS["0.6B 512 x 512/256"]], ("512 x 512/256 {services} / {inside} tokens/s",)),
    Claim("8B, 512 requests", [ROWS["8B 512 x 512/256"]], ("ms; {services} / {inside} tokens/s",)),
    Claim("0.6B, 256 requests", [ROWS["0.6B 256 x 100..1024"]], ("256 x 100..1024 {services} / {inside} (",)),
    Claim("prefill of 0.6B", [ROWS["0.6B prefill 32 x 4096"]], ("prefill {services} / {inside} (390,000",)),
    Claim("prefill of 8B", [ROWS["8B prefill 32 x 4096"]], ("prefill {services} / {inside} (41,500",)),
    Claim("throughput of the services", [SERVICES_COST] * 2, ("gain {s[0]} % at most", "lose {s[1]} % at most")),
    Claim(
        "first token of one prompt of 1,024 tokens, 0.6B",
        [ROWS["0.6B prompt 1024"]],
        ("prompt of 1,024 {services} / {inside} ms",),
    ),
    Claim(
        "first token of one prompt of 1,024 tokens, 8B",
        [ROWS["8B prompt 1024"]],
        ("; prompt {services} / {inside} ms",),
    ),
    Claim("one stream of 0.6B", [*OVER_HTTP[1]], ("at 1: {services} ms",)),
    Claim("64 such streams", [*OVER_HTTP[64]], ("at 64: {services} tokens/s",)),
    Claim("256 such streams", [*OVER_HTTP[256]], ("at 256: {services} tokens/s",)),
    Claim("cold start of 0.6B", COLD, ("0.6B {s[0]} s warm and {s[1]} s with an empty kernel cache",)),
    Claim("cold start of 8B to", COLD_SHARDS, ("8B {s[0]} s warm, {s[1]} s with an empty kernel cache",)),
    Claim("cold start of 8B, with", [COLD_DISK], ("{services} s from the disk",)),
]


class KernelClaim(NamedTuple):
    """A row of the table of kernels and transfers, with the figures of 0.6B and 8B; `log`: how the entry begins."""

    begins: str
    target: Target
    said: str
    log: str = RESULTS


KERNEL_CLAIMS = [
    KernelClaim("decode attention of 256 sequences of 1,024", ATTENTION, "256 x 1024 {small} / {large},"),
    KernelClaim("decode attention of 32 sequences of 8,192", ATTENTION, "32 x 8192 {small} / {large},"),
    KernelClaim("decode attention of 32 sequences of 1,024", ATTENTION, "32 x 1024 {small} / {large} ("),
    KernelClaim(
        "additional time between tokens with top_k", OVER_GREEDY["sampling 256"], "top_p add {small} %,", SAMPLING
    ),
    KernelClaim(
        "additional time between tokens with 5", OVER_GREEDY["logprobs 256"], "five logprobs {small} %.", SAMPLING
    ),
    KernelClaim("transfer of 1,024 KV pages", PULLS_WANTED, "= **{large}** of the plain copy", PULLS),
]


def rows_below(header: str) -> list[list[str]]:
    """Cells of the rows of the document's table with this header."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    _, table = text.split(f"{header}\n|{'---|' * header.count(' | ')}---|\n")
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.split("\n\n", maxsplit=1)[0].splitlines()
    ]


ROWS_CLAIMED = rows_below("| row | target | vLLM | in process | services |")
KERNELS_CLAIMED = rows_below("| kernels and transfers | target | 0.6B | 8B |")


def figures(cell: str) -> list[tuple[str, bool]]:
    """Figures of a cell as they are written, and whether they are bold; what is in brackets, and names, left out."""
    plain = re.sub(r"\(.*?\)|0\.6B|8B", "", cell)
    return [(figure, bool(bold)) for bold, figure in re.findall(r"(\*\*)?(\d[\d.,]*\d|\d)", plain)]


def number(figure: str) -> float:
    return float(figure.replace(",", ""))


def logged(begins: str) -> str:
    """The result of the last entry of the bench log that begins so."""
    entries = read_entries((ROOT / "bench" / "LOG.md").read_text())
    return [entry.result for entry in entries if _words(entry.what).startswith(_words(begins))][-1]


def _words(text: str) -> str:
    """Without what a long heading loses where the log divides it."""
    return re.sub(r"[:;,]", "", text)


def test_there_is_a_claim_for_each_row() -> None:
    assert [cells[0][: len(claim.begins)] for cells, claim in zip(ROWS_CLAIMED, CLAIMS, strict=True)] == [
        claim.begins for claim in CLAIMS
    ]
    assert [cells[0][: len(claim.begins)] for cells, claim in zip(KERNELS_CLAIMED, KERNEL_CLAIMS, strict=True)] == [
        claim.begins for claim in KERNEL_CLAIMS
    ]
    told = [target for claim in CLAIMS for target in claim.targets] + [claim.target for claim in KERNEL_CLAIMS]
    assert all(target in told for of in (ROWS, COLD_START, OVER_GREEDY) for target in of.values())


@pytest.mark.parametrize(("cells", "claim"), [*zip(ROWS_CLAIMED, CLAIMS, strict=True)], ids=lambda each: each[0])
def test_figures_are_those_of_the_benchmarks_and_of_the_log(cells: list[str], claim: Claim) -> None:
    _, wanted, vllm, inside, services = cells
    # One figure stands for as many as are alike.
    assert_alike(wanted, [target.wanted for target in claim.targets])
    assert_alike(vllm, [target.vllm for target in claim.targets if target.vllm is not None])
    said = logged(RESULTS)
    i, s = ([figure for figure, _ in figures(cell)] for cell in (inside, services))
    for form in claim.said:
        assert form.format(inside=" / ".join(i), services=" / ".join(s), i=i, s=s) in said
    assert {figure for figure in (*i, *s) if figure not in said} == set()
    for cell in (inside, services):
        reached = figures(cell)
        assert len(reached) in (0, len(claim.targets))
        for (figure, bold), target in zip(reached, claim.targets, strict=False):
            assert_bold(figure, bold, target)
            if target.beside(number(figure))["beats_vllm"] is False:
                assert "below vLLM" in cell or "above vLLM" in cell, figure


@pytest.mark.parametrize(
    ("cells", "claim"), [*zip(KERNELS_CLAIMED, KERNEL_CLAIMS, strict=True)], ids=lambda each: each[0]
)
def test_figures_of_kernels_are_those_of_the_benchmarks_and_of_the_log(cells: list[str], claim: KernelClaim) -> None:
    _, wanted, *by_model = cells
    assert_alike(wanted, [claim.target.wanted])
    small, large = (" / ".join(figure for figure, _ in figures(cell)) for cell in by_model)
    assert small or large
    assert claim.said.format(small=small, large=large) in logged(claim.log)
    for cell in by_model:
        for figure, bold in figures(cell):
            assert_bold(figure, bold, claim.target)


def assert_bold(figure: str, bold: bool, target: Target) -> None:
    assert bold is not target.beside(number(figure))["reached"], f"{figure} of {target.wanted}"


def assert_alike(cell: str, wanted: list[float]) -> None:
    told = [number(figure) for figure, _ in figures(cell)]
    assert told == wanted or (len(told) == 1 and told * len(wanted) == wanted), f"{cell}: {wanted}"


@pytest.mark.parametrize(
    ("column", "right", "wrong"),
    [(1, "0.75", "0.76"), (2, "1.85", "1.58"), (3, "0.92", "0.29"), (3, "0.92", "**0.92**"), (4, "3.08", "3.80")],
)
def test_a_wrong_figure_is_found(column: int, right: str, wrong: str) -> None:
    cells = [*ROWS_CLAIMED[0]]
    cells[column] = cells[column].replace(right, wrong, 1)
    with pytest.raises(AssertionError):
        test_figures_are_those_of_the_benchmarks_and_of_the_log(cells, CLAIMS[0])


@pytest.mark.parametrize(
    ("column", "right", "wrong"),
    [(1, "0.85", "0.58"), (2, "**0.82**", "0.82"), (2, "0.82", "0.28"), (3, "0.81", "0.18"), (3, "**0.81**", "")],
)
def test_a_wrong_figure_of_a_kernel_is_found(column: int, right: str, wrong: str) -> None:
    cells = [*KERNELS_CLAIMED[2]]
    cells[column] = cells[column].replace(right, wrong, 1)
    with pytest.raises(AssertionError):
        test_figures_of_kernels_are_those_of_the_benchmarks_and_of_the_log(cells, KERNEL_CLAIMS[2])

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

TABLE = "`make gpu-check STAGE=6` at 9d7df77"
SERVICES, KERNELS = (f"`make gpu-check STAGE={stage}` at 9d7df77: " for stage in (4, 5))
DRAWS, PULLS = "sampling with temperature 0.8, top_p 0.95 and top_k 50, and five", "`make gpu-check STAGE=7` at 69b1477"
COLD = [COLD_START[f"cold start, {cache} kernel cache"] for cache in ("warm", "empty")]
COLD_SHARDS = [
    COLD_START[f"cold start, 8B shards, {cache}"]
    for cache in ("warm kernel cache", "empty kernel cache", "warm kernel cache, empty page cache")
]
SHARDS = "cold starts of the five services with 16 GB of safetensors files"
# Shares of something: more is better, as with tokens per second.
PULLS_WANTED, ATTENTION = (Target("share, not tok_s", None, wanted) for wanted in (0.8, ATTENTION_WANTED))


class Claim(NamedTuple):
    """A row of the document. `said`: how the log's row has its figures; `targets`: one for each of a cell's."""

    begins: str
    targets: list[Target]
    log: str
    said: tuple[str, ...]


CLAIMS = [
    Claim("time between tokens of 0.6B", [*ITL["0.6B"].values()], TABLE, ("{services} against {inside} ms",)),
    Claim("time between tokens of 8B", [*ITL["8B"].values()], TABLE, ("{services} against {inside} ms",)),
    Claim("0.6B, 512 requests", [ROWS["0.6B 512 x 512/256"]], TABLE, ("512 x 512/256 {services} / {inside} tok/s",)),
    Claim("8B, 512 requests", [ROWS["8B 512 x 512/256"]], TABLE, ("ms; {services} / {inside} (",)),
    Claim("0.6B, 256 requests", [ROWS["0.6B 256 x 100..1024"]], TABLE, ("256 x 100..1024 {services} / {inside} (",)),
    Claim("prefill of 0.6B", [ROWS["0.6B prefill 32 x 4096"]], TABLE, ("prefill {services} / {inside} (3.8 %",)),
    Claim("prefill of 8B", [ROWS["8B prefill 32 x 4096"]], TABLE, ("prefill {services} / {inside} (0.8 %",)),
    Claim(
        "first token of one prompt of 1024 tokens, 0.6B; 8B",
        [ROWS["0.6B prompt 1024"], ROWS["8B prompt 1024"]],
        TABLE,
        ("prompt of 1024 {s[0]} / {i[0]} ms", "; {s[1]} / {i[1]} ms."),
    ),
    Claim("throughput that the services lose", [SERVICES_COST] * 2, TABLE, ("({s[0]} %)", "({s[1]} %)")),
    Claim("one stream of 0.6B", [*OVER_HTTP[1]], SERVICES, ("at 1: {services} ms",)),
    Claim("64 such streams", [*OVER_HTTP[64]], SERVICES, ("at 64: {services} tok/s",)),
    Claim("256 such streams", [*OVER_HTTP[256]], SERVICES, ("at 256: {services} tok/s",)),
    Claim("cold start of 0.6B", COLD, SERVICES, ("{s[0]} s warm and {s[1]} s with an empty kernel cache",)),
    Claim(
        "cold start of 8B",
        COLD_SHARDS,
        SHARDS,
        (
            "{s[0]} s with a warm kernel cache, {s[1]} s with an empty one",
            "{s[2]} s if the files are not in the page cache",
        ),
    ),
    Claim(
        "decode attention, share of the memory bandwidth (4.3 TB/s), with 256 sequences of 1024 tokens",
        [ATTENTION] * 6,
        KERNELS,
        (
            "{i[2]} / {i[0]} / {i[1]} (0.6B at 32 x 1024, 256 x 1024, 32 x 8192)",
            "and {i[5]} / {i[3]} / {i[4]} (8B)",
        ),
    ),
    Claim(
        "additional time between tokens of 256 sequences",
        [OVER_GREEDY["sampling 256"], OVER_GREEDY["logprobs 256"]],
        DRAWS,
        ("sampling {i[0]} % (", "logprobs {i[1]} % ("),
    ),
    Claim(
        "transfer of 1,024 pages of 2 MiB between two H200s",
        [PULLS_WANTED],
        PULLS,
        ("= {services} of a plain copy", "The kernel alone {inside} (1,024 pages)"),
    ),
]


def claimed() -> list[list[str]]:
    """Cells of the rows of the document's table."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    _, table = text.split("| row | target | vLLM | in process | services |\n|---|---|---|---|---|\n")
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.split("\n\n", maxsplit=1)[0].splitlines()
    ]


ROWS_CLAIMED = claimed()


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
    assert len(ROWS_CLAIMED) == len(CLAIMS)
    for cells, claim in zip(ROWS_CLAIMED, CLAIMS, strict=True):
        assert cells[0].startswith(claim.begins)
    told = [target for claim in CLAIMS for target in claim.targets]
    assert all(target in told for of in (ROWS, COLD_START, OVER_GREEDY) for target in of.values())


@pytest.mark.parametrize(("cells", "claim"), [*zip(ROWS_CLAIMED, CLAIMS, strict=True)], ids=lambda each: each[0])
def test_figures_are_those_of_the_benchmarks_and_of_the_log(cells: list[str], claim: Claim) -> None:
    _, wanted, vllm, inside, services = cells
    # One figure stands for as many as are alike.
    assert_alike(wanted, [target.wanted for target in claim.targets])
    assert_alike(vllm, [target.vllm for target in claim.targets if target.vllm is not None])
    said = logged(claim.log)
    i, s = ([figure for figure, _ in figures(cell)] for cell in (inside, services))
    for form in claim.said:
        assert form.format(inside=" / ".join(i), services=" / ".join(s), i=i, s=s) in said
    assert {figure for figure in (*i, *s) if figure not in said} == set()
    for cell in (inside, services):
        reached = figures(cell)
        assert len(reached) in (0, len(claim.targets))
        for (figure, bold), target in zip(reached, claim.targets, strict=False):
            beside = target.beside(number(figure))
            assert bold is not beside["reached"], f"{figure} of {target.wanted}"
            if beside["beats_vllm"] is False:
                assert "low vLLM" in cell or "above vLLM" in cell, figure


def assert_alike(cell: str, wanted: list[float]) -> None:
    told = [number(figure) for figure, _ in figures(cell)]
    assert told == wanted or (len(told) == 1 and told * len(wanted) == wanted), f"{cell}: {wanted}"


@pytest.mark.parametrize(
    ("column", "right", "wrong"),
    [(1, "0.75", "0.76"), (2, "1.85", "1.58"), (3, "0.93", "0.39"), (3, "0.93", "**0.93**"), (4, "2.86", "2.68")],
)
def test_a_wrong_figure_is_found(column: int, right: str, wrong: str) -> None:
    cells = [*ROWS_CLAIMED[0]]
    cells[column] = cells[column].replace(right, wrong, 1)
    with pytest.raises(AssertionError):
        test_figures_are_those_of_the_benchmarks_and_of_the_log(cells, CLAIMS[0])

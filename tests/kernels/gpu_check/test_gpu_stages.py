"""Stages that measure, as they go on a GPU: every row, its name, what it is measured against, and the log's row. What
measures is stood in for: processes, services and loads."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import cold_start, served_table, services
from bench.gpu.engine import GREEDY, KINDS, LENGTHS, rows_of
from bench.gpu.figures import COLD_START, OVER_GREEDY, OVER_HTTP, ROWS
from bench.gpu.http_load import HttpLoad
from bench.gpu.kernel_table import roofline
from bench.gpu.model import write_config, write_shards
from bench.gpu.shapes import SHAPES, TINY
from bench.harness.bench_log import read_entries
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model.parameters import parameter_specs
from tests.gpu import check

FIGURES = ("seconds", "output_tok_s", "input_tok_s", "first_ms", "itl_ms", "tpot_ms", "host_us_per_step", "steps")
SERVED = ("median_tpot_ms", "output_throughput", "input_throughput", "median_ttft_ms", "load_generator_cpu_s")
COLD = {"ready_s": [9.0, 5.0], "first_token_s": [10.0, 6.0]}


class Stack:
    """Stands for LocalStack."""

    ready = SimpleNamespace(http="http://nowhere")

    def __init__(self, spec: object) -> None:
        """Started."""

    def close(self) -> None:
        """Ended."""


def process(command: list[str], **_: object) -> SimpleNamespace:
    """What the programs that a stage starts leave behind."""
    name, place = command[command.index("-m") + 1], {flag: at + 1 for at, flag in enumerate(command)}
    if name == "bench.gpu.engine":
        model = command[place["--models"]]
        kinds = command[place["--rows"] :] if "--rows" in place else KINDS
        rows = {f"{model} {row.name}": dict.fromkeys(FIGURES, 4.0) for row in rows_of(model, kinds, 512)}
        Path(command[place["--out"]]).write_text(json.dumps(rows))
    elif name == "quire_worker.profile":
        out = Path(command[place["--out"]])
        out.mkdir(parents=True, exist_ok=True)
        parts = [{"name": part, "us": 10.0, "floor_us": 5.0} for part in roofline._PROFILED]
        (out / "kernels.json").write_text(json.dumps({"rows": parts}))
    else:
        assert name == "quire"
        starts = int(command[place["--num-iters"]])
        Path(command[place["--output-json"]]).write_text(json.dumps({key: each[:starts] for key, each in COLD.items()}))
    return SimpleNamespace(returncode=0, stderr="")


def put(load: HttpLoad, *_: object) -> dict[str, float]:
    """What `quire bench serve` says of a load: of the first turn what nobody is to be told."""
    found = dict.fromkeys(SERVED, 5.0 if load.counted or load.seed % 2 else 50.0)
    if load.counted:
        found |= {"median_decode_tpot_ms": 4.0 + load.seed % 3, "decode_window_concurrency": load.requests}
        found["decode_window_s"] = 1.0
    return found


def written(folder: Path, *_: object) -> Path:
    """Stands for `write_config`."""
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(check, "LOG", tmp_path / "LOG.md")
    (tmp_path / "LOG.md").write_text("# Bench log\n")
    monkeypatch.setattr(subprocess, "run", process)
    for module in (served_table, services):
        monkeypatch.setattr(module, "LocalStack", Stack)
    for module in (served_table, services, cold_start):
        monkeypatch.setattr(module, "write_config", written)
    monkeypatch.setattr(cold_start, "write_shards", lambda *_: None)
    clock = itertools.count()
    for module in (served_table, services):
        monkeypatch.setattr(module, "cpu_seconds", lambda _: {"router": float(next(clock)), "worker": 2.0})
    monkeypatch.setattr(HttpLoad, "put", put)
    monkeypatch.setattr(roofline, "ROOT", tmp_path)
    monkeypatch.setattr(roofline, "bench_of", lambda *_, **__: None)
    monkeypatch.setattr(roofline, "cases", lambda *_, **__: iter(()))
    monkeypatch.setattr(roofline, "write_config", lambda folder, *_: folder)


def stage(number: int, folder: Path, *more: str) -> dict[str, dict[str, object]]:
    """All lines by name, of a stage in which every check holds."""
    out = folder / "out.jsonl"
    assert check.main(["--stage", str(number), "--out", str(out), *more]) == 0
    *found, summary = map(json.loads, out.read_text().splitlines())
    log = (folder / "LOG.md").read_text()
    (entry,) = read_entries(log)
    assert log.endswith(summary["entry"]) and "NVIDIA H200" in entry.machine
    assert all(str(line["check"]) in entry.result for line in found if line["result"] == "measured")
    by_name = {str(line["check"]): line for line in found}
    assert len(by_name) == len(found) - (1 if number == 4 else 0), "names tell rows apart"
    return by_name


def test_the_table_in_process(tmp_path: Path) -> None:
    found = stage(3, tmp_path, "--parts", "table")
    over = {f"{model} {kind}" for model in SHAPES for kind in OVER_GREEDY}
    greedy = {f"{model} {GREEDY}" for model in SHAPES}
    lengths = {f"{model} prompt {length}" for model in SHAPES for length in LENGTHS}
    assert set(found) == set(ROWS) | over | greedy | lengths | {f"{model} in process" for model in SHAPES}
    assert all("wanted" in found[row] for row in {*ROWS, *over})
    assert found["8B itl 1"]["beats_vllm"] is True and found["8B sampling 256"]["percent"] == 0.0


def test_the_table_through_the_services(tmp_path: Path) -> None:
    found = stage(6, tmp_path)
    named = {load.row: load.served for load in served_table.LOADS}
    assert [named[f"itl {batch}"] for batch in (1, 8, 256)] == ["tpot_ms", "decode_tpot_ms", "decode_tpot_ms"]
    rows = {f"{row}, {named[row.partition(' ')[2]]}" for row in ROWS}
    assert set(found) == rows | {f"{model} in process" for model in SHAPES}
    for row in rows:
        assert (found[row]["services"], found[row]["in_process"]) == (5.0, 4.0) and "cost_percent" in found[row]
        assert ("tpot_cost_percent" in found[row]) is ("itl" in row)
    together = found["8B itl 256, decode_tpot_ms"]
    assert (together["least"], together["most"]) == (4.0, 6.0), "the median of three turns counts"
    assert together["tpot_ms"] == together["tpot_counted_ms"] == 5.0 and together["tpot_cost_percent"] == 25.0
    assert (together["router_cpu_us_per_token"], together["worker_cpu_us_per_token"]) == (10.2, 0.0), "of 3 x 256 x 128"


@pytest.mark.parametrize("bad", [{"decode_window_concurrency": 1}, {"decode_window_s": 0.01}], ids=str)
def test_turns_in_which_not_all_requests_decode_for_a_while_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: dict[str, float]
) -> None:
    def sometimes(load: HttpLoad, *_: object) -> dict[str, float]:
        return put(load) | (bad if load.counted and load.seed in (101, 103) else {})

    monkeypatch.setattr(HttpLoad, "put", sometimes)
    together = stage(6, tmp_path)["8B itl 256, decode_tpot_ms"]
    # Turns 100, 102 and 104 count, whose figures are 5, 4 and 6; all five have cost CPU time.
    assert (together["services"], together["least"], together["most"]) == (5.0, 4.0, 6.0)
    assert together["router_cpu_us_per_token"] == 6.1, "of 5 x 256 x 128"


def test_requests_that_never_all_decode_have_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(load: HttpLoad, *_: object) -> dict[str, float]:
        return put(load) | {"decode_window_concurrency": load.requests - (load.requests == 32)}

    monkeypatch.setattr(HttpLoad, "put", late)
    out = tmp_path / "out.jsonl"
    assert check.main(["--stage", "6", "--out", str(out)]) == 1
    failed = [line for line in map(json.loads, out.read_text().splitlines()) if line.get("result") == "FAILED"]
    assert [line["check"] for line in failed[:-1]] == [f"{model} itl 32 through the services" for model in SHAPES]
    assert "all 32 requests decoded together for 0.03 s in 0 of 8 turns; at most 31 did" in failed[0]["error"]


def test_cold_starts_have_the_caches_that_their_names_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    def started(command: list[str], *, env: dict[str, str], **more: object) -> SimpleNamespace:
        model = Path(command[command.index("--model") + 1]).name
        form = "dummy" if command[-2:] == ["--load-format", "dummy"] else "files"
        did.append(f"{model} {form} {command[command.index('--num-iters') + 1]} {Path(env['TRITON_CACHE_DIR']).name}")
        return process(command, **more)

    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr(cold_start, "write_shards", lambda *_: did.append("write"))
    monkeypatch.setattr(cold_start, "_drop_cached", lambda folder: did.append(f"drop {folder.name}"))
    assert check.main(["--stage", "4", "--parts", "cold_start"]) == 0
    random, shards = "random dummy 2 kernels-random", "shards files {} kernels-shards"
    assert did == [random, "write", shards.format(2), "drop shards", shards.format(1)]


def test_a_model_with_written_shards_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_config(tmp_path, TINY, TINY.max_positions)
    write_shards(tmp_path, 1 << 14, "cpu")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    options = LoadOptions(kv_cache_bytes=1 << 22, attention_backend="torch")
    loaded = load_model(tmp_path, options)
    assert loaded.facts.parameters == sum(math.prod(each.shape) for each in parameter_specs(TINY))
    files = list(tmp_path.iterdir())
    cold_start._drop_cached(tmp_path)
    assert list(tmp_path.iterdir()) == files


def test_streams_and_cold_starts(tmp_path: Path) -> None:
    found = stage(4, tmp_path)
    assert [found[start]["first_token_s"] for start in COLD_START] == [10.0, 6.0, 10.0, 6.0, 10.0]
    for routers in (1, 4):
        for streams, targets in OVER_HTTP.items():
            name = f"HTTP, concurrency {streams}, router processes {routers}"
            if routers == 4 and streams == 1:
                assert name not in found
                continue
            assert found[name]["requests"] == max(16, 4 * streams)
            assert all("reached" in found[f"{name}, {target.figure}"] for target in targets)
            assert "router_cores" in found[f"{name}, processes"]
    longer = {title: line["more_tok_s_percent"] for title, line in found.items() if "more_tok_s_percent" in line}
    many = [f"HTTP, concurrency 64, router processes {routers}, 1024 requests" for routers in (1, 4)]
    alone = "HTTP, concurrency 1, router processes 1, 64 requests"
    assert longer == dict.fromkeys([alone, *many], -90.0), "256 streams have so many as it is"


def test_profiles_of_both_shapes(tmp_path: Path) -> None:
    found = stage(5, tmp_path, "--parts", "roofline")
    title = "profile 8B 32 x 1024, a prompt of 2048"
    assert len(found) == 6 and found[f"{title}, the kernels of the whole step"]["of_floor"] == 0.5
    assert found[f"{title}, parts apart"]["result"] == "ok"
    assert (tmp_path / "bench/results/profile/8B/kernels.json").exists()

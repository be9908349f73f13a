"""What a paced worker says of itself, the pages that it has, and the faults that it can be asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire_common.errors import ConfigError, InvalidArgument
from quire_worker.config import WorkerConfig
from quire_worker.paced.facts import DEFAULT_FACTS, read_facts
from quire_worker.paced.faults import StepFaults, parse_faults
from quire_worker.paced.pacer import Pacer
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner
from quire_worker.paced.served import DEFAULT_PAGES, load_paced
from quire_worker.replica import ServedModel
from tests.unit.worker_paced.driver import PAGE_SIZE, VOCAB, Row, a_runner, batch_of, step
from tests.unit.worker_paced.test_pacer import MS, Clock


def loaded(**options: object) -> ServedModel:
    return load_paced(WorkerConfig(paced=1.0, **options), lambda phase, done, total: None)  # type: ignore[arg-type]  # by name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"vocab_size": 500, "eos_token_id": 7, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return tmp_path


def test_paced_model_facts_come_from_the_given_folder(folder: Path) -> None:
    info = loaded(model=str(folder), served_model_name="small").info
    assert (info.name, info.vocab_size, info.eos_token_ids, info.max_model_len) == ("small", 500, (7, 9), 128)
    default = loaded().info
    assert (default.name, default.vocab_size, default.max_model_len) == ("paced", 32_000, 32_768)
    assert default.digest == DEFAULT_FACTS.digest != info.digest


def test_replicas_of_one_model_have_one_digest_and_one_namespace(folder: Path) -> None:
    first, second = loaded(model=str(folder)).info, loaded(model=str(folder), max_model_len=64).info
    assert first.digest == second.digest and first.pages == second.pages and second.max_model_len == 64
    assert loaded(model=str(folder), block_size=8).info.pages.namespace != first.pages.namespace


def test_a_folder_without_facts_and_a_context_too_long_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        read_facts(str(folder / "nowhere"))
    assert error.value.code == "MODEL_NOT_FOUND"
    with pytest.raises(ConfigError) as error:
        read_facts(str(folder), 129)
    assert error.value.code == "MAX_MODEL_LEN_TOO_LARGE"


def test_context_and_eos_ids_beyond_int32_are_refused(folder: Path) -> None:
    config = {"vocab_size": 500, "max_position_embeddings": 2**40}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        read_facts(str(folder))
    assert read_facts(str(folder), 128).max_model_len == 128
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2**31}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: `eos_token_id`"):
        read_facts(str(folder), 128)


def test_number_of_paced_pages_by_flag_bytes_or_default() -> None:
    assert loaded(paced_pages=10).num_pages == 11
    assert loaded(kv_cache_memory_bytes=64 * 8 * 16).num_pages == 64
    assert loaded().num_pages == DEFAULT_PAGES + 1
    with pytest.raises(ConfigError) as error:
        loaded(kv_cache_memory_bytes=1)
    assert error.value.code == "KV_CACHE_TOO_SMALL"


def test_pages_move_as_bytes_and_carry_what_was_computed() -> None:
    runner, pages = a_runner(), PageArray(8, PAGE_SIZE)
    row = Row(list(range(9)), [1, 2, 3])
    step(runner, [row], [8])
    source = runner.pages
    for page in (1, 2):
        pages.write_page(page + 4, source.read_page(page))
    moved = PacedRunner(pages, VOCAB)
    there, here = Row(list(range(9)), [5, 6, 7], computed=8), Row(list(range(9)), [1, 2, 3], computed=8)
    step(moved, [there], [1])
    step(runner, [here], [1])
    assert there.tokens == here.tokens
    for page, data in ((0, bytes(32)), (8, bytes(32)), (1, bytes(31))):
        with pytest.raises(InvalidArgument, match="Page"):
            pages.write_page(page, data)


@pytest.mark.parametrize(
    "text", ["", "die", "die@", "die@0", "die@x", "die@3:4", "slow@3", "slow@3:", "slow@3:-1", "slow@3:nan", "melt@3"]
)
def test_unknown_fault_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a fault") as error:
        parse_faults([text])
    assert error.value.code == "BAD_FAULT" and "slow@N:MS" in error.value.fix


def test_a_slow_step_takes_longer_and_only_that_one() -> None:
    clock = Clock()
    faults = StepFaults(parse_faults(["slow@2:30"]))
    runner = PacedRunner(PageArray(8, PAGE_SIZE), VOCAB, 2.0, pacer=Pacer(clock, clock.sleep), faults=faults)
    took = []
    for _ in range(3):
        before = clock.now_ns
        runner.run(batch_of([Row([1, 2], [1])], [2], formed_ns=before))
        took.append(clock.now_ns - before)
    assert took == [2 * MS, 32 * MS, 2 * MS]


def test_nan_fault_hits_the_first_sampling_sequence() -> None:
    faults = StepFaults(parse_faults(["nan@1"]))
    runner = PacedRunner(PageArray(8, PAGE_SIZE), VOCAB, faults=faults)
    rows = [Row([1, 2, 3], [1]), Row([4, 5], [2]), Row([6], [3])]
    token = runner.run(batch_of(rows, [2, 2, 1])).token
    assert token[0] == -1 and token[1] >= 0
    assert runner.run(batch_of(rows, [2, 2, 1])).token.tolist()[1] == token[1]


ALONE = """
import sys
import quire_worker.__main__
from quire_worker.config import WorkerConfig
from quire_worker.paced.served import load_paced
from quire_worker.replica import Replica

config = WorkerConfig(paced=1.0)
replica = Replica(config, load_paced(config, lambda phase, done, total: None), print)
replica.close()
print([module for module in ("torch", "numba") if module in sys.modules])
"""


def test_a_paced_worker_imports_neither_torch_nor_numba() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_paced_worker_has_the_requested_slots() -> None:
    model = loaded()
    assert model.engine_spec(8).num_slots == 20 and model.engine_spec(8, 9).num_slots == 9
    with pytest.raises(ConfigError) as error:
        model.engine_spec(8, 7)
    assert error.value.code == "TOO_FEW_SLOTS"

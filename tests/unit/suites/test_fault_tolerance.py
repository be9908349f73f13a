"""The table of faults judges what it should, and docs/fault-tolerance.md shows the record of its last run."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos.spoil import spoilt
from tests.chaos.table.events import Kill
from tests.chaos.table.failure_log import FailureLog
from tests.chaos.table.fault_table import ROWS, Row
from tests.chaos.table.record import line_of
from tests.chaos.table.runner import Round, assert_survived, detection_p99, select_rows
from tools import fault_tolerance

WANTED_FAULTS = 200
ROW = Row("worker killed", Kill("worker"), (1.0, 2.0), 3)
GOOD = Round(ROW, "worker-1", answers=20, noticed_s=0.5, pause_s=1.0, back_s=0.1)


def test_the_page_shows_the_record() -> None:
    page, record = fault_tolerance.DOCUMENT.read_text(), json.loads(fault_tolerance.RECORD.read_text())
    assert page == fault_tolerance.document(page, record), "run `python -m tools.fault_tolerance`"


def test_the_record_has_every_row_and_no_error() -> None:
    record = json.loads(fault_tolerance.RECORD.read_text())
    lines = [line for group in record["groups"].values() for line in group]
    assert [line["fault"] for line in lines] == [row.name for row in ROWS]
    assert all(line["faults"] for line in lines) and sum(line["faults"] for line in lines) >= WANTED_FAULTS
    assert not [line for line in lines if line["errors"] or line["wrong"] or line["kept"] or line["failed"]]
    assert record["detection_p99_s"] <= 3.0


def test_the_table_has_two_hundred_faults() -> None:
    assert sum(row.times for row in ROWS) >= WANTED_FAULTS
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_good_rounds_survive() -> None:
    assert_survived([GOOD] * 3)


@pytest.mark.parametrize(
    "bad",
    [
        Round(ROW, errors=["HTTP 503"]),
        Round(ROW, wrong=["tokens[3] is 7 instead of 8"]),
        Round(ROW, leak="the scheduler keeps a page"),
        Round(ROW, failure="the round failed"),
        Round(ROW, noticed_s=3.1),
        Round(ROW, pause_s=10.1),
    ],
)
def test_one_bad_round_is_noticed(bad: Round) -> None:
    with pytest.raises(AssertionError, match="worker killed"):
        assert_survived([GOOD, bad, GOOD])


def test_detection_counts_only_faults_that_somebody_must_notice() -> None:
    slow = Row("slow link", Kill("worker"), (1.0, 2.0), 3, detected=False)
    assert detection_p99([GOOD, Round(slow, noticed_s=9.0)]) == GOOD.noticed_s


def test_a_run_has_each_row_once_before_any_twice() -> None:
    once, twice = Row("once", Kill("worker"), (1.0, 2.0), 1), Row("twice", Kill("worker"), (1.0, 2.0), 2)
    for seed in range(20):
        assert {row.name for row in select_rows([once, twice], seed, 2)} == {"once", "twice"}
    assert sorted(row.name for row in select_rows([once, twice], 1)) == ["once", "twice", "twice"]
    assert select_rows(ROWS, 5) == select_rows(ROWS, 5) != select_rows(ROWS, 6)


def test_losses_are_read_from_logs_after_the_moment(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text(_logged(95, "sequence lost its engine"))
    failures = FailureLog([log], ahead_s=0.0)
    with log.open("a") as file:
        file.write("E0000 a line of gRPC\n")
        file.write(_logged(99, "sequence lost its engine"))  # before the fault
        file.write(_logged(101, "sequence lost its engine"))
        file.write(_logged(102, "detokenize stream lost"))
        file.write(_logged(103, "request"))
        file.write(_logged(109, "sequence lost its engine"))  # after all streams had gone on
    assert failures.last_s(100.0, 5.0) == pytest.approx(2.0)
    assert failures.last_s(104.0, 4.0) is None


def test_a_line_sums_up_the_rounds_of_its_row() -> None:
    other = Row("another", Kill("router"), (1.0, 2.0), 1)
    bad = Round(ROW, answers=5, errors=["one", "two"], wrong=["three"], leak="four", failure="five", pause_s=2.0)
    line = line_of(ROW, [GOOD, bad, Round(other, answers=50)])
    assert (line.faults, line.answers, line.errors, line.wrong, line.kept, line.failed) == (2, 25, 2, 1, 1, 1)
    assert (line.noticed_s, line.pause_s) == (0.5, 2.0)


def test_a_page_tells_of_errors() -> None:
    line = line_of(ROW, [Round(ROW, answers=5, errors=["one", "two"])])
    facts = {"seed": 1, "seconds": 60, "cores": 2, "detection_p99_s": 1.0, "pause_p99_s": 2.0}
    text = fault_tolerance.table({**facts, "groups": {"processes end": [asdict(line)]}})
    assert "Clients saw 2 errors" in text
    assert "| worker killed | 1 | 5 | 2 | 0 | 0 | 0.00 s * |" in text


@pytest.mark.parametrize("kind", ["<4e", "<4f"])
def test_every_number_of_a_spoilt_page_is_another(kind: str) -> None:
    numbers = (1.0, -2.5, 0.125, 300.0)
    found = struct.unpack(kind, spoilt(struct.pack(kind, *numbers)))
    assert found == pytest.approx([-number for number in numbers], rel=0.01)


def _logged(second: int, message: str) -> str:
    return json.dumps({"time": f"1970-01-01T00:{second // 60:02}:{second % 60:02}.000000Z", "message": message}) + "\n"

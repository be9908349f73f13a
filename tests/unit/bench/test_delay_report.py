"""What `bench.scheduler.delay` prints and draws of what it measured."""

from __future__ import annotations

from xml.etree import ElementTree

from bench.scheduler.delay import Cell, table
from bench.scheduler.delay_driver import Measured
from bench.scheduler.delay_plot import Point, svg

SVG = "{http://www.w3.org/2000/svg}"


def measured(efficiency: float) -> Measured:
    return Measured(1.0, 100, 10, efficiency, 0.5, 1.0, 300.0, 400.0, 7.5, 12)


def test_the_table_has_medians_and_the_span_of_the_rounds() -> None:
    cell = Cell("grid", 2.0, 64, 5.0, "free")
    head, line = table({cell: [measured(share) for share in (0.5, 0.9, 0.7)]}).splitlines()
    assert "0.700 [0.500, 0.900]" in line and line.split()[-1] == "36"
    assert head.startswith("part") and line.startswith("grid")


def test_the_picture_has_a_line_for_each_step_and_mode_and_a_panel_for_each_number_of_rows() -> None:
    medians = {
        Point(rows, step_ms, mode, delay): 1.0 if mode == "free" else 0.5
        for rows in (64, 256)
        for step_ms in (2.0, 5.0)
        for mode in ("free", "lockstep")
        for delay in (0.0, 5.0, 20.0)
    }
    lines = ElementTree.fromstring(svg(medians)).findall(f"{SVG}polyline")
    assert len(lines) == 8
    heights = {(line.get("stroke-dasharray"), line.get("points", "").split()[0].split(",")[1]) for line in lines}
    # Higher on the page is more of the ideal.
    (full,) = (float(y) for dash, y in heights if dash is None)
    (dashed,) = (float(y) for dash, y in heights if dash)
    assert full < dashed

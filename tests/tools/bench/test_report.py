"""Figures, tables and plot."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tools.bench import cells, plot, report
from tools.bench.cells import Unit
from tools.bench.figures import CellResult, Figure, as_object


def result(cell: cells.Cell, failures: dict[str, str] | None = None, **values: list[float | None]) -> CellResult:
    return CellResult(cell, dict(values), failures or {})


def test_a_figure_is_the_median_and_the_spread_of_the_rounds_that_there_are() -> None:
    assert Figure.of([3.0, 1.0, 2.0, 10.0]) == Figure(2.5, 1.0, 10.0)
    assert Figure.of([]) is None
    partly = result(cells.decode(16, 1, 3), a=[None, 4.0, 2.0])
    assert partly.figure("a") == Figure(3.0, 2.0, 4.0)
    assert partly.figure("nobody") is None


def test_a_ratio_compares_round_by_round() -> None:
    """Both are half as fast in the second round: that is the machine, and the ratio stays."""
    slowed = result(cells.decode(16, 1, 3), a=[40.0, 20.0, 60.0], b=[10.0, 5.0, 20.0])
    assert slowed.ratio("a", "b") == Figure(4.0, 3.0, 4.0)
    assert result(cells.decode(16, 1, 2), a=[40.0, None], b=[None, 5.0]).ratio("a", "b") is None


def test_of_times_the_smaller_is_the_better() -> None:
    cell = cells.first_token("Hi", 2, 1)
    assert cell.unit.figure(0.25, 2) == 250
    assert result(cell, a=[10.0], b=[30.0]).ratio("a", "b") == Figure(3.0, 3.0, 3.0)
    assert Unit.MICROSECONDS.figure(0.5, 1000) == 500
    assert Unit.RATE.figure(0.5, 10) == 20


def test_the_warm_up_is_short() -> None:
    cell = cells.prefill(4096, 3)
    assert cell.request() == {"kind": "prefill", "depth": 0, "tokens": 4096}
    assert cell.request(warm_up=True) == {"kind": "prefill", "depth": 0, "tokens": 64}
    assert cells.prefill(32, 3).request(warm_up=True)["tokens"] == 32


def test_the_suite_covers_what_the_issue_names_and_grows_in_depth() -> None:
    every = cells.all_threads({32: "short", 512: "long"}, rounds=5)
    depths = [cell.arguments["depth"] for cell in every if cell.kind == "decode"]
    assert depths == [16, 128, 512, 2048, 4096, 8000]
    assert [cell.arguments["tokens"] for cell in every if cell.kind == "prefill"] == [64, 512, 2048, 4096]
    assert [cell.arguments["sequences"] for cell in every if cell.kind == "batch"] == [1, 2, 4, 8, 16]
    assert {cell.kind for cell in every} == {"decode", "prefill", "batch", "first_token", "sample", "detokenise"}
    assert max(cell.room for cell in every) <= 8192


def test_a_table_is_aligned_and_says_what_failed_and_what_there_is_not() -> None:
    rows = [
        CellResult(
            cells.decode(16, 1, 2),
            {"edge_llm": [300.0, 320.0], "limit": [400.0, 400.0], "llama.cpp": [100.0, 160.0], "b": [None, None]},
        ),
        CellResult(
            cells.decode(128, 1, 2),
            {"edge_llm": [250.0, 250.0], "limit": [None, None], "llama.cpp": [None, None], "b": [50.0, 50.0]},
            {"llama.cpp": "it ended (1): why"},
        ),
    ]
    assert report.tables(rows, 2).splitlines() == [
        "**decode, 2 threads**",
        "",
        "| decode          | edge_llm | share of limit | llama.cpp |               ratio |   b |               ratio |",
        "|-----------------|---------:|---------------:|----------:|--------------------:|----:|--------------------:|",
        "| @ 16, tokens/s  |      310 |           78 % |       130 | 2.50 (2.00 .. 3.00) |   - |                     |",
        "| @ 128, tokens/s |      250 |                |    failed |                     |  50 | 5.00 (5.00 .. 5.00) |",
    ]
    assert report.failures(rows) == ["decode @ 128: llama.cpp: it ended (1): why"]


def test_a_contestant_that_has_nothing_in_a_section_has_no_column() -> None:
    row = CellResult(cells.decode(16, 1, 1), {"edge_llm": [300.0], "b": [None]})
    assert report.tables([row], 1).splitlines()[0] == "**decode, 1 thread**"
    assert report.tables([row], 1).splitlines()[2] == "| decode         | edge_llm |"


def test_the_line_of_json_holds_every_round_and_no_text() -> None:
    cell = cells.first_token("a secret prompt", 3, 2)
    value = as_object(CellResult(cell, {"edge_llm": [10.0, 20.0], "b": [30.0, None]}, {"b": "it died"}), "edge_llm")
    text = json.dumps(value)
    assert "secret" not in text
    assert value["results"]["edge_llm"] == {"median": 15.0, "low": 10.0, "high": 20.0, "rounds": [10.0, 20.0]}
    assert value["advantage"] == {"b": {"median": 3.0, "low": 3.0, "high": 3.0}}
    assert value["failures"] == {"b": "it died"}


def test_the_plot_is_sound_xml_with_a_line_for_each() -> None:
    svg = plot.decode_plot({"ours": [(16, 300.0), (4096, 150.0)], "<theirs> & co": [(16, 100.0), (4096, 25.0)]}, "tiny")
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 2
    ours, theirs = ([tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines)
    assert [x for x, _ in ours] == [x for x, _ in theirs]
    assert all(mine[1] < other[1] for mine, other in zip(ours, theirs, strict=True))  # faster is higher up
    assert ours[0][1] < ours[1][1]
    texts = {element.text for element in root.iter(f"{space}text")}
    assert {"ours", "<theirs> & co", "16", "4096"} <= texts
    assert "prefers-color-scheme: dark" in svg


@pytest.mark.parametrize("lines", [{"a": [(16, 0.5)]}, {"a": [(16, 997.0), (32, 3.0)]}, {"a": [(16, 9.99)]}])
def test_every_point_is_inside_the_plot(lines: dict[str, list[tuple[int, float]]]) -> None:
    root = ElementTree.fromstring(plot.decode_plot(lines, "tiny"))
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.attrib["cx"]) < 840
        assert 30 <= float(circle.attrib["cy"]) < 360

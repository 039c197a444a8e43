"""Content of the charts in a written report: points of lines, cells of heat maps, and what down-sampling keeps."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.models import Line, Scatter
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._statistics import estimate_noise
from legacy_ddp.debug._page.chart import Grid, extremes
from legacy_ddp.debug._trace.read import Run, open_run
from legacy_ddp.debug._trace.records import CallFacts
from tests.helpers.report import LOCAL, NOISE, Shown, report, titled
from tests.helpers.traces import NAMES, Planted, call_facts, environment, without, write_trace

A, B, PARAMETER_A, PARAMETER_B = "gradient of 'a'", "gradient of 'b'", "parameter 'a'", "parameter 'b'"
OTHER = "ff" * 8
Logs = Callable[[int, int], dict[str, float | str]]


def _run(folder: Path, **more: Any) -> Run:
    return open_run(write_trace(folder, **more))


def _pages(folder: Path, *runs: dict[str, Any]) -> list[Shown]:
    """The report about runs with these contents."""
    return report(folder, *(_run(folder / "ab"[index], **run) for index, run in enumerate(runs)))


def _with_norms(norms: list[list[float]] | np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    """A run in which ranks (rows) have these norms in each step; NaN for a gradient that was not finite."""
    table = np.array(norms)

    def calls(step: int, rank: int) -> CallFacts:
        norm = float(table[rank, step - 1])
        return call_facts(step, rank, local_norm=1.0 if np.isnan(norm) else norm, finite=not np.isnan(norm))

    return {"world_size": len(table), "steps": table.shape[1], "calls": calls, "names": {}, **more}


def _local(folder: Path, *runs: dict[str, Any]) -> Shown:
    return titled(_pages(folder, *runs), LOCAL)


def _map(folder: Path, *planted: Planted, **more: Any) -> Shown:
    """The heat map of parameters about runs with planted entries."""
    return _pages(folder, *({"planted": of_run, **more} for of_run in planted))[0]


# Lines


def test_every_rank_has_a_line(tmp_path: Path) -> None:
    chart = _local(tmp_path, _with_norms([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))

    assert chart.lines == [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [4, 5, 6])]
    assert chart.legend == ["rank 0", "rank 1"]


def test_two_runs_share_the_colour_of_a_rank_and_differ_in_dash(tmp_path: Path) -> None:
    run = _with_norms([[1.0, 2.0], [3.0, 4.0]])
    chart = _local(tmp_path, run, run)
    lines = [line.glyph for line in chart.glyphs(Line)]

    assert [line.line_color for line in lines[:2]] == [line.line_color for line in lines[2:]]
    assert len({line.line_color for line in lines}) == 2
    assert [line.line_dash for line in lines] == [[], [], [6], [6]]
    assert chart.legend == ["rank 0", "rank 1"]


def test_a_point_between_gaps_is_a_dot(tmp_path: Path) -> None:
    chart = _local(tmp_path, _with_norms([[1.0, nan, 3.0, nan, 5.0, 6.0]]))

    dots = chart.glyphs(Scatter)[0].data_source.data
    assert (dots["step"].tolist(), dots["value"].tolist()) == ([1, 3], [1.0, 3.0])


def test_a_gradient_that_was_not_finite_is_a_cross_with_its_ranks(tmp_path: Path) -> None:
    run = _with_norms([[1.0, nan, 3.0], [4.0, nan, nan]])
    chart = _local(tmp_path, run, run)

    found = [item.data_source.data for item in chart.glyphs(Scatter) if "owner" in item.data_source.data]
    assert [data["step"] for data in found] == [[2, 3]] * 2
    assert [data["value"] for data in found] == [[4.0, 4.0]] * 2
    assert [data["owner"] for data in found] == [["A, ranks 0-1", "A, rank 1"], ["B, ranks 0-1", "B, rank 1"]]
    assert chart.legend == ["rank 0", "rank 1", "NaN, inf"]


def test_crosses_of_many_steps_are_counted(tmp_path: Path) -> None:
    norms = np.ones((1, 1200))
    norms[0, [3, 5, 900]] = nan
    chart = _local(tmp_path, _with_norms(norms))

    assert chart.glyphs(Scatter)[-1].data_source.data["steps"] == ["2 of 4 to 6", "901"]


def test_of_many_ranks_the_smallest_the_median_and_the_largest_are_lines_with_their_ranks(tmp_path: Path) -> None:
    norms = np.full((13, 4), 2.0)
    norms[4, :2], norms[5, :2], norms[:, 2], norms[7:9, 3] = 1.0, 9.0, nan, nan
    chart = _local(tmp_path, _with_norms(norms))

    assert chart.legend == ["largest", "median", "smallest", "NaN, inf"]
    values = [line[1] for line in chart.lines]
    assert np.array_equal(values, [[9, 9, nan, 2], [2, 2, nan, 2], [1, 1, nan, 2]], equal_nan=True)
    ranks = [item.data_source.data["rank"][:2].tolist() for item in chart.glyphs(Line)]
    assert (ranks[0], ranks[2]) == ([5, 5], [4, 4])
    assert [tool.tooltips[0][1] for tool in chart.hover[:2]] == ["largest: rank @rank", "median: rank @rank"]


def test_ranks_off_the_median_of_many_ranks_are_named(tmp_path: Path) -> None:
    norms = np.ones((13, 8))
    norms[3] = 1.4  # not enough
    norms[[4, 5, 6]] = np.array([[1.6], [0.1], [3.0]])
    norms[9, :3] = 100.0  # not in half of the steps
    norms[5, 0] = nan
    norms[:, 1] = nan

    captions = _local(tmp_path, _with_norms(norms), _with_norms(np.ones((13, 3)))).captions

    assert captions[1].startswith("A has 13 ranks: the pointer shows whose the smallest, the median and the largest")
    assert captions[1].endswith("by a factor of 1.5 in half of the steps: ranks 4-6.")
    assert captions[2].endswith("in half of the steps: none.")


@pytest.mark.parametrize("norms, scale", [([1.0, 19.0], "Linear"), ([1.0, 21.0], "Log"), ([0.0, 21.0], "Linear")])
def test_an_axis_is_logarithmic_where_a_linear_one_would_squeeze(
    tmp_path: Path, norms: list[float], scale: str
) -> None:
    assert type(_local(tmp_path, _with_norms([norms])).figure.y_scale).__name__ == f"{scale}Scale"


# The noise scale


def _noisy(norms: np.ndarray[Any, Any], reduced: np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    planted = {
        (0, step + 1, "reduced_gradients", A): (f"{step:016x}", float(norm)) for step, norm in enumerate(reduced)
    }
    return {**_with_norms(norms), "names": {"reduced_gradients": (A,)}, "planted": planted, **more}


def test_the_noise_scale_averages_both_parts_before_it_divides(tmp_path: Path) -> None:
    norms = np.random.default_rng(0).uniform(50, 90, (3, 60))
    reduced = np.repeat([2.0, 0.9, 0.3], 20)  # less noise than none, some, and less signal than none
    chart = titled(_pages(tmp_path, _noisy(norms, reduced)), NOISE)

    ((steps, scales),) = chart.lines
    assert "both parts of the estimate over 10 recorded steps up to it" in chart.captions[0]
    assert chart.figure.yaxis[0].axis_label == "noise scale [items of sample_size]"
    assert steps == list(range(10, 61))
    parts = [estimate_noise(norms[:, step].tolist(), [64] * 3, reduced[step]) for step in range(60)]
    for step, scale in zip(steps, scales, strict=True):
        taken = parts[step - 10 : step]
        signal, noise = sum(part.squared_norm for part in taken), sum(part.noise for part in taken)
        if signal > 0 and noise > 0:
            assert scale == pytest.approx(noise / signal, rel=1e-12)  # another order of summation
        else:
            assert np.isnan(scale)
    assert np.isnan([scales[0], scales[-1]]).all()
    assert not np.isnan(scales[20:25]).any()


@pytest.mark.parametrize("steps, window", [(3, 3), (199, 10), (400, 20)])
def test_the_window_of_the_noise_scale_grows_with_the_run(tmp_path: Path, steps: int, window: int) -> None:
    run = _noisy(np.full((2, steps), 2.0), np.full(steps, 1.5))

    assert f"over {window} recorded steps" in titled(_pages(tmp_path, run), NOISE).captions[0]


def test_steps_in_which_the_noise_is_unknown_are_left_out(tmp_path: Path) -> None:
    def calls(step: int, rank: int) -> CallFacts:
        sits_out = rank == 2 or (rank, step) == (1, 1)  # in step 1 a single rank takes part
        return call_facts(
            step,
            rank,
            sample_size=None,
            took_part=not sits_out,
            local_norm=None if sits_out or (rank, step) == (0, 2) else 2.0,
            finite=None if sits_out else (rank, step) != (0, 4),
        )

    run = _noisy(np.ones((3, 5)), np.array([1.5, 1.5, nan, 1.5, 1.5]), calls=calls)
    run["planted"][0, 3, "reduced_gradients", A] = (OTHER, 1.0, 1)
    chart = titled(_pages(tmp_path, run), NOISE)

    assert chart.lines[0][0] == [5]
    assert chart.figure.yaxis[0].axis_label == "noise scale [contributions of a rank]"


# Who waited


def _waits(waited: list[list[float]], repeat: int = 1) -> dict[str, Any]:
    """A run in which ranks (rows) waited these seconds, each step ``repeat`` times; NaN for a call that is missing."""
    table = np.repeat(np.array(waited), repeat, axis=1)
    calls = lambda step, rank: call_facts(step, rank, seconds_waited=float(table[rank, step - 1]))  # noqa: E731
    return {"world_size": len(table), "steps": table.shape[1], "calls": calls, "names": {}}


def test_the_rank_that_waited_least_was_waited_for(tmp_path: Path) -> None:
    waited = [[0.5, 0.0, 0.3, 0.125], [0.0, 0.0, 0.0, 0.5], [0.25, 0.0, 0.25, 0.25]]
    run = _run(tmp_path / "a", **_waits(waited), end=None)
    without(run.paths[0], lambda line: b'"line":"call"' in line and b'"step":3' in line)
    chart = titled(report(tmp_path, run), "Who waited")

    assert chart.columns == ["1, waiting for rank 1", "2", "3", "4, waiting for rank 0"]
    assert np.array_equal(chart.values[0], [0.5, 0.0, nan, 0.125], equal_nan=True)
    assert chart.labels[0] == ["", "did not wait", "not recorded", ""]
    assert chart.table[1:] == [("rank 1", "1 of 4", "0.375", "0.375"), ("rank 0", "1 of 4", "0.25", "0.25")]


def test_the_rank_that_cost_most_is_named_before_one_that_was_last_more_often(tmp_path: Path) -> None:
    chart = titled(_pages(tmp_path, _waits([[0.0, 0.0, 5.0, 0.0], [0.25, 0.75, 0.0, 0.5]])), "Who waited")

    assert chart.table[1:] == [("rank 1", "1 of 4", "5", "5"), ("rank 0", "3 of 4", "0.5", "1.5")]


def test_a_column_names_the_rank_that_was_waited_for_most_often_in_it(tmp_path: Path) -> None:
    steps = [[0.0, 0.5, 0.5], [0.5, 0.0, 0.0], [0.5] * 3]
    table = np.tile(np.array(steps), 267)  # 801 steps in columns of three
    chart = titled(_pages(tmp_path, _waits(table.tolist())), "Who waited")

    assert chart.columns[:2] == [f"{span}, waiting for rank 1 in 2 of 3 steps" for span in ("1 to 3", "4 to 6")]
    assert len(chart.columns) == 267


# Parameters of one run


def test_a_run_shows_the_norms_of_its_reduced_gradients(tmp_path: Path) -> None:
    planted = {(0, 2, "reduced_gradients", A): ("aa" * 8, 7.5), (0, 3, "reduced_gradients", B): (None, None)}
    chart = _map(tmp_path, planted, world_size=1)

    assert chart.rows == ["'a'", "'b'"]
    assert chart.cell("'a'", "2") == (7.5, "")
    assert chart.cell("'b'", "2") == (2.25, "")
    assert chart.cell("'b'", "3")[1] == "no gradient"
    assert [row[0] for row in chart.labels] == ["no gradient"] * 2  # at the start


def test_elements_that_are_not_finite_are_counted_on_every_rank_that_differs(tmp_path: Path) -> None:
    planted = {
        (0, 2, "reduced_gradients", A): ("aa" * 8, 1.0, 3),
        (1, 2, "reduced_gradients", A): ("aa" * 8, 1.0, 3),
        (1, 4, "parameters", PARAMETER_B): (OTHER, 1.0, 9),
    }
    chart = _map(tmp_path, planted)

    assert chart.cell("'a'", "2") == (1.0, "NaN or infinity, 3")
    assert chart.cell("'b'", "4")[1] == "ranks differ, 9"
    assert chart.cells_with(", ") == {("'a'", "2"), ("'b'", "4")}


@pytest.mark.parametrize("rank", [1, 2])
def test_a_run_marks_where_ranks_hold_other_gradients_or_parameters(tmp_path: Path, rank: int) -> None:
    planted = {
        (rank, 2, "reduced_gradients", A): (OTHER, 1.0),
        (rank, 3, "parameters", PARAMETER_B): (OTHER, 2.375),
        (rank, 0, "parameters", PARAMETER_A): (OTHER, 1.0),
        (rank, 4, "optimizer", "exp_avg of 'a'"): (OTHER, 1.0),  # is not shown
    }
    chart = _map(tmp_path, planted, world_size=3)

    assert chart.cells_with("ranks differ") == {("'a'", "2"), ("'b'", "3"), ("'a'", "start")}


# Parameters of two runs


def test_two_equal_runs_are_at_distance_0_wherever_they_hold_something(tmp_path: Path) -> None:
    chart = _map(tmp_path, {}, {})

    assert (chart.values == 0).all()  # at the start, too: there are parameters
    assert {label for row in chart.labels for label in row} == {"equal bits"}


@pytest.mark.parametrize("swapped", [False, True])
def test_the_distance_of_two_runs_is_that_of_norms_over_the_larger_one(tmp_path: Path, swapped: bool) -> None:
    planted = {
        (0, 2, "reduced_gradients", A): (OTHER, 5.0),  # 1.25 in the other run
        (0, 3, "parameters", PARAMETER_B): (OTHER, 2.375),  # the same norm
        (0, 4, "reduced_gradients", B): (None, None),
        (0, 5, "reduced_gradients", B): (OTHER, 0.0),
    }
    chart = _map(tmp_path, *((planted, {}) if swapped else ({}, planted)), world_size=1)

    assert chart.cell("'a'", "2") == (0.75, "bits differ")
    assert chart.cell("'b'", "3") == (0.0, "norms equal, bits differ")
    assert chart.cell("'b'", "4") == chart.cell("'b'", "5") == (1.0, "bits differ")
    assert len(chart.cells_with("bits differ")) == 4


def test_what_neither_run_has_is_equal_whatever_else_differs(tmp_path: Path) -> None:
    lacking = {(0, step, "reduced_gradients", A): (None, None) for step in (2, 3)}
    planted = {**lacking, (0, 3, "reduced_gradients", B): (OTHER, 1.0)}
    chart = _map(tmp_path, lacking, planted, names={"reduced_gradients": (A, B)}, world_size=1)

    assert chart.cell("'a'", "2") == chart.cell("'a'", "3") == (0.0, "equal bits")
    assert chart.cells_with("bits differ") == {("'b'", "3")}


def test_a_cell_is_the_larger_difference_of_gradient_and_parameter(tmp_path: Path) -> None:
    planted = {
        (0, 2, "reduced_gradients", A): (OTHER, 2.5),
        (0, 2, "parameters", PARAMETER_A): (OTHER, 5.0),
        (0, 3, "reduced_gradients", A): (OTHER, 5.5),
        (0, 3, "parameters", PARAMETER_A): (OTHER, 2.75),
    }
    chart = _map(tmp_path, {}, planted, world_size=1)

    assert (chart.cell("'a'", "2")[0], chart.cell("'a'", "3")[0]) == (0.75, 0.75)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_difference_of_two_runs_on_any_rank_shows(tmp_path: Path, everywhere: bool) -> None:
    planted: Planted = {(1, 2, "reduced_gradients", A): (OTHER, 5.0)}
    if everywhere:  # rank 1 differs by more than rank 0, which was looked at first
        planted = {**planted, (0, 2, "reduced_gradients", A): ("ee" * 8, 2.5)}
    chart = _map(tmp_path, {}, planted)

    assert chart.cells_with("bits differ") == {("'a'", "2")}
    assert chart.cell("'a'", "2")[0] == 0.75


def test_runs_of_other_sizes_are_compared_on_rank_0(tmp_path: Path) -> None:
    planted = {(1, 2, "reduced_gradients", A): (OTHER, 5.0), (2, 3, "reduced_gradients", A): (OTHER, 5.0)}
    charts = _pages(tmp_path, {}, {"planted": planted, "world_size": 3})

    assert "Only rank 0 of both is compared." in charts[0].captions
    assert not charts[0].cells_with("bits differ")
    assert [len(titled(charts, f"Who waited for whom: {run}").rows) for run in "AB"] == [2, 3]


def test_steps_and_parameters_that_only_one_run_has_are_no_difference_but_a_gap(tmp_path: Path) -> None:
    names = {**NAMES, "reduced_gradients": (A, B, "gradient of 'c'"), "parameters": ()}
    chart = _pages(tmp_path, {"steps": 3}, {"names": names, "steps": 5})[0]

    assert chart.rows == ["'a'", "'b'", "'c'"]
    assert all(row[0] == row[4] == row[5] == "not in both runs" for row in chart.labels)
    assert chart.cell("'a'", "2") == (0.0, "equal bits")
    assert chart.cell("'c'", "2") == (1.0, "bits differ")


def test_the_start_of_a_run_that_goes_on_is_no_step_of_its_own(tmp_path: Path) -> None:
    environments = lambda rank, size: environment(rank, size, first_step=4)  # noqa: E731  # short, and used once
    chart = _pages(tmp_path, {"steps": 6}, {"steps": 3, "environments": environments})[0]

    assert chart.columns == ["start", "1", "2", "3", "4", "5", "6"]
    assert (chart.values[:, 3] == 0).all()  # what both hold after step 3
    assert np.isnan(chart.values[:, :3]).all()


def test_a_later_start_of_another_run_is_one_of_the_steps(tmp_path: Path) -> None:
    environments = lambda rank, size: environment(rank, size, first_step=4)  # noqa: E731  # short, and used once
    runs = {"steps": 4, "start": ()}, {"steps": 1, "environments": environments}

    assert _pages(tmp_path, *runs)[0].columns == ["1", "2", "3", "4"]


# Down-sampling


@pytest.mark.parametrize("names, steps, count", [(2, 3, "4"), (2, 401, "up to 7"), (501, 3, "up to 7")])
def test_cells_that_share_a_place_show_the_largest_and_whatever_stands_out(
    tmp_path: Path, names: int, steps: int, count: str
) -> None:
    listed = {"reduced_gradients": tuple(f"gradient of 'p{index}'" for index in range(names))}
    not_finite = {("p1", 1): (2.0, 7), ("p0", 2): (2.0, 7), ("p1", 2): (1e6, 4)}
    planted: dict[Any, Any] = {
        (rank, step, "reduced_gradients", f"gradient of {name!r}"): ("ee" * 8, norm, number)
        for (name, step), (norm, number) in not_finite.items()
        for rank in (0, 1)
    }
    planted[1, 3, "reduced_gradients", "gradient of 'p0'"] = (OTHER, 1.0)
    chart = _map(tmp_path, planted, names=listed, steps=steps, start=())
    row = chart.rows[1] if names == 2 else "'p0' to 'p1' (2 parameters)"
    columns = [next(name for name in chart.columns if name.startswith(starts)) for starts in (("2", "1 to 2"), ("3",))]

    assert chart.cell(row, columns[0]) == (1e6, f"NaN or infinity, {count}")
    assert chart.cells_with("ranks differ") == {(chart.rows[0], columns[1])}


VALUES = st.one_of(st.just(nan), st.floats(min_value=0, max_value=1e30))


@given(st.lists(VALUES, max_size=300), st.integers(2, 40))
def test_a_line_keeps_the_smallest_and_the_largest_value_of_every_bin(values: list[float], most: int) -> None:
    taken = np.array(values, dtype=np.float64)
    kept = extremes(taken, most)

    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    size = 1 if len(values) <= most else max(1, -(-len(values) // (most // 2)))
    for first in range(0, len(values), size):
        inside, drawn = taken[first : first + size], taken[[at for at in kept if first <= at < first + size]]
        assert len(drawn)  # a gap stays a gap
        if not np.isnan(inside).all():
            assert (np.nanmin(drawn), np.nanmax(drawn)) == (np.nanmin(inside), np.nanmax(inside))


@given(st.sets(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 30))
def test_every_step_is_in_the_column_that_says_so(numbers: set[int], every: int, most: int) -> None:
    steps = {number * every for number in numbers}
    grid = Grid.of(steps, max_columns=most)

    assert grid.count <= most
    assert grid.stride % every == 0 or len(steps) == 1
    assert grid.holds(steps)
    assert not grid.holds({max(steps) + grid.stride})
    for step in steps:
        column = grid.column(step)
        first, last = grid.span(column)
        assert 0 <= column < grid.count
        assert first <= step <= last
        assert grid.left + column * grid.width < step < grid.left + (column + 1) * grid.width
    assert grid.last == max(steps)


@pytest.mark.parametrize(
    "steps, start, first, stride",
    [
        ({1, 2, 3}, 0, 0, 1),  # before every step
        ({1, 11, 21}, 0, -9, 10),  # one place before, however near it is
        ({10, 20}, 0, 0, 10),
        ({110, 120}, 104, 100, 10),  # taken up again in the middle
        ({5}, 4, 4, 1),
    ],
)
def test_the_start_has_a_place_of_its_own(steps: set[int], start: int, first: int, stride: int) -> None:
    grid = Grid.of(steps, {start})

    assert (grid.first, grid.stride, grid.start) == (first, stride, True)
    assert grid.column(start) == 0
    assert min(grid.column(step) for step in steps) == 1


def test_a_trace_of_a_start_alone_has_one_column(tmp_path: Path) -> None:
    assert _map(tmp_path, {}, steps=0).columns == ["start"]


# Calls as read from traces


def test_a_rank_without_a_part_or_with_a_damaged_gradient_has_a_gap(tmp_path: Path) -> None:
    def calls(step: int, rank: int) -> CallFacts:
        if (step, rank) == (2, 1):
            return call_facts(step, rank, took_part=False, local_norm=None, sample_size=0, finite=None)
        return call_facts(step, rank, finite=(step, rank) != (3, 0))

    lines = _local(tmp_path, {"calls": calls, "steps": 3}).lines

    assert np.array_equal([values for _, values in lines], [[1.125, 1.25, nan], [2.125, nan, 2.375]], equal_nan=True)


def test_a_rank_that_ended_early_leaves_a_gap_and_its_end_is_known(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", steps=3, end=None)
    lines = run.paths[1].read_bytes().splitlines(keepends=True)
    last_call = max(number for number, line in enumerate(lines) if b'"line":"call"' in line)
    run.paths[1].write_bytes(b"".join(lines[:last_call]) + lines[last_call][:20])
    chart = titled(report(tmp_path, run), "Who waited")

    assert np.isnan(chart.values).tolist() == [[True] + [False] * 3, [True, False, False, True]]
    page = (tmp_path / "report.html").read_text()
    assert "rank 0: no last line: killed, still running, or recorder stopped; rank 1: last line torn: killed" in page


def test_a_damaged_file_differs_from_one_that_ended_in_order(tmp_path: Path) -> None:
    run = _run(tmp_path / "a")
    run.paths[0].write_bytes(run.paths[0].read_bytes().replace(b'"line":"end"', b'"line":"eng"'))
    report(tmp_path, run)

    assert "rank 1: closed" in (page := (tmp_path / "report.html").read_text())
    assert "rank 0: damaged: line " in page


# Metrics and logged values


def _weighted(step: int, rank: int) -> CallFacts:
    return call_facts(step, rank, divisor=10 * step, metrics={"loss": 20.0 * step**2})


def _of_values(folder: Path, *runs: dict[str, Any]) -> list[Shown]:
    """The charts of metrics and of logged values."""
    found = _pages(folder, *runs)
    return [chart for chart in found if chart.title.startswith(("Metric", "Logged")) or " more " in chart.title]


def test_a_weighted_metric_is_a_mean_per_item_and_a_plain_one_the_sum(tmp_path: Path) -> None:
    plain = lambda step, rank: call_facts(  # noqa: E731  # short, and used once
        step, rank, sample_size=None, divisor=2, metrics={"loss": 20.0 * step**2}
    )
    for name, calls in (("mean", _weighted), ("sum", plain)):
        (tmp_path / name).mkdir()
        (chart,) = _of_values(tmp_path / name, {"calls": calls})
        divided = ", divided by the sum of sample_size" if name == "mean" else ""
        assert chart.title == f"Metric 'loss': the sum over the ranks{divided}"
        values = [2.0, 4.0, 6.0, 8.0, 10.0] if name == "mean" else [20.0, 80.0, 180.0, 320.0, 500.0]
        assert chart.lines == [([1, 2, 3, 4, 5], values)]


def test_two_runs_share_the_chart_of_a_metric(tmp_path: Path) -> None:
    def other(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, divisor=10 * step, metrics={"loss": 10.0 * step, "only": 30.0 * step})

    loss, only = _of_values(tmp_path, {"calls": _weighted}, {"calls": other, "steps": 3})

    assert loss.lines == [([1, 2, 3, 4, 5], [2.0, 4.0, 6.0, 8.0, 10.0]), ([1, 2, 3], [1.0, 1.0, 1.0])]
    assert only.lines == [([1, 2, 3], [3.0, 3.0, 3.0])]
    assert loss.legend == ["A", "B"]


def test_values_that_are_not_finite_are_gaps_and_told(tmp_path: Path) -> None:
    values = {1: 2.0, 2: nan, 3: inf, 4: 8.0, 5: -inf}

    def calls(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, divisor=0 if step == 4 else 2, metrics={"loss": values[step], "bad": nan})

    loss, bad = _of_values(tmp_path, {"calls": calls})

    assert loss.captions == ["NaN or infinite in 3 of 5 steps, first in step 2: a gap."]
    assert np.isnan(loss.lines[0][1]).tolist() == [False, True, True, True, True]
    assert bad.figure is None
    assert bad.captions[-1] == "Left out: no value is finite."


def test_every_rank_has_a_line_of_its_logged_values(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"lr": 1.0 / (1 + step) + rank} if step < 3 or rank else {}

    (chart,) = _of_values(tmp_path, {"logs": logs, "steps": 3})

    assert chart.title == "Logged 'lr': each rank's own value"
    (steps, first), (_, second) = chart.lines
    assert steps == [0, 1, 2, 3]
    assert np.array_equal(first, [1.0, 0.5, 1 / 3, nan], equal_nan=True)
    assert second == [2.0, 1.5, 4 / 3, 1.25]


def test_a_value_logged_in_one_run_alone_has_a_chart(tmp_path: Path) -> None:
    logs: Logs = lambda step, rank: {"lr": 1.0 + step + rank}  # noqa: E731

    (chart,) = _of_values(tmp_path, {"logs": logs, "steps": 2}, {"steps": 2})

    assert [line for line in chart.lines if line[0]] == [([0, 1, 2], [1.0, 2.0, 3.0]), ([0, 1, 2], [2.0, 3.0, 4.0])]


def test_the_last_text_of_each_name_is_in_a_table(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"file": f"shard {step}"} if step < 3 else {"file": "<own>"} if rank == 2 else {}

    (chart,) = _of_values(tmp_path, {"logs": logs, "world_size": 3})

    held = [("file", "ranks 0-1", "2", "shard 2"), ("file", "rank 2", "5", "<own>")]
    assert chart.table == [("name", "ranks", "step", "text"), *held]


@pytest.mark.parametrize("number", [8, 10])
def test_very_many_names_are_listed_and_not_drawn(tmp_path: Path, number: int) -> None:
    names = {f"m{index}": 1.0 for index in range(number)}
    run = {"calls": lambda step, rank: call_facts(step, rank, metrics=names), "logs": lambda *_: names}

    found = _of_values(tmp_path, run)

    assert sum(chart.figure is not None for chart in found) == 16
    left = [(chart.title, chart.captions) for chart in found if chart.figure is None]
    expected = [(f"2 more {noun}", ["Left out: 'm8', 'm9'."]) for noun in ("metrics", "logged names")]
    assert left == expected * (number > 8)


def test_a_run_without_metrics_has_no_chart_of_them(tmp_path: Path) -> None:
    assert _of_values(tmp_path, {}) == []

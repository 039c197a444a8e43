"""Content of the charts, independent of a browser: points of lines, cells, and what down-sampling keeps."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.models import ColorBar, FixedTicker, GlyphRenderer, HoverTool, Line, Scatter, VArea
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp.debug._page.calls import CallTable
from legacy_ddp.debug._page.chart import Axis, Bins, Cells, Chart, Grid, extremes
from legacy_ddp.debug._page.heatmap import parameter_chart, wait_chart
from legacy_ddp.debug._page.line_charts import (
    MAX_CHARTS,
    MAX_LINES,
    local_norm_chart,
    logged_charts,
    metric_charts,
    noise_scale_chart,
)
from legacy_ddp.debug._page.page import draw, draw_charts
from legacy_ddp.debug._page.series import ParameterCells, Series, read_series
from legacy_ddp.debug._trace.records import CallFacts
from legacy_ddp.debug._trace.run import open_run
from tests.helpers.call_tables import make_call_table
from tests.helpers.traces import call_facts, write_trace

AXIS = Axis.over(0.5, 6.5)


def _renderers(chart: Chart, glyph: type[Any]) -> list[GlyphRenderer]:
    assert chart.plot is not None
    return [item for item in chart.plot.renderers if isinstance(item.glyph, glyph)]


def _legend(chart: Chart) -> list[str]:
    assert chart.plot is not None
    return [item.label.value for legend in chart.plot.legend for item in legend.items]


def _hover(chart: Chart, key: str) -> Any:
    """Arguments of the hover text."""
    assert chart.plot is not None
    (hover,) = (tool for tool in chart.plot.tools if isinstance(tool, HoverTool))
    return hover.formatters[key].args


def _local_norms(tables: list[CallTable], labels: list[str]) -> Chart:
    return draw(AXIS, local_norm_chart(tables), labels)


def test_every_rank_has_a_line() -> None:
    chart = _local_norms([make_call_table([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])], [""])

    assert [item.data_source.data["value"].tolist() for item in _renderers(chart, Line)] == [[1, 2, 3], [4, 5, 6]]
    assert all(item.data_source.data["step"].tolist() == [1, 2, 3] for item in _renderers(chart, Line))
    assert _legend(chart) == ["rank 0", "rank 1"]


def test_two_runs_share_the_colour_of_a_rank_and_differ_in_dash() -> None:
    table = make_call_table([[1.0, 2.0], [3.0, 4.0]])
    lines = _renderers(_local_norms([table, table], ["A", "B"]), Line)

    assert [line.glyph.line_color for line in lines[:2]] == [line.glyph.line_color for line in lines[2:]]
    assert len({line.glyph.line_color for line in lines}) == 2
    assert [line.glyph.line_dash for line in lines] == [[], [], [6], [6]]
    assert _legend(_local_norms([table, table], ["A", "B"])) == ["rank 0", "rank 1"]


def test_a_point_between_gaps_is_a_dot() -> None:
    chart = _local_norms([make_call_table([[1.0, nan, 3.0, nan, 5.0, 6.0]])], [""])

    (dots,) = _renderers(chart, Scatter)
    assert dots.data_source.data["step"].tolist() == [1, 3]
    assert dots.data_source.data["value"].tolist() == [1.0, 3.0]


def test_an_axis_with_one_point_shows_one_point() -> None:
    one_step, axis = make_call_table([[2.5]]), Axis.over(0.5, 1.5)
    alone = draw(axis, local_norm_chart([one_step]), [""])
    several = _local_norms([make_call_table([[2.5, 4.0]])], [""])

    assert alone.plot is not None
    assert several.plot is not None
    assert [axis.ticker.ticks for axis in (alone.plot.xaxis[0], alone.plot.yaxis[0])] == [[1], [2.5]]
    assert not any(isinstance(axis.ticker, FixedTicker) for axis in several.plot.axis)


def test_a_colour_bar_of_one_value_shows_one_value(tmp_path: Path) -> None:
    names = {"reduced_gradients": ("gradient of 'a'",)}
    runs = [open_run(write_trace(tmp_path / str(steps), names=names, start=(), steps=steps)) for steps in (1, 2)]
    axis = Axis.over(0.5, 1.5)

    drawn = [draw(axis, parameter_chart(read_series([run])), [""]) for run in runs]

    bars = [chart.plot.select_one(ColorBar) for chart in drawn if chart.plot is not None]
    assert [len(bar.ticker.ticks) for bar in bars] == [1, 4]
    # The trace has 1 + 1 / 8 as the norm of step 1.
    assert [*bars[0].major_label_overrides.values()] == ["1.1"]


def test_a_gradient_that_was_not_finite_is_a_cross_with_its_ranks() -> None:
    table = make_call_table(
        [[1.0, nan, 3.0], [4.0, nan, nan]], damaged=np.array([[False, True, False], [False, True, True]])
    )

    crosses = _renderers(_local_norms([table, table], ["A", "B"]), Scatter)

    found = [item.data_source.data for item in crosses if "owner" in item.data_source.data]
    assert [data["step"] for data in found] == [[2, 3]] * 2
    assert [data["owner"] for data in found] == [["A, ranks 0-1", "A, rank 1"], ["B, ranks 0-1", "B, rank 1"]]


def test_crosses_of_many_steps_are_counted() -> None:
    damaged = np.zeros((1, 1200), dtype=np.bool_)
    damaged[0, [3, 5, 900]] = True
    (crosses,) = _renderers(_local_norms([make_call_table(np.ones((1, 1200)), damaged=damaged)], [""]), Scatter)

    assert crosses.data_source.data["steps"] == ["2 of 4 to 6", "901"]


def test_the_band_of_many_ranks_goes_from_the_smallest_to_the_largest() -> None:
    norms = np.full((MAX_LINES + 1, 3), 2.0)
    norms[4, :2], norms[5, :2], norms[:, 2] = 1.0, 9.0, nan
    chart = _local_norms([make_call_table(norms)], [""])

    (band,) = _renderers(chart, VArea)
    assert [band.data_source.data[key].tolist() for key in ("step", "low", "high")] == [[1, 2], [1, 1], [9, 9]]
    assert _legend(chart) == ["min to max", "median", "rank 5", "rank 4"]
    median = _renderers(chart, Line)[0].data_source.data["value"]
    assert np.array_equal(median, [2.0, 2.0, nan], equal_nan=True)


@pytest.mark.parametrize("norms, scale", [([1.0, 19.0], "linear"), ([1.0, 21.0], "log"), ([0.0, 21.0], "linear")])
def test_an_axis_is_logarithmic_where_a_linear_one_would_squeeze(norms: list[float], scale: str) -> None:
    chart = _local_norms([make_call_table([norms])], [""])

    assert chart.plot is not None
    assert type(chart.plot.y_scale).__name__.lower() == f"{scale}scale"


def test_the_axis_of_the_noise_scale_has_its_unit() -> None:
    for counted, unit in ((True, "items of sample_size"), (False, "contributions of a rank")):
        table = make_call_table([[1.5] * 4, [1.4] * 4], [1.2] * 4, counted=counted)
        chart = draw(AXIS, noise_scale_chart([table], [""]), [""])
        assert chart.plot is not None
        assert chart.plot.yaxis[0].axis_label == f"noise scale [{unit}]"


@pytest.mark.parametrize("names, steps, prefix", [(2, 3, ""), (2, 401, "up to "), (501, 3, "up to ")])
def test_a_count_of_several_cells_is_the_largest_of_them(names: int, steps: int, prefix: str) -> None:
    parameters = ParameterCells([f"p{number}" for number in range(names)], Grid.of(range(1, steps + 1)))
    parameters.cells.nonfinite[1, 2] = 7
    series = Series(parameters, (make_call_table([[1.0]]),), True)
    cell = _hover(draw(AXIS, parameter_chart(series), [""]), "@cell")

    assert cell["most"] == prefix
    assert cell["counts"] == {str(parameters.grid.count + 2): 7}


def test_a_column_names_the_rank_that_was_waited_for_most_often_in_it() -> None:
    waited = np.array([[0.0, 0.5, 0.5, 0.5], [0.5, 0.0, 0.0, 0.5], [0.5, 0.5, 0.5, 0.0]])
    table = make_call_table(np.ones((3, 4)), waited=waited)

    def columns(max_columns: int) -> list[str]:
        grid = Grid.of(range(1, 5), max_columns=max_columns)
        labels: list[str] = _hover(draw(AXIS, wait_chart(table, grid, ""), [""]), "$x")["columns"]
        return labels

    assert columns(2) == ["1 to 2, waiting for rank 0 in 1 of 2 steps", "3 to 4, waiting for rank 1 in 1 of 2 steps"]
    assert columns(1) == ["1 to 4, waiting for rank 1 in 2 of 4 steps"]
    assert columns(9) == [f"{step}, waiting for rank {rank}" for step, rank in ((1, 0), (2, 1), (3, 1), (4, 2))]


# Charts of metrics and logged values, as read from traces

Logs = Callable[[int, int], dict[str, float | str]]


def _weighted(step: int, rank: int) -> CallFacts:
    return call_facts(step, rank, divisor=10 * step, metrics={"loss": 20.0 * step**2})


def _plain(step: int, rank: int) -> CallFacts:
    return call_facts(step, rank, sample_size=None, divisor=2, metrics={"loss": 20.0 * step**2})


def _charts(folder: Path, *runs: dict[str, Any]) -> tuple[list[Chart], list[Chart]]:
    """Charts of metrics, and of logged values."""
    labels = ("A", "B") if len(runs) == 2 else ("",)
    opened = [open_run(write_trace(folder / str(index), **run)) for index, run in enumerate(runs)]
    series = read_series(opened)
    titles = [chart.title for chart in draw_charts(series, labels)]
    metrics = [draw(AXIS, item, labels) for item in metric_charts(series.metrics, series.calls, labels)]
    logged = [draw(AXIS, item, labels) for item in logged_charts(series.logged, labels)]
    assert [chart.title for chart in (*metrics, *logged)] == [
        title for title in titles if title.startswith(("Metric", "Logged")) or " more " in title
    ]
    return metrics, logged


def _points(chart: Chart) -> list[tuple[list[int], list[float]]]:
    assert chart.plot is not None
    found = [item.data_source.data for item in chart.plot.renderers if isinstance(item.glyph, Line)]
    return [(data["step"].tolist(), data["value"].tolist()) for data in found]


def test_a_weighted_metric_is_a_mean_per_item(tmp_path: Path) -> None:
    (chart,), _ = _charts(tmp_path, {"calls": _weighted})

    assert chart.title == "Metric 'loss': the sum over the ranks, divided by the sum of sample_size"
    assert _points(chart) == [([1, 2, 3, 4, 5], [2.0, 4.0, 6.0, 8.0, 10.0])]


def test_a_plain_metric_is_the_sum(tmp_path: Path) -> None:
    (chart,), _ = _charts(tmp_path, {"calls": _plain})

    assert chart.title == "Metric 'loss': the sum over the ranks"
    assert _points(chart) == [([1, 2, 3, 4, 5], [20.0, 80.0, 180.0, 320.0, 500.0])]


def test_two_runs_share_the_chart_of_a_metric(tmp_path: Path) -> None:
    def other(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, divisor=10 * step, metrics={"loss": 10.0 * step, "only": 30.0 * step})

    (loss, only), _ = _charts(tmp_path, {"calls": _weighted}, {"calls": other, "steps": 3})

    assert _points(loss) == [([1, 2, 3, 4, 5], [2.0, 4.0, 6.0, 8.0, 10.0]), ([1, 2, 3], [1.0, 1.0, 1.0])]
    assert _points(only) == [([1, 2, 3], [3.0, 3.0, 3.0])]
    assert loss.plot is not None
    assert [item.label.value for legend in loss.plot.legend for item in legend.items] == ["A", "B"]


def test_values_that_are_not_finite_are_gaps_and_told(tmp_path: Path) -> None:
    values = {1: 2.0, 2: nan, 3: inf, 4: 8.0, 5: -inf}

    def calls(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, divisor=0 if step == 4 else 2, metrics={"loss": values[step], "bad": nan})

    (loss, bad), _ = _charts(tmp_path, {"calls": calls})

    assert loss.captions == ("NaN or infinite in 3 of 5 steps, first in step 2: a gap.",)
    assert np.isnan(_points(loss)[0][1]).tolist() == [False, True, True, True, True]
    assert bad.plot is None
    assert bad.captions[-1] == "Left out: no value is finite."


def test_every_rank_has_a_line_of_its_logged_values(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"lr": 1.0 / (1 + step) + rank} if step < 3 or rank else {}

    _, (chart,) = _charts(tmp_path, {"logs": logs, "steps": 3})

    assert chart.title == "Logged 'lr': each rank's own value"
    (steps, first), (_, second) = _points(chart)
    assert steps == [0, 1, 2, 3]
    assert first[:3] == [1.0, 0.5, 1 / 3]
    assert np.isnan(first[3])
    assert second == [2.0, 1.5, 4 / 3, 1.25]


def test_many_ranks_are_a_band_of_logged_values(tmp_path: Path) -> None:
    _, (chart,) = _charts(tmp_path, {"logs": lambda step, rank: {"lr": 1.0 + step + rank}, "world_size": 13})

    assert "has 13 ranks: the band goes from the smallest value to the largest" in chart.captions[0]


def test_a_value_logged_in_one_run_alone_has_a_chart(tmp_path: Path) -> None:
    logs: Logs = lambda step, rank: {"lr": 1.0 + step + rank}  # noqa: E731

    _, (chart,) = _charts(tmp_path, {"logs": logs, "steps": 2}, {"steps": 2})

    assert [line for line in _points(chart) if line[0]] == [([0, 1, 2], [1.0, 2.0, 3.0]), ([0, 1, 2], [2.0, 3.0, 4.0])]


def test_the_last_text_of_each_name_is_in_a_table(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"file": f"shard {step}"} if step < 3 else {"file": "<own>"} if rank == 2 else {}

    _, (chart,) = _charts(tmp_path, {"logs": logs, "world_size": 3})

    assert chart.table == (
        ("name", "ranks", "step", "text"),
        ("file", "ranks 0-1", "2", "shard 2"),
        ("file", "rank 2", "5", "<own>"),
    )


@pytest.mark.parametrize("number", [MAX_CHARTS, MAX_CHARTS + 2])
def test_very_many_names_are_listed_and_not_drawn(tmp_path: Path, number: int) -> None:
    names = {f"m{index}": 1.0 for index in range(number)}

    def calls(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, metrics=names)

    metrics, logged = _charts(tmp_path, {"calls": calls, "logs": lambda *_: names})

    for charts, noun in ((metrics, "metrics"), (logged, "logged names")):
        assert sum(chart.plot is not None for chart in charts) == MAX_CHARTS
        left = [(chart.title, chart.captions) for chart in charts[MAX_CHARTS:]]
        assert left == [(f"2 more {noun}", ("Left out: 'm8', 'm9'.",))] * (number > MAX_CHARTS)


def test_a_run_without_metrics_has_no_chart_of_them(tmp_path: Path) -> None:
    assert _charts(tmp_path, {}) == ([], [])


# Down-sampling keeps extreme values, for all sizes

VALUES = st.one_of(st.just(float("nan")), st.floats(min_value=0, max_value=1e30))


@given(st.integers(0, 5000), st.integers(1, 500))
def test_bins_hold_everything_once_and_are_no_more_than_allowed(total: int, most: int) -> None:
    bins = Bins.at_most(total, most)
    spans = [bins.span(number) for number in range(bins.count)]

    assert bins.count <= most
    assert [item for first, last in spans for item in range(first, last + 1)] == list(range(total))
    assert bins.starts.tolist() == [first for first, _ in spans]
    assert total > most or bins.size == 1


@given(st.data(), st.integers(1, 25), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_every_cell_keeps_the_largest_value_and_whatever_stands_out(
    data: st.DataObject, items: int, steps: int, most_rows: int, most_columns: int
) -> None:
    rows, columns = Bins.at_most(items, most_rows), Bins.at_most(steps, most_columns)
    cells = Cells(rows, columns.count)
    values = [[data.draw(VALUES) for _ in range(items)] for _ in range(steps)]
    places = st.tuples(st.integers(0, steps - 1), st.integers(0, items - 1))
    counts = data.draw(st.dictionaries(places, st.integers(1, 10**6), max_size=5))
    differing = data.draw(st.sets(places, max_size=5))

    for step in range(steps):
        column = step // columns.size
        cells.add_values(column, np.array(values[step]))
        cells.add_nonfinite(column, {item: number for (at, item), number in counts.items() if at == step})
        cells.add_differing(column, np.array([item for at, item in differing if at == step], dtype=np.intp))

    for row in range(rows.count):
        for column in range(columns.count):
            (first, last), (begin, end) = rows.span(row), columns.span(column)
            inside = [(step, item) for step in range(begin, end + 1) for item in range(first, last + 1)]
            known = [values[step][item] for step, item in inside if not np.isnan(values[step][item])]
            assert np.array_equal(cells.largest[row, column], max(known, default=float("nan")), equal_nan=True)
            assert cells.nonfinite[row, column] == max((counts.get(place, 0) for place in inside), default=0)
            assert cells.differs[row, column] == any(place in differing for place in inside)


def test_cells_without_parameters_take_nothing() -> None:
    cells = Cells(Bins.at_most(0, 10), 3)

    cells.add_values(1, np.zeros(0))

    assert cells.largest.shape == (0, 3)


@given(st.lists(VALUES, max_size=300), st.integers(2, 40))
def test_a_line_keeps_the_smallest_and_the_largest_value_of_every_bin(values: list[float], most: int) -> None:
    taken = np.array(values, dtype=np.float64)
    kept = extremes(taken, most)

    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    bins = Bins.at_most(len(values), most if len(values) <= most else most // 2)
    for number in range(bins.count):
        first, last = bins.span(number)
        inside = taken[first : last + 1]
        drawn = taken[[place for place in kept if first <= place <= last]]
        assert len(drawn)  # a gap stays a gap
        if not np.isnan(inside).all():
            assert (np.nanmin(drawn), np.nanmax(drawn)) == (np.nanmin(inside), np.nanmax(inside))


def test_a_short_line_is_kept_as_it_is() -> None:
    assert extremes(np.array([3.0, float("nan"), 1.0]), 3).tolist() == [0, 1, 2]


@given(st.sets(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 30))
def test_every_step_is_in_the_column_that_says_so(numbers: set[int], every: int, most: int) -> None:
    steps = {number * every for number in numbers}
    grid = Grid.of(steps, max_columns=most)

    assert grid.count <= most
    assert grid.stride % every == 0 or len(steps) == 1
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


def test_a_grid_holds_steps_that_have_a_place_in_it() -> None:
    grid = Grid.of({10, 20, 40})

    assert grid.holds({10, 30, 40})
    assert grid.holds(())
    assert not grid.holds({10, 50})
    assert not grid.holds({0, 10})
    assert not grid.holds({15})


def test_a_later_start_of_another_run_is_one_of_the_steps() -> None:
    grid = Grid.of({1, 2, 3, 4}, {0, 2})

    assert [grid.column(step) for step in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 4]


def test_a_trace_of_a_start_alone_has_one_column() -> None:
    grid = Grid.of((), {7})

    assert (grid.first, grid.count, grid.start, grid.column(7)) == (7, 1, True, 0)


def test_a_column_of_several_recorded_steps_is_as_wide_as_they_are() -> None:
    grid = Grid.of(range(10, 10010, 10), max_columns=400)

    assert (grid.bins.size, grid.width, grid.count) == (3, 30, 334)
    assert grid.span(0) == (10, 30)
    assert grid.span(333) == (10000, 10000)

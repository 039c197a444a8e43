"""Content of the charts, independent of a browser."""

from math import nan
from typing import Any

import numpy as np
import pytest
from bokeh.models import GlyphRenderer, HoverTool, Line, Scatter, VArea

from legacy_ddp.debug._page.calls import CallTable
from legacy_ddp.debug._page.chart import Axis, Chart, Grid
from legacy_ddp.debug._page.heatmap import parameter_chart, wait_chart
from legacy_ddp.debug._page.line_charts import MAX_LINES, local_norm_chart, noise_scale_chart
from legacy_ddp.debug._page.page import draw
from legacy_ddp.debug._page.series import ParameterCells, Series
from tests.helpers.call_tables import make_call_table

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

"""Do the charts hold what they should show, whatever a browser makes of it?"""

from math import nan
from typing import Any

import numpy as np
import pytest
from bokeh.models import GlyphRenderer, HoverTool, Line, Scatter, VArea

from legacy_ddp.debug._page.binning import Grid
from legacy_ddp.debug._page.chart import Axis, Chart
from legacy_ddp.debug._page.heatmap_charts import parameters, waits
from legacy_ddp.debug._page.line_charts import MOST_LINES, local_norms, noise_scale
from legacy_ddp.debug._page.series import Heat, Series
from tests.helpers.call_tables import calls_table

AXIS = Axis.over(0.5, 6.5)


def _drawn(chart: Chart, glyph: type[Any]) -> list[GlyphRenderer]:
    assert chart.plot is not None
    return [one for one in chart.plot.renderers if isinstance(one.glyph, glyph)]


def _legend(chart: Chart) -> list[str]:
    assert chart.plot is not None
    return [item.label.value for legend in chart.plot.legend for item in legend.items]


def _hover(chart: Chart, key: str) -> Any:
    """What the text under the pointer is made of."""
    assert chart.plot is not None
    (hover,) = (tool for tool in chart.plot.tools if isinstance(tool, HoverTool))
    return hover.formatters[key].args


def test_every_rank_has_a_line() -> None:
    chart = local_norms(AXIS, [calls_table([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])], [""])

    assert [one.data_source.data["value"].tolist() for one in _drawn(chart, Line)] == [[1, 2, 3], [4, 5, 6]]
    assert all(one.data_source.data["step"].tolist() == [1, 2, 3] for one in _drawn(chart, Line))
    assert _legend(chart) == ["rank 0", "rank 1"]


def test_two_runs_share_the_colour_of_a_rank_and_differ_in_dash() -> None:
    table = calls_table([[1.0, 2.0], [3.0, 4.0]])
    lines = _drawn(local_norms(AXIS, [table, table], ["A", "B"]), Line)

    assert [line.glyph.line_color for line in lines[:2]] == [line.glyph.line_color for line in lines[2:]]
    assert len({line.glyph.line_color for line in lines}) == 2
    assert [line.glyph.line_dash for line in lines] == [[], [], [6], [6]]
    assert _legend(local_norms(AXIS, [table, table], ["A", "B"])) == ["rank 0", "rank 1"]


def test_a_point_between_gaps_is_a_dot() -> None:
    chart = local_norms(AXIS, [calls_table([[1.0, nan, 3.0, nan, 5.0, 6.0]])], [""])

    (dots,) = _drawn(chart, Scatter)
    assert dots.data_source.data["step"].tolist() == [1, 3]
    assert dots.data_source.data["value"].tolist() == [1.0, 3.0]


def test_a_gradient_that_was_not_finite_is_a_cross_with_its_ranks() -> None:
    table = calls_table(
        [[1.0, nan, 3.0], [4.0, nan, nan]], damaged=np.array([[False, True, False], [False, True, True]])
    )

    crosses = _drawn(local_norms(AXIS, [table, table], ["A", "B"]), Scatter)

    found = [one.data_source.data for one in crosses if "whose" in one.data_source.data]
    assert [data["step"] for data in found] == [[2, 3]] * 2
    assert [data["whose"] for data in found] == [["A, ranks 0-1", "A, rank 1"], ["B, ranks 0-1", "B, rank 1"]]


def test_crosses_of_many_steps_say_how_many() -> None:
    damaged = np.zeros((1, 1200), dtype=np.bool_)
    damaged[0, [3, 5, 900]] = True
    (crosses,) = _drawn(local_norms(AXIS, [calls_table(np.ones((1, 1200)), damaged=damaged)], [""]), Scatter)

    assert crosses.data_source.data["steps"] == ["2 of 4 to 6", "901"]


def test_the_band_of_many_ranks_goes_from_the_smallest_to_the_largest() -> None:
    norms = np.full((MOST_LINES + 1, 3), 2.0)
    norms[4, :2], norms[5, :2], norms[:, 2] = 1.0, 9.0, nan
    chart = local_norms(AXIS, [calls_table(norms)], [""])

    (band,) = _drawn(chart, VArea)
    assert [band.data_source.data[key].tolist() for key in ("step", "low", "high")] == [[1, 2], [1, 1], [9, 9]]
    assert _legend(chart) == ["min to max", "median", "rank 5", "rank 4"]
    median = _drawn(chart, Line)[0].data_source.data["value"]
    assert np.array_equal(median, [2.0, 2.0, nan], equal_nan=True)


@pytest.mark.parametrize("norms, scale", [([1.0, 19.0], "linear"), ([1.0, 21.0], "log"), ([0.0, 21.0], "linear")])
def test_an_axis_is_logarithmic_where_a_linear_one_would_squeeze(norms: list[float], scale: str) -> None:
    chart = local_norms(AXIS, [calls_table([norms])], [""])

    assert chart.plot is not None
    assert type(chart.plot.y_scale).__name__.lower() == f"{scale}scale"


def test_the_axis_of_the_noise_scale_says_what_it_counts() -> None:
    for counted, unit in ((True, "items of sample_size"), (False, "contributions of a rank")):
        table = calls_table([[1.5] * 4, [1.4] * 4], [1.2] * 4, counted=counted)
        chart = noise_scale(AXIS, [table], [""])
        assert chart.plot is not None
        assert chart.plot.yaxis[0].axis_label == f"noise scale [{unit}]"


@pytest.mark.parametrize("names, steps, said", [(2, 3, ""), (2, 401, "up to "), (501, 3, "up to ")])
def test_a_count_of_several_cells_is_the_largest_of_them(names: int, steps: int, said: str) -> None:
    heat = Heat([f"p{number}" for number in range(names)], Grid.of(range(1, steps + 1)))
    heat.cells.nonfinite[1, 2] = 7
    cell = _hover(parameters(AXIS, Series(heat, (calls_table([[1.0]]),), True)), "@cell")

    assert cell["most"] == said
    assert cell["counts"] == {str(heat.grid.count + 2): 7}


def test_a_column_names_the_rank_that_was_waited_for_most_often_in_it() -> None:
    waited = np.array([[0.0, 0.5, 0.5, 0.5], [0.5, 0.0, 0.0, 0.5], [0.5, 0.5, 0.5, 0.0]])
    table = calls_table(np.ones((3, 4)), waited=waited)
    columns = lambda most: _hover(waits(AXIS, table, Grid.of(range(1, 5), most=most), ""), "$x")["columns"]  # noqa: E731

    assert columns(2) == ["1 to 2, waiting for rank 0 in 1 of 2 steps", "3 to 4, waiting for rank 1 in 1 of 2 steps"]
    assert columns(1) == ["1 to 4, waiting for rank 1 in 2 of 4 steps"]
    assert columns(9) == [f"{step}, waiting for rank {rank}" for step, rank in ((1, 0), (2, 1), (3, 1), (4, 2))]

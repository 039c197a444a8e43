"""Heat maps of a page: parameters by step, and the seconds that ranks waited. Needs bokeh."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from sys import float_info

import numpy as np
from bokeh import models
from bokeh.palettes import interp_palette
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp.debug._page import chart
from legacy_ddp.debug._page.chart import Axis, Cells, Chart, Floats, Grid, Indices
from legacy_ddp.debug._page.series import NO_RANK, CallTable, Series, stragglers_by_step

_WHITE, _LIGHT, _SKY, _VERMILLION, _BLACK = "#ffffff", "#e8e8e8", "#56b4e9", "#d55e00", "#000000"
_BLUES = ("#dbe9f6", "#9dc6e0", "#4a98c9", "#17509a")
_BROWNS = ("#ffe9a8", "#fdae4b", "#d95f0e", "#7f2704")

_TICK_CODE = "return rows[tick] ?? ''"
_ROW_CODE = "return rows[Math.max(0, Math.min(rows.length - 1, Math.round(special_vars.y)))]"
_COLUMN_CODE = """
const column = Math.floor((special_vars.x - left) / width)
return columns[Math.max(0, Math.min(columns.length - 1, column))]
"""
_VALUE_CODE = """
if (value < 0) return "none"
return value === 0 || (value >= 1e-3 && value < 1e5) ? String(Number(value.toPrecision(4))) : value.toExponential(3)
"""
_CELL_CODE = """
const {i, j} = special_vars.image_index
const count = counts[j * columns + i]
const texts = []
if (value < labels.length) texts.push(labels[value])
else if (other) texts.push(other)
if (count) texts.push(`${most}${count} non-finite element${count > 1 ? "s" : ""}`)
return texts.length ? texts.join("; ") : "nothing to note"
"""
_DECADES = 12  # of norms
_WAIT_DECADES = 4
_MAX_STRAGGLERS = 8
_MAX_LABEL = 16  # characters beside a row
_LABEL_END = 7  # characters
_NORM_CAPTION = (
    "The norm is that of the reduced gradient, which all ranks should hold alike (here from rank 0). Ranks differ: "
    "in the reduced gradient, or in the parameter after the step."
)
_DIFFERENCE_CAPTION = (
    "A cell is the larger of two differences: that of the reduced gradient, and that of the parameter after "
    "the step. Where bits differ, its colour is the difference of their norms over the larger norm."
)
_WAIT_CAPTIONS = (
    "Seconds that each rank waited in the call for the headers of the others. The rank that the others waited for "
    "waited least: a light cell under dark ones.",
    "One rank is always the last. A rank that is last again and again, by seconds that matter, is slow.",
)


@dataclass(frozen=True)
class _HeatMap:
    """``classes``: of every cell, as in :func:`classify`. ``special``: colour and label of the classes below ``RAMP``.

    ``ramp``: the ends of the ramp of ``colours``, as exponents of ten. ``other``: the label of all cells with a colour
    of the ramp. ``rows``: of each row the label of the hover and that of the axis. ``columns``: labels of the hover.
    """

    title: str
    captions: Sequence[str]
    grid: Grid
    cells: Cells
    classes: NDArray[np.uint8]
    ramp: tuple[float, float]
    colours: Sequence[str]
    special: Sequence[tuple[str, str]]
    item: str
    rows: Sequence[tuple[str, str]]
    columns: Sequence[str]
    value_title: str
    other: str = ""
    table: tuple[tuple[str, ...], ...] = ()


def _draw(axis: Axis, heat_map: _HeatMap) -> Chart:
    rows, columns = heat_map.classes.shape
    grid, height = heat_map.grid, min(560, max(120, 17 * rows))
    plot = axis.plot("", height=height)
    plot.y_range = models.Range1d(rows - 0.5, -0.5, bounds="auto")
    ramp = interp_palette(heat_map.colours, chart.LEVELS)
    colours = [colour for colour, _ in heat_map.special]
    palette = [*colours, *[_WHITE] * (chart.RAMP - len(colours)), *ramp]
    values = np.nan_to_num(heat_map.cells.largest, nan=-1.0)
    image = plot.image(
        "cell",
        source=models.ColumnDataSource({"cell": [heat_map.classes], "value": [values]}),
        x=grid.left,
        y=-0.5,
        dw=columns * grid.width,
        dh=rows,
        color_mapper=models.LinearColorMapper(palette=palette, low=-0.5, high=len(palette) - 0.5),
    )
    plot.add_tools(_hover(heat_map, image))
    # As many labels as have room, one for each row at most.
    plot.yaxis.ticker = models.BasicTicker(min_interval=1, desired_num_ticks=height // 15, num_minor_ticks=0)
    plot.yaxis.formatter = models.CustomJSTickFormatter(
        args={"rows": [label for _, label in heat_map.rows]}, code=_TICK_CODE
    )
    plot.yaxis.major_label_text_font, plot.yaxis.major_label_text_font_size = "monospace", "10px"
    plot.yaxis.major_tick_line_color = None
    low, high = (10.0 ** min(exponent, float_info.max_10_exp) for exponent in heat_map.ramp)
    bar = models.ColorBar(
        color_mapper=models.LogColorMapper(palette=ramp, low=low, high=high),
        title=heat_map.value_title,
        title_text_font_style="normal",
        title_text_font_size="11px",
        width=12,
        padding=4,
    )
    plot.add_layout(bar, "right")
    plot.grid.visible = False
    _mark_columns(plot, heat_map, height)
    return Chart(heat_map.title, tuple(heat_map.captions), plot, tuple(heat_map.special), heat_map.table)


def _hover(heat_map: _HeatMap, image: models.GlyphRenderer) -> models.HoverTool:
    grid, cells = heat_map.grid, heat_map.cells
    columns = {"columns": list(heat_map.columns), "left": grid.left, "width": grid.width}
    cell = {
        "labels": [label for _, label in heat_map.special],
        "other": heat_map.other,
        "counts": {str(index): int(cells.nonfinite.flat[index]) for index in np.flatnonzero(cells.nonfinite)},
        "columns": grid.count,
        "most": "up to " if grid.bins.size > 1 or cells.rows.size > 1 else "",
    }
    return models.HoverTool(
        renderers=[image],
        tooltips=[
            (heat_map.item, "$y{custom}"),
            ("step", "$x{custom}"),
            (heat_map.value_title, "@value{custom}"),
            ("cell", "@cell{custom}"),
        ],
        formatters={
            "$y": models.CustomJSHover(args={"rows": [label for label, _ in heat_map.rows]}, code=_ROW_CODE),
            "$x": models.CustomJSHover(args=columns, code=_COLUMN_CODE),
            "@value": models.CustomJSHover(code=_VALUE_CODE),
            "@cell": models.CustomJSHover(args=cell, code=_CELL_CODE),
        },
        visible=False,
    )


def _mark_columns(plot: figure, heat_map: _HeatMap, height: int) -> None:
    """Draw triangles above columns with a special cell, because a cell may be only one pixel high."""
    line = 12 * len(heat_map.rows) / height
    top = -0.5
    for cells, colour in ((heat_map.cells.differs, _VERMILLION), (heat_map.cells.nonfinite > 0, _BLACK)):
        columns = np.flatnonzero(cells.any(axis=0))
        if len(columns):
            middles = heat_map.grid.left + (columns + 0.5) * heat_map.grid.width
            source = models.ColumnDataSource({"x": middles, "y": np.full(len(columns), top - line / 2)})
            plot.scatter("x", "y", source=source, marker="inverted_triangle", size=9, color=colour)
            top -= line
    plot.y_range.end = top


def parameter_chart(axis: Axis, series: Series) -> Chart:
    names, cells, grid = series.parameters.names, series.parameters.cells, series.parameters.grid
    classes, ramp = chart.classify(cells.largest, _DECADES)
    # If a cell is in two classes, the class that is written last is shown.
    if len(series.calls) == 2:
        title = "Difference of the two runs, by parameter and step"
        compared = "Ranks are compared each with its own." if series.every_rank else "Only rank 0 of both is compared."
        captions = [_DIFFERENCE_CAPTION, compared]
        labels = ("not in both runs", "equal bits", "norms equal, bits differ", "NaN or infinity in either run")
        colours, flagged, other, value_title = _BROWNS, _SKY, "bits differ", "relative"
        classes[cells.differs & (cells.largest == 0)] = chart.FLAGGED
        classes[cells.nonfinite > 0] = chart.NONFINITE
    else:
        title, captions = "Reduced gradients, by parameter and step", [_NORM_CAPTION]
        labels = ("no gradient", "norm is zero", "ranks differ", "NaN or infinity")
        colours, flagged, other, value_title = _BLUES, _VERMILLION, "", "2-norm"
        classes[cells.nonfinite > 0] = chart.NONFINITE
        classes[cells.differs] = chart.FLAGGED
    if not names:
        return Chart(title, ("Left out: the trace holds neither reduced gradients nor parameters.",))
    shown = "the largest value among them; anything that is not finite, or differs, shows"
    captions += [
        "A triangle above a column: something in it differs (red), or is not finite (black).",
        *grid.captions(shown),
        *chart.row_captions(cells.rows, "parameters"),
    ]
    heat_map = _HeatMap(
        title=title,
        captions=captions,
        grid=grid,
        cells=cells,
        classes=classes,
        ramp=ramp,
        colours=colours,
        special=[*zip((_WHITE, _LIGHT, flagged, _BLACK), labels, strict=True)],
        item="parameter",
        rows=[_row_labels(names[first : last + 1]) for first, last in cells.rows.spans],
        columns=grid.labels,
        value_title=value_title,
        other=other,
    )
    return _draw(axis, heat_map)


def _row_labels(names: Sequence[str]) -> tuple[str, str]:
    """Labels of a row with these parameters: that of the hover, and that of the axis."""
    short = names[0].strip("'\"").replace("$$", "$ $")  # bokeh reads two dollar signs as TeX
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    room = _MAX_LABEL - len(more)
    if len(short) > room:  # keeps the numbers: e.l.10.n1.weight
        short = re.sub(r"([a-zA-Z_])\w*?(\d*)\.", r"\1\2.", short)
    if len(short) > room:  # keeps the layer and the end: e.l.10.s…_weight
        short = f"{short[: room - _LABEL_END - 1]}…{short[-_LABEL_END:]}"
    return f"{names[0]} to {names[-1]} ({len(names)} parameters)" if more else names[0], short + more


def wait_chart(axis: Axis, calls: CallTable, grid: Grid, label: str) -> Chart:
    title = f"Who waited for whom{f': {label}' if label else ''}"
    if calls.world_size < 2:
        return Chart(title, ("Left out: a single rank waits for no other rank.",))
    if not len(calls.steps):
        return Chart(title, ("Left out: no call is in the trace.",))
    cells = Cells(chart.Bins.at_most(calls.world_size, chart.MAX_ROWS), grid.count)
    for step, waited in zip(calls.steps, calls.waited.T, strict=True):
        cells.add_values(grid.column(int(step)), waited)
    last, seconds = stragglers_by_step(calls.waited)
    found = sorted({*last.tolist()} - {NO_RANK}, key=lambda rank: (-seconds[last == rank].sum(), rank))
    captions = () if label == "B" else _WAIT_CAPTIONS  # the chart of A has them
    more = [f"{len(found) - _MAX_STRAGGLERS} more ranks were last, and cost less."] * (len(found) > _MAX_STRAGGLERS)
    bins = *grid.captions("the longest wait"), *chart.row_captions(cells.rows, "ranks")
    classes, ramp = chart.classify(cells.largest, _WAIT_DECADES)
    ranks = [f"rank {first}" if first == last else f"ranks {first}-{last}" for first, last in cells.rows.spans]
    heat_map = _HeatMap(
        title=title,
        captions=[*captions, *bins, *more],
        grid=grid,
        cells=cells,
        classes=classes,
        ramp=ramp,
        colours=_BLUES,
        special=[(_WHITE, "not recorded"), (_LIGHT, "did not wait")],
        item="rank",
        rows=[*zip(ranks, ranks, strict=True)],
        columns=_column_labels(calls, grid, last),
        value_title="seconds",
        table=(
            ("last to come", "steps", "median wait of the others [s]", "all together [s]"),
            *(_straggler_cells(rank, seconds[last == rank], len(last)) for rank in found[:_MAX_STRAGGLERS]),
        ),
    )
    return _draw(axis, heat_map)


def _column_labels(calls: CallTable, grid: Grid, last: Indices) -> list[str]:
    """Steps and most frequent straggler of every column. ``last``: the straggler of each step."""
    columns = np.array([grid.column(int(step)) for step in calls.steps])
    labels = grid.labels
    for column in np.unique(columns):
        in_column = last[columns == column]
        found, counts = np.unique(in_column[in_column != NO_RANK], return_counts=True)
        if len(found):
            times = f" in {counts.max()} of {len(in_column)} steps" if len(in_column) > 1 else ""
            labels[column] += f", waiting for rank {found[counts.argmax()]}{times}"
    return labels


def _straggler_cells(rank: int, cost: Floats, steps: int) -> tuple[str, ...]:
    """``cost``: the seconds that the other ranks waited in each step for which this rank was the last."""
    return f"rank {rank}", f"{len(cost)} of {steps}", f"{np.median(cost):.3g}", f"{cost.sum():.3g}"

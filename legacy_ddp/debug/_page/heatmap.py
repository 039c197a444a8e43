"""Heat maps of a page: parameters by step, and the seconds that ranks waited. Needs bokeh."""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import float_info

import numpy as np
from bokeh import models
from bokeh.palettes import interp_palette
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp.debug._page import chart
from legacy_ddp.debug._page.calls import NO_RANK, CallTable, Straggler, stragglers, stragglers_by_step
from legacy_ddp.debug._page.chart import (
    BLACK,
    BLUES,
    BROWNS,
    LIGHT,
    SKY,
    VERMILLION,
    WHITE,
    Axis,
    Cells,
    Chart,
    Grid,
)
from legacy_ddp.debug._page.series import Series

_MAX_LABEL = 22  # characters of 11 px, beside a chart
_TICK_CODE = """
const text = Number.isInteger(tick) ? (rows[tick] ?? "") : ""
return innerWidth < 600 && text.length > 12 ? "…" + text.slice(-11) : text
"""

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
if (labels[value]) texts.push(labels[value])
if (count) texts.push(`${most}${count} non-finite element${count > 1 ? "s" : ""}`)
return texts.length ? texts.join("; ") : "nothing to note"
"""
_DECADES = 12  # of norms
_WAIT_DECADES = 4
_MAX_STRAGGLERS = 8
_CAPTIONS = (
    "Seconds that each rank waited in the call for the headers of the others. The rank that the others waited for "
    "waited least: a light cell under dark ones.",
    "One rank is always the last. A rank that is last again and again, by seconds that matter, is slow.",
)


@dataclass(frozen=True)
class HeatMap:
    """Description of a heat map.

    ``cells``: the values, for the hover. ``classes``: an index into ``colours`` for every cell. ``ramp``: ends of the
    colour ramp, as exponents of ten. ``row_labels``, ``column_labels``: for the hover; ``row_ticks``: for the axis.
    ``class_labels``: for the hover. ``binned``: a cell stands for several items. ``markers``: cells to point at from
    above their columns, with a colour. ``swatches``, ``table``: as of :class:`Chart`.
    """

    title: str
    captions: tuple[str, ...]
    grid: Grid
    cells: Cells
    classes: NDArray[np.uint8]
    ramp: tuple[float, float]
    colours: Sequence[str]
    y_label: str
    row_title: str
    row_labels: Sequence[str]
    row_ticks: Sequence[str]
    column_labels: Sequence[str]
    value_title: str
    class_labels: Sequence[str]
    ramp_title: str
    height: int
    swatches: tuple[tuple[str, str], ...]
    binned: bool = False
    markers: Sequence[tuple[NDArray[np.bool_], str]] = ()
    table: tuple[tuple[str, ...], ...] = ()


def draw_heat_map(axis: Axis, heat_map: HeatMap) -> Chart:
    rows, columns = heat_map.classes.shape
    grid = heat_map.grid
    plot = axis.plot(heat_map.y_label, height=heat_map.height)
    plot.y_range = models.Range1d(rows - 0.5, -0.5, bounds="auto")
    values = np.nan_to_num(heat_map.cells.largest, nan=-1.0)
    image = plot.image(
        "cell",
        source=models.ColumnDataSource({"cell": [heat_map.classes], "value": [values]}),
        x=grid.left,
        y=-0.5,
        dw=columns * grid.width,
        dh=rows,
        color_mapper=models.LinearColorMapper(palette=heat_map.colours, low=-0.5, high=len(heat_map.colours) - 0.5),
    )
    plot.add_tools(_hover(heat_map, image))
    _add_row_labels(plot, heat_map)
    _add_colour_bar(plot, heat_map)
    plot.grid.visible = False
    _add_column_markers(plot, heat_map)
    return Chart(heat_map.title, heat_map.captions, plot, heat_map.swatches, heat_map.table)


def _hover(heat_map: HeatMap, image: models.GlyphRenderer) -> models.HoverTool:
    grid, nonfinite = heat_map.grid, heat_map.cells.nonfinite
    columns = {"columns": list(heat_map.column_labels), "left": grid.left, "width": grid.width}
    cell = {
        "labels": list(heat_map.class_labels),
        "counts": {str(index): int(nonfinite.flat[index]) for index in np.flatnonzero(nonfinite)},
        "columns": grid.count,
        "most": "up to " if heat_map.binned else "",
    }
    return models.HoverTool(
        renderers=[image],
        tooltips=[
            (heat_map.row_title, "$y{custom}"),
            ("step", "$x{custom}"),
            (heat_map.value_title, "@value{custom}"),
            ("cell", "@cell{custom}"),
        ],
        formatters={
            "$y": models.CustomJSHover(args={"rows": list(heat_map.row_labels)}, code=_ROW_CODE),
            "$x": models.CustomJSHover(args=columns, code=_COLUMN_CODE),
            "@value": models.CustomJSHover(code=_VALUE_CODE),
            "@cell": models.CustomJSHover(args=cell, code=_CELL_CODE),
        },
        visible=False,
    )


def _add_row_labels(plot: figure, heat_map: HeatMap) -> None:
    show_all = len(heat_map.row_ticks) * 13 <= heat_map.height
    every, some = models.SingleIntervalTicker, models.BasicTicker
    ticker = every(interval=1) if show_all else some(min_interval=1, desired_num_ticks=25)
    ticker.num_minor_ticks = 0
    plot.yaxis.ticker = ticker
    plot.yaxis.formatter = models.CustomJSTickFormatter(args={"rows": list(heat_map.row_ticks)}, code=_TICK_CODE)
    plot.yaxis.major_label_text_font = "monospace"
    plot.yaxis.major_label_text_font_size = "11px"
    plot.yaxis.major_tick_line_color = None


def _add_colour_bar(plot: figure, heat_map: HeatMap) -> None:
    low, high = heat_map.ramp
    whole = np.arange(np.ceil(low), np.floor(high) + 1)
    ticks = whole[:: max(1, -(-len(whole) // 6))] if len(whole) > 2 else np.linspace(low, high, 4)
    values = heat_map.cells.largest[heat_map.cells.largest > 0]
    if len(values) and values.min() == values.max():
        ticks = np.log10(values[:1])
    texts = [f"1e{tick:.0f}" if len(whole) > 2 else f"{10.0 ** min(tick, float_info.max_10_exp):.2g}" for tick in ticks]
    plot.add_layout(
        models.ColorBar(
            color_mapper=models.LinearColorMapper(palette=list(heat_map.colours[chart.RAMP :]), low=low, high=high),
            ticker=models.FixedTicker(ticks=ticks.tolist()),
            major_label_overrides=dict(zip(ticks.tolist(), texts, strict=True)),
            major_label_text_font_size="11px",
            title=heat_map.ramp_title,
            title_text_font_style="normal",
            title_text_font_size="11px",
            title_standoff=6,
            width=12,
            padding=4,
            bar_line_color="#b0b0b0",
        ),
        "right",
    )


def _add_column_markers(plot: figure, heat_map: HeatMap) -> None:
    """Draw triangles above the columns with a marked cell, because a cell may be only a pixel high."""
    rows = len(heat_map.row_labels)
    line = 12 * rows / heat_map.height
    marked = [(np.flatnonzero(cells.any(axis=0)), colour) for cells, colour in heat_map.markers]
    marked = [(columns, colour) for columns, colour in marked if len(columns)]
    for above, (columns, colour) in enumerate(marked):
        middles = heat_map.grid.left + (columns + 0.5) * heat_map.grid.width
        source = models.ColumnDataSource({"x": middles, "y": np.full(len(columns), -0.5 - (above + 0.5) * line)})
        plot.scatter("x", "y", source=source, marker="inverted_triangle", size=9, color=colour)
    plot.y_range.end = -0.5 - len(marked) * line


def short_label(name: str, more: int = 0) -> str:
    """The name, shortened to fit beside a chart. Numbers and the last part are kept longest.

    Two dollar signs are separated, because bokeh reads them as TeX.
    """
    after = f" +{more}" if more else ""
    room = _MAX_LABEL - len(after)
    parts = name.replace("$$", "$ $").split(".")
    for index, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > room and not part.isdigit():
            parts[index] = part[:1]
    plain = ".".join(parts)
    return (plain if len(plain) <= room else "…" + plain[-(room - 1) :]) + after


def _colour_ramp(colours: Sequence[str]) -> list[str]:
    return [str(colour) for colour in interp_palette(colours, chart.LEVELS)]


@dataclass(frozen=True)
class _ParameterMap:
    """What the cells of the map of parameters mean.

    ``colours``, ``class_labels``, ``swatches``: of the classes ``ABSENT``, ``ZERO``, ``FLAGGED`` and ``NONFINITE``.
    ``ramp_label``: of the other classes.
    """

    title: str
    captions: tuple[str, ...]
    colours: tuple[str, ...]
    ramp: tuple[str, ...]
    class_labels: tuple[str, ...]
    ramp_label: str
    swatches: tuple[str, ...]
    value_title: str
    ramp_title: str


_NORMS = _ParameterMap(
    title="Reduced gradients, by parameter and step",
    captions=(
        "The norm is that of the reduced gradient, which all ranks should hold alike (here from rank 0). Ranks differ: "
        "in the reduced gradient, or in the parameter after the step.",
    ),
    colours=(WHITE, LIGHT, VERMILLION, BLACK),
    ramp=BLUES,
    class_labels=("no gradient", "zero", "ranks differ", "not finite"),
    ramp_label="",
    swatches=("no gradient", "norm is zero", "ranks differ", "NaN or infinity"),
    value_title="norm",
    ramp_title="2-norm",
)
_DIFFERENCES = _ParameterMap(
    title="Difference of the two runs, by parameter and step",
    captions=(
        "A cell is the larger of two differences: that of the reduced gradient, and that of the parameter after "
        "the step. Where bits differ, its colour is the difference of their norms over the larger norm.",
    ),
    colours=(WHITE, LIGHT, SKY, BLACK),
    ramp=BROWNS,
    class_labels=("not in both", "equal bits", "norms equal, bits differ", "not finite"),
    ramp_label="bits differ",
    swatches=("not in both runs", "equal bits", "norms equal, bits differ", "NaN or infinity in either run"),
    value_title="norms apart by",
    ramp_title="relative",
)


def parameter_chart(series: Series) -> HeatMap | Chart:
    """Norms of the reduced gradients of one run, or differences of two runs."""
    is_difference = len(series.calls) == 2
    meaning = _DIFFERENCES if is_difference else _NORMS
    names, cells, grid = series.parameters.names, series.parameters.cells, series.parameters.grid
    if not names:
        return Chart(meaning.title, ("Left out: the trace holds neither reduced gradients nor parameters.",))
    captions = [*meaning.captions]
    if is_difference:
        each = "Ranks are compared each with its own." if series.every_rank else "Only rank 0 of both is compared."
        captions.append(each)
    captions.append("A triangle above a column: something in it differs (red), or is not finite (black).")
    shown = "the largest value among them; anything that is not finite, or differs, shows"
    captions += [*chart.column_captions(grid, shown), *chart.row_captions(cells.rows, "parameters")]
    classes, ramp = chart.classify(cells.largest, _DECADES)
    # Of a cell in two classes, the class that is written last is shown.
    if is_difference:
        classes[cells.differs & (cells.largest == 0)] = chart.FLAGGED
        classes[cells.nonfinite > 0] = chart.NONFINITE
    else:
        classes[cells.nonfinite > 0] = chart.NONFINITE
        classes[cells.differs] = chart.FLAGGED
    ramp_labels = [meaning.ramp_label] * chart.LEVELS if meaning.ramp_label else []
    return HeatMap(
        title=meaning.title,
        captions=tuple(captions),
        grid=grid,
        cells=cells,
        classes=classes,
        ramp=ramp,
        colours=[*meaning.colours, *_colour_ramp(meaning.ramp)],
        y_label="parameter",
        row_title="parameter",
        row_labels=[_row_label(names[first : last + 1]) for first, last in cells.rows.spans],
        row_ticks=[short_label(names[first].strip("'\""), last - first) for first, last in cells.rows.spans],
        column_labels=chart.column_labels(grid),
        value_title=meaning.value_title,
        class_labels=[*meaning.class_labels, *ramp_labels],
        ramp_title=meaning.ramp_title,
        height=min(560, max(130, 16 * cells.rows.count)),
        swatches=tuple(zip(meaning.colours, meaning.swatches, strict=True)),
        binned=grid.bins.size > 1 or cells.rows.size > 1,
        markers=[(cells.differs, VERMILLION), (cells.nonfinite > 0, BLACK)],
    )


def _row_label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} parameters)"


def wait_chart(calls: CallTable, grid: Grid, label: str) -> HeatMap | Chart:
    title = f"Who waited for whom{f': {label}' if label else ''}"
    if calls.world_size < 2:
        return Chart(title, ("Left out: a single rank waits for no other rank.",))
    if not len(calls.steps):
        return Chart(title, ("Left out: no call is in the trace.",))
    cells = Cells(chart.Bins.at_most(calls.world_size, chart.MAX_ROWS), grid.count)
    for step, waited in zip(calls.steps, calls.waited.T, strict=True):
        cells.add_values(grid.column(int(step)), waited)
    found = stragglers(calls.waited)
    captions = () if label == "B" else _CAPTIONS  # the chart of A has them
    more = [f"{len(found) - _MAX_STRAGGLERS} more ranks were last, and cost less."] * (len(found) > _MAX_STRAGGLERS)
    bins = *chart.column_captions(grid, "the longest wait"), *chart.row_captions(cells.rows, "ranks")
    classes, ramp = chart.classify(cells.largest, _WAIT_DECADES)
    ranks = [f"rank {first}" if first == last else f"ranks {first}-{last}" for first, last in cells.rows.spans]
    return HeatMap(
        title=title,
        captions=(*captions, *bins, *more),
        grid=grid,
        cells=cells,
        classes=classes,
        ramp=ramp,
        colours=[WHITE, LIGHT, WHITE, WHITE, *_colour_ramp(BLUES)],
        y_label="rank",
        row_title="who waited",
        row_labels=ranks,
        row_ticks=ranks,
        column_labels=_column_labels(calls, grid),
        value_title="seconds",
        class_labels=["not recorded", "did not wait"],
        ramp_title="seconds",
        height=min(560, max(100, 18 * len(ranks))),
        swatches=((LIGHT, "did not wait"), (WHITE, "not recorded")),
        table=_straggler_table(found, len(calls.steps)),
    )


def _column_labels(calls: CallTable, grid: Grid) -> list[str]:
    """Steps and most frequent straggler of every column."""
    ranks, _ = stragglers_by_step(calls.waited)
    columns = np.array([grid.column(int(step)) for step in calls.steps])
    labels = chart.column_labels(grid)
    for column in np.unique(columns):
        in_column = ranks[columns == column]
        found, counts = np.unique(in_column[in_column != NO_RANK], return_counts=True)
        if len(found):
            times = f" in {counts.max()} of {len(in_column)} steps" if len(in_column) > 1 else ""
            labels[column] += f", waiting for rank {found[counts.argmax()]}{times}"
    return labels


def _straggler_table(found: Sequence[Straggler], steps: int) -> tuple[tuple[str, ...], ...]:
    rows = [
        (f"rank {item.rank}", f"{item.times} of {steps}", f"{item.median_seconds:.3g}", f"{item.seconds:.3g}")
        for item in found[:_MAX_STRAGGLERS]
    ]
    return ("last to come", "steps", "median wait of the others [s]", "all together [s]"), *rows

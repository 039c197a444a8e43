"""Drawing of a heat map with its hover texts. Needs bokeh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import float_info

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
    SingleIntervalTicker,
)
from bokeh.palettes import interp_palette
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp.debug._page.binning import Floats, Grid
from legacy_ddp.debug._page.cell_classes import LEVELS, RAMP
from legacy_ddp.debug._page.chart import Axis

_MAX_LABEL = 22  # characters of 11 px, beside a chart

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


@dataclass(frozen=True)
class HeatMap:
    """Content of a heat map.

    ``classes``: an index into ``colours`` for every cell. ``values``: for the hover, NaN for no value. ``row_labels``,
    ``column_labels``: for the hover; ``row_ticks``: for the axis. ``class_labels``: for the hover. ``nonfinite``:
    number of non-finite elements by index in the flat array. ``binned``: a cell stands for several items. ``ramp``:
    ends of the colour ramp, as exponents of ten.
    """

    grid: Grid
    classes: NDArray[np.uint8]
    values: Floats
    colours: Sequence[str]
    row_title: str
    row_labels: Sequence[str]
    row_ticks: Sequence[str]
    column_labels: Sequence[str]
    value_title: str
    class_labels: Sequence[str]
    ramp_title: str
    ramp: tuple[float, float]
    nonfinite: Mapping[int, int]
    binned: bool
    height: int


def draw_heat_map(axis: Axis, heat_map: HeatMap) -> figure:
    rows, columns = heat_map.classes.shape
    grid = heat_map.grid
    plot = axis.plot(heat_map.row_title if heat_map.row_title == "parameter" else "rank", height=heat_map.height)
    plot.y_range = Range1d(rows - 0.5, -0.5, bounds="auto")
    source = ColumnDataSource({"cell": [heat_map.classes], "value": [np.nan_to_num(heat_map.values, nan=-1.0)]})
    image = plot.image(
        "cell",
        source=source,
        x=grid.left,
        y=-0.5,
        dw=columns * grid.width,
        dh=rows,
        color_mapper=LinearColorMapper(palette=heat_map.colours, low=-0.5, high=len(heat_map.colours) - 0.5),
    )
    plot.add_tools(_hover(heat_map, [image]))
    _add_row_labels(plot, heat_map)
    _add_colour_bar(plot, heat_map)
    plot.grid.visible = False
    return plot


def _hover(heat_map: HeatMap, renderers: list[object]) -> HoverTool:
    grid = heat_map.grid
    columns = {"columns": list(heat_map.column_labels), "left": grid.left, "width": grid.width}
    cell = {
        "labels": list(heat_map.class_labels),
        "counts": {str(index): count for index, count in heat_map.nonfinite.items()},
        "columns": grid.count,
        "most": "up to " if heat_map.binned else "",
    }
    return HoverTool(
        renderers=renderers,
        tooltips=[
            (heat_map.row_title, "$y{custom}"),
            ("step", "$x{custom}"),
            (heat_map.value_title, "@value{custom}"),
            ("cell", "@cell{custom}"),
        ],
        formatters={
            "$y": CustomJSHover(args={"rows": list(heat_map.row_labels)}, code=_ROW_CODE),
            "$x": CustomJSHover(args=columns, code=_COLUMN_CODE),
            "@value": CustomJSHover(code=_VALUE_CODE),
            "@cell": CustomJSHover(args=cell, code=_CELL_CODE),
        },
        visible=False,
    )


def _add_row_labels(plot: figure, heat_map: HeatMap) -> None:
    show_all = len(heat_map.row_ticks) * 13 <= heat_map.height
    ticker = SingleIntervalTicker(interval=1) if show_all else BasicTicker(min_interval=1, desired_num_ticks=25)
    ticker.num_minor_ticks = 0
    plot.yaxis.ticker = ticker
    plot.yaxis.formatter = CustomJSTickFormatter(
        args={"rows": list(heat_map.row_ticks)}, code='return Number.isInteger(tick) ? (rows[tick] ?? "") : ""'
    )
    plot.yaxis.major_label_text_font = "monospace"
    plot.yaxis.major_label_text_font_size = "11px"
    plot.yaxis.major_tick_line_color = None


def _add_colour_bar(plot: figure, heat_map: HeatMap) -> None:
    low, high = heat_map.ramp
    whole = np.arange(np.ceil(low), np.floor(high) + 1)
    ticks = whole[:: max(1, -(-len(whole) // 6))] if len(whole) > 2 else np.linspace(low, high, 4)
    texts = [f"1e{tick:.0f}" if len(whole) > 2 else f"{10.0 ** min(tick, float_info.max_10_exp):.2g}" for tick in ticks]
    plot.add_layout(
        ColorBar(
            color_mapper=LinearColorMapper(palette=list(heat_map.colours[RAMP:]), low=low, high=high),
            ticker=FixedTicker(ticks=ticks.tolist()),
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


def add_column_markers(plot: figure, heat_map: HeatMap, selections: Sequence[tuple[NDArray[np.bool_], str]]) -> None:
    """Draw triangles above the columns with a selected cell, because a cell may be only a pixel high."""
    rows = len(heat_map.row_labels)
    line = 12 * rows / heat_map.height
    lines = 0
    for cells, colour in selections:
        columns = np.flatnonzero(cells.any(axis=0))
        if not len(columns):
            continue
        middles = heat_map.grid.left + (columns + 0.5) * heat_map.grid.width
        source = ColumnDataSource({"x": middles, "y": np.full(len(columns), -0.5 - (lines + 0.5) * line)})
        plot.scatter("x", "y", source=source, marker="inverted_triangle", size=9, color=colour)
        lines += 1
    plot.y_range.end = -0.5 - lines * line


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


def colour_ramp(colours: Sequence[str]) -> list[str]:
    return [str(colour) for colour in interp_palette(colours, LEVELS)]

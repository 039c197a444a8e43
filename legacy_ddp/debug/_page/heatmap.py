"""How is a heat map drawn, and what does it say under the pointer? Needs bokeh."""

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
from legacy_ddp.debug._page.chart import Axis

NOTHING, QUIET, ODD, NONFINITE, RAMP = range(5)  # classes of cells; the ramp's follow
LEVELS = 200
_LABEL = 22  # characters of 11 px, beside a chart

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
const said = []
if (words[value]) said.push(words[value])
if (count) said.push(`${most}${count} non-finite element${count > 1 ? "s" : ""}`)
return said.length ? said.join("; ") : "nothing to note"
"""


@dataclass(frozen=True)
class Picture:
    """A heat map, ready to be drawn.

    ``classes``: of every cell, an index into ``colours``. ``values``: for the hover, NaN for none. ``rows``,
    ``columns``: what each is, in words; ``short``: of rows, for the axis. ``words``: of classes, for the hover.
    ``counts``: of non-finite elements, by place in the flat array; ``binned``: a cell stands for several. ``bar``: the
    ends of the ramp, as exponents of ten.
    """

    grid: Grid
    classes: NDArray[np.uint8]
    values: Floats
    colours: Sequence[str]
    row_is: str
    rows: Sequence[str]
    short: Sequence[str]
    columns: Sequence[str]
    value_is: str
    words: Sequence[str]
    bar_title: str
    bar: tuple[float, float]
    counts: Mapping[int, int]
    binned: bool
    height: int


def draw_cells(axis: Axis, picture: Picture) -> figure:
    rows, columns = picture.classes.shape
    grid = picture.grid
    plot = axis.plot(picture.row_is if picture.row_is == "parameter" else "rank", height=picture.height)
    plot.y_range = Range1d(rows - 0.5, -0.5, bounds="auto")
    source = ColumnDataSource({"cell": [picture.classes], "value": [np.nan_to_num(picture.values, nan=-1.0)]})
    drawn = plot.image(
        "cell",
        source=source,
        x=grid.left,
        y=-0.5,
        dw=columns * grid.width,
        dh=rows,
        color_mapper=LinearColorMapper(palette=picture.colours, low=-0.5, high=len(picture.colours) - 0.5),
    )
    plot.add_tools(_hover(picture, [drawn]))
    _label_rows(plot, picture)
    _colour_bar(plot, picture)
    plot.grid.visible = False
    return plot


def _hover(picture: Picture, renderers: list[object]) -> HoverTool:
    grid = picture.grid
    columns = {"columns": list(picture.columns), "left": grid.left, "width": grid.width}
    cell = {
        "words": list(picture.words),
        "counts": {str(place): number for place, number in picture.counts.items()},
        "columns": grid.count,
        "most": "up to " if picture.binned else "",
    }
    return HoverTool(
        renderers=renderers,
        tooltips=[
            (picture.row_is, "$y{custom}"),
            ("step", "$x{custom}"),
            (picture.value_is, "@value{custom}"),
            ("cell", "@cell{custom}"),
        ],
        formatters={
            "$y": CustomJSHover(args={"rows": list(picture.rows)}, code=_ROW_CODE),
            "$x": CustomJSHover(args=columns, code=_COLUMN_CODE),
            "@value": CustomJSHover(code=_VALUE_CODE),
            "@cell": CustomJSHover(args=cell, code=_CELL_CODE),
        },
        visible=False,
    )


def _label_rows(plot: figure, picture: Picture) -> None:
    few = len(picture.short) * 13 <= picture.height
    ticker = SingleIntervalTicker(interval=1) if few else BasicTicker(min_interval=1, desired_num_ticks=25)
    ticker.num_minor_ticks = 0
    plot.yaxis.ticker = ticker
    plot.yaxis.formatter = CustomJSTickFormatter(
        args={"rows": list(picture.short)}, code='return Number.isInteger(tick) ? (rows[tick] ?? "") : ""'
    )
    plot.yaxis.major_label_text_font = "monospace"
    plot.yaxis.major_label_text_font_size = "11px"
    plot.yaxis.major_tick_line_color = None


def _colour_bar(plot: figure, picture: Picture) -> None:
    low, high = picture.bar
    whole = np.arange(np.ceil(low), np.floor(high) + 1)
    ticks = whole[:: max(1, -(-len(whole) // 6))] if len(whole) > 2 else np.linspace(low, high, 4)
    said = [f"1e{tick:.0f}" if len(whole) > 2 else f"{10.0 ** min(tick, float_info.max_10_exp):.2g}" for tick in ticks]
    plot.add_layout(
        ColorBar(
            color_mapper=LinearColorMapper(palette=list(picture.colours[RAMP:]), low=low, high=high),
            ticker=FixedTicker(ticks=ticks.tolist()),
            major_label_overrides=dict(zip(ticks.tolist(), said, strict=True)),
            major_label_text_font_size="11px",
            title=picture.bar_title,
            title_text_font_style="normal",
            title_text_font_size="11px",
            title_standoff=6,
            width=12,
            padding=4,
            bar_line_color="#b0b0b0",
        ),
        "right",
    )


def mark_columns(plot: figure, picture: Picture, kinds: Sequence[tuple[NDArray[np.bool_], str]]) -> None:
    """Triangles above the columns in which something stands out: a cell may be a pixel high."""
    rows = len(picture.rows)
    line = 12 * rows / picture.height
    lines = 0
    for cells, colour in kinds:
        columns = np.flatnonzero(cells.any(axis=0))
        if not len(columns):
            continue
        middles = picture.grid.left + (columns + 0.5) * picture.grid.width
        source = ColumnDataSource({"x": middles, "y": np.full(len(columns), -0.5 - (lines + 0.5) * line)})
        plot.scatter("x", "y", source=source, marker="inverted_triangle", size=9, color=colour)
        lines += 1
    plot.y_range.end = -0.5 - lines * line


def classes_of(values: Floats, lowest: float) -> tuple[NDArray[np.uint8], tuple[float, float]]:
    """The class of every value by its logarithm, and the ends of the ramp: ``lowest`` decades at most."""
    classes = np.full(values.shape, NOTHING, dtype=np.uint8)
    classes[values == 0] = QUIET
    positive = np.nan_to_num(values, nan=0.0) > 0
    logs = np.log10(values[positive])
    if not len(logs):
        return classes, (-1.0, 0.0)
    high = float(logs.max())
    low = max(float(logs.min()), high + lowest)
    low, high = (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)
    levels = (logs.clip(low, high) - low) / (high - low) * (LEVELS - 1)
    classes[positive] = RAMP + levels.round().astype(np.uint8)
    return classes, (low, high)


def short_label(name: str, more: int = 0) -> str:
    """What fits beside a chart: numbers and the end of a name say most, so other parts lose letters first.

    No math either: two dollars would be read as TeX.
    """
    after = f" +{more}" if more else ""
    room = _LABEL - len(after)
    parts = name.replace("$$", "$ $").split(".")
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > room and not part.isdigit():
            parts[place] = part[:1]
    plain = ".".join(parts)
    return (plain if len(plain) <= room else "…" + plain[-(room - 1) :]) + after


def ramp(colours: Sequence[str]) -> list[str]:
    return [str(colour) for colour in interp_palette(colours, LEVELS)]

"""Drawing of lines, bands, crosses and legends. Needs bokeh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from bokeh.models import ColumnDataSource, GlyphRenderer, HoverTool, Legend, LegendItem
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._page.binning import Floats, Grid, extremes
from legacy_ddp.debug._page.chart import BLACK

_LOG_FROM = 20.0  # ratio of largest to smallest value from which the axis is logarithmic

LegendEntries = list[tuple[str, GlyphRenderer]]
"""Labels, and the renderers which a click on a label hides."""


@dataclass(frozen=True)
class LineStyle:
    """Style of the lines of a run. Lines of two runs stay visible on top of each other."""

    dash: str
    width: float
    alpha: float
    band: str


ONE_RUN = (LineStyle("solid", 1.6, 1.0, "#c8c8c8"),)
TWO_RUNS = (LineStyle("solid", 5.0, 0.4, "#d8d8d8"), LineStyle("dashed", 1.6, 1.0, "#bcd7ea"))


@dataclass(frozen=True)
class Line:
    """``owner``: for the hover. ``label``: for the legend."""

    owner: str
    label: str
    steps: NDArray[np.int64]
    values: Floats
    colour: str


def draw_line(plot: figure, line: Line, style: LineStyle, value_title: str) -> GlyphRenderer:
    kept = extremes(line.values)
    steps, values = line.steps[kept], line.values[kept]
    source = ColumnDataSource({"step": steps, "value": values})
    colour = {"color": line.colour, "alpha": style.alpha}
    curve = plot.line("step", "value", source=source, line_dash=style.dash, line_width=style.width, **colour)
    renderers = [curve]
    # A line through a single point between two gaps is invisible.
    gap = np.isnan(np.concatenate(([np.nan], values, [np.nan])))
    single = ~gap[1:-1] & gap[:-2] & gap[2:]
    if single.any():
        dots = ColumnDataSource({"step": steps[single], "value": values[single]})
        renderers.append(plot.scatter("step", "value", source=dots, size=max(4.0, style.width), **colour))
    tips = [("of", line.owner), ("step", "@step"), (value_title, "@value{%.4g}")]
    plot.add_tools(HoverTool(renderers=renderers, tooltips=tips, formatters={"@value": "printf"}, visible=False))
    return curve


def draw_band(plot: figure, steps: NDArray[np.int64], low: Floats, high: Floats, style: LineStyle) -> GlyphRenderer:
    source = ColumnDataSource({"step": steps, "low": low, "high": high})
    return plot.varea("step", "low", "high", source=source, fill_color=style.band, fill_alpha=0.7)


def draw_crosses(
    plot: figure, steps: NDArray[np.int64], nonfinite: NDArray[np.bool_], label: str, height: float
) -> GlyphRenderer:
    """Draw crosses at the steps in which a rank is ``nonfinite`` (a row for each rank)."""
    grid = Grid.of(steps.tolist())
    columns: dict[int, list[int]] = {}
    for index in np.flatnonzero(nonfinite.any(axis=0)):
        columns.setdefault(grid.column(int(steps[index])), []).append(int(index))
    table: dict[str, list[object]] = {"step": [], "steps": [], "owner": [], "height": [height] * len(columns)}
    for indices in columns.values():
        first, last = int(steps[indices[0]]), int(steps[indices[-1]])
        table["step"].append(first)
        table["steps"].append(str(first) if first == last else f"{len(indices)} of {first} to {last}")
        ranks = np.flatnonzero(nonfinite[:, indices].any(axis=1)).tolist()
        table["owner"].append(with_run(label, name_ranks(ranks)))
    source = ColumnDataSource(table)
    crosses = plot.scatter("step", "height", source=source, marker="x", size=9, line_width=2, color=BLACK)
    tips = [("not finite", "@owner"), ("step", "@steps")]
    plot.add_tools(HoverTool(renderers=[crosses], tooltips=tips, visible=False))
    return crosses


def add_legend(plot: figure, entries: LegendEntries) -> None:
    """Add an entry for each label: a click on it hides the lines of both runs with this label."""
    by_label: dict[str, list[GlyphRenderer]] = {}
    for label, renderer in entries:
        by_label.setdefault(label, []).append(renderer)
    legend = Legend(
        items=[LegendItem(label={"value": label}, renderers=renderers) for label, renderers in by_label.items()],
        click_policy="hide",
        border_line_color=None,
        label_text_font_size="12px",
        label_height=16,
        glyph_height=14,
        spacing=0,
        padding=4,
        margin=4,
    )
    plot.add_layout(legend, "right")


def with_run(run: str, label: str) -> str:
    """``A, rank 0``; without a label of the run only ``rank 0``."""
    return f"{run}, {label}" if run else label


def axis_type(values: Floats) -> str:
    low, high = float(values.min()), float(values.max())
    return "log" if low > 0 and high / low > _LOG_FROM else "linear"


def known_values(rows: Iterable[Floats]) -> Floats:
    """All values but NaN."""
    return np.concatenate([row[~np.isnan(row)] for row in rows] or [np.zeros(0)])


def run_captions(labels: Sequence[str]) -> list[str]:
    return [f"Broad pale lines: {labels[0]}; dashed lines: {labels[1]}."] if len(labels) == 2 else []

"""How do the lines of a page look: norms of local gradients, and the noise scale? Needs bokeh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from bokeh.models import ColumnDataSource, GlyphRenderer, HoverTool, Legend, LegendItem
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._page.binning import MOST_POINTS, Bins, Floats, Grid, extremes
from legacy_ddp.debug._page.chart import BLACK, Axis, Chart
from legacy_ddp.debug._page.rank_series import (
    MOST_STANDING_OUT,
    STANDS_OUT,
    Calls,
    noise_scales,
    standing_out,
    why_no_noise,
)

MOST_LINES = 12
_LOG_FROM = 20.0  # a span from smallest to largest that a linear axis squeezes
# Okabe and Ito's (2008), but for its yellow, which nobody sees on white; then Tol's "muted" ones.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#332288", "#882255", "#999933", "#44aa99", "#000000", "#aa4499"),
)
_Drawn = list[tuple[str, GlyphRenderer]]  # what the legend says, and what a click there hides


@dataclass(frozen=True)
class _Look:
    """How the lines of a run look; those of two runs may lie on each other."""

    dash: str
    width: float
    alpha: float
    band: str


_ALONE = (_Look("solid", 1.6, 1.0, "#c8c8c8"),)
_BOTH = (_Look("solid", 5.0, 0.4, "#d8d8d8"), _Look("dashed", 1.6, 1.0, "#bcd7ea"))


@dataclass(frozen=True)
class _Line:
    """One line: ``whose`` for the hover, ``label`` for the legend."""

    whose: str
    label: str
    steps: NDArray[np.int64]
    values: Floats
    colour: str


def local_norms(axis: Axis, calls: Sequence[Calls], labels: Sequence[str]) -> Chart:
    """The norm of every rank's own gradient, before the reduction."""
    title = "Local gradients: every rank's own norm, before the reduction"
    known = np.concatenate([run.local_norms[~np.isnan(run.local_norms)] for run in calls])
    if not len(known):
        return Chart(title, ("Left out: no finite norm of a local gradient is in the trace.",))
    plot = axis.plot("2-norm", y_axis_type=_axis_type(known))
    words, drawn = _how_runs_look(labels), _Drawn()
    many = max(run.world_size for run in calls) > MOST_LINES
    for run, label, look in zip(calls, labels, _looks(calls), strict=True):
        if many:
            drawn.append((_of(label, "min to max"), _band(plot, run, look)))
            words.append(_said_of_many(run, label))
        for line in _many_ranks(run, label) if many else _all_ranks(run, label):
            drawn.append((line.label, _draw(plot, line, look, "2-norm")))
    for run, label in zip(calls, labels, strict=True):
        if run.damaged.any():
            drawn.append(("not finite", _crosses(plot, run, label, float(known.max()))))
    if any(run.damaged.any() for run in calls):
        words.append("A cross at the height of the largest norm: a rank's own gradient was not finite.")
    _legend(plot, drawn)
    return Chart(title, (*words, *_said_of_points(calls)), plot)


def noise_scale(axis: Axis, calls: Sequence[Calls], labels: Sequence[str]) -> Chart:
    """How large a batch is worth while."""
    title = "Gradient noise scale: the batch at which noise and signal are alike"
    words, windows, lines = [], [], []
    for run, label, colour in zip(calls, labels, _COLOURS, strict=False):
        if why := why_no_noise(run):
            words.append(f"Left out{f' for {label}' if label else ''}: {why}.")
            continue
        steps, scales, window = noise_scales(run)
        windows.append(f"{window} recorded steps{f' ({label})' if label else ''}")
        lines.append(_Line(_of(label, "noise scale"), label or "scale", steps, scales, colour))
    if windows:
        words.append(
            f"Each point averages both parts of the estimate over {', '.join(windows)} up to it, and then divides "
            "them; a gap where one of them is not positive. Over fewer steps than hundreds it is rough."
        )
    known = np.concatenate([line.values[~np.isnan(line.values)] for line in lines] or [np.zeros(0)])
    if not len(known):
        return Chart(title, (*words, "Left out: no average is positive.") if lines else tuple(words))
    unit = "items of sample_size" if any(run.counted for run in calls) else "contributions of a rank"
    plot = axis.plot(f"noise scale [{unit}]", y_axis_type=_axis_type(known))
    _legend(plot, [(line.label, _draw(plot, line, _ALONE[0], "noise scale")) for line in lines])
    return Chart(title, tuple(words), plot)


def _looks(calls: Sequence[Calls]) -> tuple[_Look, ...]:
    return _BOTH if len(calls) == 2 else _ALONE


def _all_ranks(run: Calls, label: str) -> Iterable[_Line]:
    for rank, norms in enumerate(run.local_norms):
        yield _Line(_of(label, f"rank {rank}"), f"rank {rank}", run.steps, norms, _COLOURS[rank])


def _many_ranks(run: Calls, label: str) -> Iterable[_Line]:
    """The median, and the ranks that stand out."""
    medians = np.full(len(run.steps), np.nan)
    there = _with_a_norm(run)
    medians[there] = np.nanmedian(run.local_norms[:, there], axis=0)
    yield _Line(_of(label, "median"), _of(label, "median"), run.steps, medians, BLACK)
    for rank, colour in zip(standing_out(run.local_norms), _COLOURS, strict=False):
        yield _Line(_of(label, f"rank {rank}"), f"rank {rank}", run.steps, run.local_norms[rank], colour)


def _with_a_norm(run: Calls) -> NDArray[np.intp]:
    """The columns in which any rank has one."""
    return np.flatnonzero(~np.isnan(run.local_norms).all(axis=0))


def _band(plot: figure, run: Calls, look: _Look) -> GlyphRenderer:
    """From the smallest to the largest of all ranks, and of all steps of a bin."""
    there = _with_a_norm(run)
    bins = Bins.at_most(len(there), MOST_POINTS)
    ends = {}
    if len(there):
        ends["low"] = np.minimum.reduceat(np.nanmin(run.local_norms[:, there], axis=0), bins.starts)
        ends["high"] = np.maximum.reduceat(np.nanmax(run.local_norms[:, there], axis=0), bins.starts)
    source = ColumnDataSource({"step": run.steps[there][bins.starts], "low": [], "high": [], **ends})
    return plot.varea("step", "low", "high", source=source, fill_color=look.band, fill_alpha=0.7)


def _draw(plot: figure, line: _Line, look: _Look, what: str) -> GlyphRenderer:
    kept = extremes(line.values)
    steps, values = line.steps[kept], line.values[kept]
    source = ColumnDataSource({"step": steps, "value": values})
    colour = {"color": line.colour, "alpha": look.alpha}
    drawn = plot.line("step", "value", source=source, line_dash=look.dash, line_width=look.width, **colour)
    # A line through one point, between two gaps, is not seen.
    gap = np.isnan(np.concatenate(([np.nan], values, [np.nan])))
    lone = ~gap[1:-1] & gap[:-2] & gap[2:]
    shown = [drawn]
    if lone.any():
        dots = ColumnDataSource({"step": steps[lone], "value": values[lone]})
        shown.append(plot.scatter("step", "value", source=dots, size=max(4.0, look.width), **colour))
    tips = [("of", line.whose), ("step", "@step"), (what, "@value{%.4g}")]
    plot.add_tools(HoverTool(renderers=shown, tooltips=tips, formatters={"@value": "printf"}, visible=False))
    return drawn


def _crosses(plot: figure, run: Calls, label: str, height: float) -> GlyphRenderer:
    """Where ranks' own gradients were not finite."""
    grid = Grid.of(run.steps.tolist())
    columns: dict[int, list[int]] = {}
    for place in np.flatnonzero(run.damaged.any(axis=0)):
        columns.setdefault(grid.column(int(run.steps[place])), []).append(int(place))
    table: dict[str, list[object]] = {"step": [], "steps": [], "whose": [], "height": [height] * len(columns)}
    for places in columns.values():
        first, last = int(run.steps[places[0]]), int(run.steps[places[-1]])
        table["step"].append(first)
        table["steps"].append(str(first) if first == last else f"{len(places)} of {first} to {last}")
        table["whose"].append(_of(label, name_ranks(np.flatnonzero(run.damaged[:, places].any(axis=1)).tolist())))
    source = ColumnDataSource(table)
    drawn = plot.scatter("step", "height", source=source, marker="x", size=9, line_width=2, color=BLACK)
    tips = [("not finite", "@whose"), ("step", "@steps")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips, visible=False))
    return drawn


def _legend(plot: figure, drawn: _Drawn) -> None:
    """One entry for each label: a click on it hides a rank of both runs."""
    together: dict[str, list[GlyphRenderer]] = {}
    for label, renderer in drawn:
        together.setdefault(label, []).append(renderer)
    legend = Legend(
        items=[LegendItem(label={"value": label}, renderers=renderers) for label, renderers in together.items()],
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


def _of(run: str, label: str) -> str:
    return f"{run}, {label}" if run else label


def _how_runs_look(labels: Sequence[str]) -> list[str]:
    return [f"Broad pale lines: {labels[0]}; dashed lines: {labels[1]}."] if len(labels) == 2 else []


def _said_of_many(run: Calls, label: str) -> str:
    named = name_ranks(standing_out(run.local_norms)) if standing_out(run.local_norms) else "none"
    return (
        f"{label or 'The run'} has {run.world_size} ranks: the band goes from the smallest norm to the largest, the "
        "black line is the median. Lines of their own have ranks that are off the median by a factor of "
        f"{STANDS_OUT} in half of the steps, {MOST_STANDING_OUT} at most: {named}."
    )


def _said_of_points(calls: Sequence[Calls]) -> list[str]:
    sizes = [Bins.at_most(len(run.steps), MOST_POINTS // 2).size for run in calls if len(run.steps) > MOST_POINTS]
    if not sizes:
        return []
    return [f"Of every {max(sizes)} recorded steps a line goes through the smallest and the largest value."]


def _axis_type(values: Floats) -> str:
    low, high = float(values.min()), float(values.max())
    return "log" if low > 0 and high / low > _LOG_FROM else "linear"

"""Line charts of a page: norms, noise scale, metrics and logged values. Needs bokeh."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, GlyphRenderer, HoverTool, Legend, LegendItem
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp._compare import name_ranks
from legacy_ddp._text import shorten
from legacy_ddp.debug._page.calls import (
    MAX_OUTLIERS,
    OUTLIER_FACTOR,
    CallTable,
    RankTable,
    missing_noise_reason,
    noise_scales,
    outliers,
)
from legacy_ddp.debug._page.chart import BLACK, MAX_POINTS, Axis, Bins, Chart, Floats, Grid, extremes
from legacy_ddp.debug._page.series import LoggedValues, Metric

MAX_CHARTS = 8  # of metrics, and of logged values
MAX_LINES = 12
_MAX_TEXTS = 12
_MAX_TEXT = 80  # characters
# Okabe and Ito (2008) without their yellow, which is invisible on white; then the "muted" colours of Tol.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#332288", "#882255", "#999933", "#44aa99", "#000000", "#aa4499"),
)

_DOT = 7.0  # pixels
_LOG_FROM = 20.0  # ratio of largest to smallest value from which the axis is logarithmic

T = TypeVar("T")
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


@dataclass(frozen=True)
class LineChart:
    """Description of a line chart: ``curves``, one for each run, or ``tables`` with a line for each rank.

    ``left_out``: the reason without any finite value. ``noun``: a value of the tables, in captions. ``damaged``: ranks
    and steps of each run that get a cross. ``value_title``: for the hover; the label of the axis if empty.
    """

    title: str
    y_label: str
    left_out: str = "no value is finite"
    captions: Sequence[str] = ()
    curves: Sequence[tuple[Line, LineStyle]] = ()
    tables: Sequence[RankTable] = ()
    noun: str = "value"
    damaged: Sequence[NDArray[np.bool_]] = ()
    value_title: str = ""

    @property
    def steps(self) -> list[NDArray[np.int64]]:
        return [*(line.steps for line, _ in self.curves), *(table.steps for table in self.tables)]

    @property
    def values(self) -> list[Floats]:
        return [*(line.values for line, _ in self.curves), *(table.values for table in self.tables)]


def draw_line_chart(axis: Axis, chart: LineChart, labels: Sequence[str]) -> Chart:
    known = known_values(chart.values)
    if not len(known):
        reason = [f"Left out: {chart.left_out}."] if chart.left_out else []
        return Chart(chart.title, (*chart.captions, *reason))
    plot = axis.plot(chart.y_label, y_axis_type=axis_type(known))
    if known.min() == known.max():
        plot.yaxis.ticker = FixedTicker(ticks=[float(known[0])])
    captions, entries = _draw_ranks(plot, chart, labels) if chart.tables else ([], _draw_curves(plot, chart))
    for table, damaged, label in zip(chart.tables, chart.damaged, labels, strict=False):
        if damaged.any():
            entries.append(("not finite", draw_crosses(plot, table.steps, damaged, label, float(known.max()))))
    if any(damaged.any() for damaged in chart.damaged):
        captions.append("A cross at the height of the largest norm: a rank's own gradient was not finite.")
    add_legend(plot, entries)
    return Chart(chart.title, (*chart.captions, *captions, *_bin_captions(chart)), plot)


def local_norm_chart(calls: Sequence[CallTable]) -> LineChart:
    """The norm of every rank's local gradient."""
    return LineChart(
        title="Local gradients: every rank's own norm, before the reduction",
        y_label="2-norm",
        left_out="no finite norm of a local gradient is in the trace",
        tables=[RankTable(run.steps, run.local_norms) for run in calls],
        noun="norm",
        damaged=[run.damaged for run in calls],
    )


def noise_scale_chart(calls: Sequence[CallTable], labels: Sequence[str]) -> LineChart:
    """The gradient noise scale: the batch size from which larger batches hardly help."""
    captions, windows, curves = [], [], []
    for run, label, colour in zip(calls, labels, COLOURS, strict=False):
        if reason := missing_noise_reason(run):
            captions.append(f"Left out{f' for {label}' if label else ''}: {reason}.")
            continue
        steps, scales, window = noise_scales(run)
        windows.append(f"{window} recorded steps{f' ({label})' if label else ''}")
        curves.append((Line(with_run(label, "noise scale"), label or "scale", steps, scales, colour), ONE_RUN[0]))
    if windows:
        captions.append(
            f"Each point averages both parts of the estimate over {', '.join(windows)} up to it, and then divides "
            "them; a gap where one of them is not positive. Over fewer steps than hundreds it is rough."
        )
    unit = "items of sample_size" if any(run.counted for run in calls) else "contributions of a rank"
    return LineChart(
        title="Gradient noise scale: the batch at which noise and signal are alike",
        y_label=f"noise scale [{unit}]",
        left_out="no average is positive" if curves else "",
        captions=captions,
        curves=curves,
        value_title="noise scale",
    )


def metric_charts(
    runs: Sequence[Mapping[str, Metric]], calls: Sequence[CallTable], labels: Sequence[str]
) -> Iterator[LineChart | Chart]:
    """A curve of each metric: the mean per item where calls have a ``sample_size``, else the sum over the ranks."""
    names = _names(runs)
    counted = any(run.counted for run in calls)
    for name in names[:MAX_CHARTS]:
        yield _metric(name, runs, labels, counted=counted)
    yield from _left_out("metrics", names[MAX_CHARTS:])


def logged_charts(runs: Sequence[LoggedValues], labels: Sequence[str]) -> Iterator[LineChart | Chart]:
    """The numbers that each rank logged under a name, and a table of the last texts."""
    tables = [run.tables() for run in runs]
    names = _names(tables)
    none = RankTable(np.zeros(0, dtype=np.int64), np.zeros((1, 0)))
    for name in names[:MAX_CHARTS]:
        title, of_runs = f"Logged {name!r}: each rank's own value", [table.get(name, none) for table in tables]
        yield LineChart(title, "value", tables=of_runs)
    yield from _left_out("logged names", names[MAX_CHARTS:])
    yield from _text_table(runs, labels)


def _metric(name: str, runs: Sequence[Mapping[str, Metric]], labels: Sequence[str], *, counted: bool) -> LineChart:
    what = "the sum over the ranks, divided by the sum of sample_size" if counted else "the sum over the ranks"
    curves, captions = [], run_captions(labels)
    for run, label, style in zip(runs, labels, _styles(runs), strict=True):
        if metric := run.get(name):
            values = metric.sums / metric.divisors if counted else metric.sums
            curves.append((Line(with_run(label, name), label or name, metric.steps, values, COLOURS[0]), style))
            captions += _gap_captions(metric, label)
    return LineChart(f"Metric {name!r}: {what}", "per item" if counted else "sum", captions=captions, curves=curves)


def _gap_captions(metric: Metric, label: str) -> list[str]:
    steps = metric.steps[np.isnan(metric.sums)]
    if not len(steps):
        return []
    where = f"in {len(steps)} of {len(metric.steps)} steps, first in step {steps[0]}"
    return [f"{f'{label}: ' if label else ''}NaN or infinite {where}: a gap."]


def _text_table(runs: Sequence[LoggedValues], labels: Sequence[str]) -> Iterator[Chart]:
    """The last text of each name, for the ranks with this text together."""
    holders: dict[tuple[str, str, int, str], list[int]] = {}
    for run, label in zip(runs, labels, strict=True):
        for item in run.texts:
            row = label, item.name, item.step, shorten(item.text, _MAX_TEXT)
            holders.setdefault(row, []).append(item.rank)
    rows = [
        (with_run(label, name), name_ranks(ranks), str(step), text)
        for (label, name, step, text), ranks in holders.items()
    ]
    if rows:
        more = [f"{len(rows) - _MAX_TEXTS} more rows are left out."] if len(rows) > _MAX_TEXTS else []
        header = ("name", "ranks", "step", "text")
        yield Chart("Logged texts: the last of each name", tuple(more), table=(header, *rows[:_MAX_TEXTS]))


def _names(runs: Sequence[Mapping[str, T]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run))


def _left_out(what: str, names: Sequence[str]) -> Iterable[Chart]:
    if names:
        yield Chart(f"{len(names)} more {what}", (f"Left out: {', '.join(map(repr, names))}.",))


def _styles(runs: Sequence[object]) -> Sequence[LineStyle]:
    return TWO_RUNS if len(runs) == 2 else ONE_RUN


def _draw_curves(plot: figure, chart: LineChart) -> LegendEntries:
    title = chart.value_title or chart.y_label
    return [(line.label, draw_line(plot, line, style, title)) for line, style in chart.curves]


def _draw_ranks(plot: figure, chart: LineChart, labels: Sequence[str]) -> tuple[list[str], LegendEntries]:
    """Draw the values of every rank; captions and entries of the legend."""
    captions, entries = run_captions(labels), LegendEntries()
    many = max(run.world_size for run in chart.tables) > MAX_LINES
    for run, label, style in zip(chart.tables, labels, _styles(chart.tables), strict=True):
        if many:
            entries.append((with_run(label, "min to max"), _band(plot, run, style)))
            captions.append(_band_caption(run, label, chart.noun))
        for line in _summary_lines(run, label) if many else _rank_lines(run, label):
            entries.append((line.label, draw_line(plot, line, style, chart.y_label)))
    return captions, entries


def _bin_captions(chart: LineChart) -> list[str]:
    """The caption of lines with more steps than points."""
    sizes = [Bins.at_most(len(steps), MAX_POINTS // 2).size for steps in chart.steps if len(steps) > MAX_POINTS]
    if not sizes:
        return []
    return [f"Of every {max(sizes)} recorded steps a line goes through the smallest and the largest value."]


def _rank_lines(run: RankTable, label: str) -> Iterable[Line]:
    for rank, values in enumerate(run.values):
        yield Line(with_run(label, f"rank {rank}"), f"rank {rank}", run.steps, values, COLOURS[rank])


def _summary_lines(run: RankTable, label: str) -> Iterable[Line]:
    """A line for the median over the ranks, and a line for every rank that is an outlier."""
    medians = np.full(len(run.steps), np.nan)
    columns = _known_columns(run)
    medians[columns] = np.nanmedian(run.values[:, columns], axis=0)
    yield Line(with_run(label, "median"), with_run(label, "median"), run.steps, medians, BLACK)
    for rank, colour in zip(outliers(run.values), COLOURS, strict=False):
        yield Line(with_run(label, f"rank {rank}"), f"rank {rank}", run.steps, run.values[rank], colour)


def _known_columns(run: RankTable) -> NDArray[np.intp]:
    return np.flatnonzero(~np.isnan(run.values).all(axis=0))


def _band(plot: figure, run: RankTable, style: LineStyle) -> GlyphRenderer:
    """Band from the smallest to the largest value of all ranks, and of all steps of a bin."""
    columns = _known_columns(run)
    starts = Bins.at_most(len(columns), MAX_POINTS).starts
    values = run.values[:, columns]
    if not len(columns):
        return draw_band(plot, run.steps[columns], np.zeros(0), np.zeros(0), style)
    low = np.minimum.reduceat(np.nanmin(values, axis=0), starts)
    high = np.maximum.reduceat(np.nanmax(values, axis=0), starts)
    return draw_band(plot, run.steps[columns][starts], low, high, style)


def _band_caption(run: RankTable, label: str, noun: str) -> str:
    found = outliers(run.values)
    return (
        f"{label or 'The run'} has {run.world_size} ranks: the band goes from the smallest {noun} to the largest, the "
        "black line is the median. Lines of their own have ranks that are off the median by a factor of "
        f"{OUTLIER_FACTOR} in half of the steps, {MAX_OUTLIERS} at most: {name_ranks(found) if found else 'none'}."
    )


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
        renderers.append(plot.scatter("step", "value", source=dots, size=max(_DOT, style.width), **colour))
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

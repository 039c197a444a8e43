"""Line charts of a page: norms, noise scale, metrics and logged values. Needs bokeh."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from bokeh.models import ColumnDataSource, GlyphRenderer, HoverTool, Legend, LegendItem
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp._text import name_ranks, shorten
from legacy_ddp.debug._page.chart import MAX_COLUMNS, MAX_POINTS, Axis, Bins, Chart, Floats, extremes
from legacy_ddp.debug._page.series import (
    OUTLIER_FACTOR,
    CallTable,
    LoggedValues,
    Metric,
    RankTable,
    noise_scales,
    outliers,
)

_MAX_CHARTS = 8  # of metrics, and of logged values
_MAX_RANKS = 12  # with a line each
_MAX_TEXTS = 12
_MAX_TEXT = 80  # characters
# Colours of Okabe and Ito (2008) without yellow, which is invisible on white; then the "muted" colours of Tol.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#332288", "#882255", "#999933", "#44aa99", "#000000", "#aa4499"),
)
_NO_NORMS = "in no step do two ranks that took part, and the reduced gradient, have a finite norm in the trace"
_LOG_FROM = 20.0  # ratio of largest to smallest value from which the axis is logarithmic

T = TypeVar("T")


# Arguments of bokeh for the lines of a run. Lines of two runs stay visible on top of each other.
_Style = Mapping[str, Any]
_ONE_RUN: _Style = {"line_width": 1.6}
_TWO_RUNS: Sequence[_Style] = ({"line_width": 5.0, "alpha": 0.4}, {**_ONE_RUN, "line_dash": "dashed"})


@dataclass(frozen=True)
class _Line:
    """``owner``: for the hover. ``label``: for the legend. ``ranks``: of each value, for the hover."""

    owner: str
    label: str
    steps: NDArray[np.int64]
    values: Floats
    colour: str
    style: _Style
    ranks: NDArray[np.intp] | None = None


def local_norm_chart(axis: Axis, calls: Sequence[CallTable], labels: Sequence[str]) -> Chart:
    title = "Local gradients: every rank's own norm, before the reduction"
    tables = [RankTable(run.steps, run.local_norms) for run in calls]
    left_out = "no finite norm of a local gradient is in the trace"
    return _rank_chart(axis, title, "2-norm", tables, labels, left_out, [run.damaged for run in calls])


def noise_scale_chart(axis: Axis, calls: Sequence[CallTable], labels: Sequence[str]) -> Chart:
    """The gradient noise scale: larger batches than this hardly help."""
    captions, windows, lines = [], [], []
    for run, label, colour in zip(calls, labels, _COLOURS, strict=False):
        steps, scales, window = noise_scales(run)
        if not window:
            reason = _NO_NORMS if run.world_size > 1 else "it compares ranks, and there is only one"
            captions.append(f"Left out{f' for {label}' if label else ''}: {reason}.")
            continue
        windows.append(f"{window} recorded steps{f' ({label})' if label else ''}")
        lines.append(_Line(_with_run(label, "noise scale"), label, steps, scales, colour, _ONE_RUN))
    if windows:
        captions.append(
            f"Each point averages both parts of the estimate over {', '.join(windows)} up to it, and then divides "
            "them; a gap where one of them is not positive. Over fewer steps than hundreds it is rough."
        )
    unit = "items of sample_size" if any(run.counted for run in calls) else "contributions of a rank"
    title = "Gradient noise scale: the batch at which noise and signal are alike"
    return _draw(axis, title, f"noise scale [{unit}]", lines, captions, "no average is positive" if lines else "")


def metric_charts(
    axis: Axis, runs: Sequence[Mapping[str, Metric]], calls: Sequence[CallTable], labels: Sequence[str]
) -> Iterator[Chart]:
    """A curve of each metric: the mean per item if calls have a ``sample_size``, else the sum over the ranks."""
    names = _names(runs)
    counted = any(run.counted for run in calls)
    what = "the sum over the ranks, divided by the sum of sample_size" if counted else "the sum over the ranks"
    for name in names[:_MAX_CHARTS]:
        lines, captions = [], _run_captions(labels)
        for run, label, style in zip(runs, labels, _styles(runs), strict=True):
            if metric := run.get(name):
                values = metric.sums / metric.divisors if counted else metric.sums
                lines.append(_Line(_with_run(label, name), label, metric.steps, values, _COLOURS[0], style))
                captions += _gap_captions(metric, label)
        yield _draw(axis, f"Metric {name!r}: {what}", "per item" if counted else "sum", lines, captions)
    yield from _left_out("metrics", names[_MAX_CHARTS:])


def logged_charts(axis: Axis, runs: Sequence[LoggedValues], labels: Sequence[str]) -> Iterator[Chart]:
    """A chart of the numbers of each name that ranks logged, and a table of the last texts."""
    tables = [run.tables() for run in runs]
    names = _names(tables)
    none = RankTable(np.zeros(0, dtype=np.int64), np.zeros((1, 0)))
    for name in names[:_MAX_CHARTS]:
        title, of_runs = f"Logged {name!r}: each rank's own value", [table.get(name, none) for table in tables]
        yield _rank_chart(axis, title, "value", of_runs, labels)
    yield from _left_out("logged names", names[_MAX_CHARTS:])
    yield from _text_table(runs, labels)


def _gap_captions(metric: Metric, label: str) -> list[str]:
    steps = metric.steps[np.isnan(metric.sums)]
    if not len(steps):
        return []
    where = f"in {len(steps)} of {len(metric.steps)} steps, first in step {steps[0]}"
    return [f"{f'{label}: ' if label else ''}NaN or infinite {where}: a gap."]


def _text_table(runs: Sequence[LoggedValues], labels: Sequence[str]) -> Iterator[Chart]:
    rows = [
        (_with_run(label, name), name_ranks(ranks), str(step), shorten(text, _MAX_TEXT))
        for run, label in zip(runs, labels, strict=True)
        for (name, step, text), ranks in run.texts.items()
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


def _styles(runs: Sequence[object]) -> Sequence[_Style]:
    return _TWO_RUNS if len(runs) == 2 else (_ONE_RUN,)


def _with_run(run: str, label: str) -> str:
    """``A, rank 0``; without a label of the run only ``rank 0``."""
    return f"{run}, {label}" if run else label


def _run_captions(labels: Sequence[str]) -> list[str]:
    return [f"Broad pale lines: {labels[0]}; dashed lines: {labels[1]}."] if len(labels) == 2 else []


def _rank_chart(
    axis: Axis,
    title: str,
    y_label: str,
    tables: Sequence[RankTable],
    labels: Sequence[str],
    left_out: str = "no value is finite",
    damaged: Sequence[NDArray[np.bool_]] = (),
) -> Chart:
    """A line for each rank; for many ranks, lines of the smallest, the median and the largest value.

    ``damaged``: of each run, the ranks and steps that get a cross.
    """
    many = max(len(table.values) for table in tables) > _MAX_RANKS
    captions, lines = _run_captions(labels), list[_Line]()
    for table, label, style in zip(tables, labels, _styles(tables), strict=True):
        lines += _summary_lines(table, label, style) if many else _rank_lines(table, label, style)
        captions += [_summary_caption(table, label)] if many else []
    crosses = [
        (label, table.steps, of_run)
        for table, of_run, label in zip(tables, damaged, labels, strict=False)
        if of_run.any()
    ]
    if crosses:
        captions.append("A cross at the height of the largest norm: a rank's own gradient was not finite.")
    return _draw(axis, title, y_label, lines, captions, left_out, crosses)


def _rank_lines(table: RankTable, label: str, style: _Style) -> Iterator[_Line]:
    for rank, values in enumerate(table.values):
        name = f"rank {rank}"
        yield _Line(_with_run(label, name), name, table.steps, values, _COLOURS[rank], style)


def _summary_lines(table: RankTable, label: str, style: _Style) -> Iterator[_Line]:
    order = table.values.argsort(axis=0)  # NaN comes last
    last = np.maximum((~np.isnan(table.values)).sum(axis=0) - 1, 0)
    for name, place, colour in zip(
        ("largest", "median", "smallest"), (last, last // 2, 0 * last), _COLOURS, strict=False
    ):
        columns = np.arange(len(table.steps))
        ranks = order[place, columns]
        yield _Line(_with_run(label, name), name, table.steps, table.values[ranks, columns], colour, style, ranks)


def _summary_caption(table: RankTable, label: str) -> str:
    found = outliers(table.values)
    return (
        f"{label or 'The run'} has {len(table.values)} ranks: the pointer shows whose the smallest, the median and the "
        f"largest value are. Off the median by a factor of {OUTLIER_FACTOR} in half of the steps: "
        f"{name_ranks(found) if found else 'none'}."
    )


def _draw(
    axis: Axis,
    title: str,
    y_label: str,
    lines: Sequence[_Line],
    captions: Sequence[str],
    left_out: str = "no value is finite",
    crosses: Sequence[tuple[str, NDArray[np.int64], NDArray[np.bool_]]] = (),
) -> Chart:
    """``left_out``: the caption without any finite value. ``crosses``: label, steps, and a row for each rank."""
    known = np.concatenate([line.values[~np.isnan(line.values)] for line in lines] or [np.zeros(0)])
    if not len(known):
        return Chart(title, (*captions, f"Left out: {left_out}.") if left_out else tuple(captions))
    low, high = float(known.min()), float(known.max())
    plot = axis.plot(y_label, y_axis_type="log" if low > 0 and high / low > _LOG_FROM else "linear")
    entries = [(line.label, _draw_line(plot, line, y_label)) for line in lines]
    entries += [("NaN, inf", _draw_crosses(plot, *of_run, high)) for of_run in crosses]
    _add_legend(plot, entries)
    sizes = [Bins.at_most(len(line.steps), MAX_POINTS // 2).size for line in lines if len(line.steps) > MAX_POINTS]
    binned = (
        [f"Of every {max(sizes)} recorded steps a line goes through the smallest and the largest value."]
        if sizes
        else []
    )
    return Chart(title, (*captions, *binned), plot)


def _draw_line(plot: figure, line: _Line, value_title: str) -> GlyphRenderer:
    kept = extremes(line.values)
    points = {"step": line.steps[kept], "value": line.values[kept]}
    if line.ranks is not None:
        points["rank"] = line.ranks[kept]
    curve = plot.line("step", "value", source=ColumnDataSource(points), color=line.colour, **line.style)
    renderers = [curve]
    # A line with one point between two gaps is invisible.
    gap = np.isnan(np.concatenate(([np.nan], points["value"], [np.nan])))
    single = ~gap[1:-1] & gap[:-2] & gap[2:]
    if single.any():
        dots = ColumnDataSource({name: values[single] for name, values in points.items()})
        alpha = line.style.get("alpha", 1.0)
        renderers.append(plot.scatter("step", "value", source=dots, size=7, color=line.colour, alpha=alpha))
    owner = line.owner if line.ranks is None else f"{line.owner}: rank @rank"
    tips = [("of", owner), ("step", "@step"), (value_title, "@value{%.4g}")]
    plot.add_tools(HoverTool(renderers=renderers, tooltips=tips, formatters={"@value": "printf"}, visible=False))
    return curve


def _draw_crosses(
    plot: figure, label: str, steps: NDArray[np.int64], nonfinite: NDArray[np.bool_], height: float
) -> GlyphRenderer:
    """Draw a cross for each bin of steps in which a rank is ``nonfinite``."""
    found = np.flatnonzero(nonfinite.any(axis=0))
    bins = found // Bins.at_most(len(steps), MAX_COLUMNS).size
    parts = np.split(found, np.flatnonzero(np.diff(bins)) + 1)
    ends = [(len(part), int(steps[part[0]]), int(steps[part[-1]])) for part in parts]
    ranks = [np.flatnonzero(nonfinite[:, part].any(axis=1)).tolist() for part in parts]
    table = {
        "step": [first for _, first, _ in ends],
        "value": [height] * len(parts),
        "steps": [str(first) if first == last else f"{count} of {first} to {last}" for count, first, last in ends],
        "owner": [_with_run(label, name_ranks(of_part)) for of_part in ranks],
    }
    source = ColumnDataSource(table)
    crosses = plot.scatter("step", "value", source=source, marker="x", size=9, line_width=2, color="#000000")
    tips = [("not finite", "@owner"), ("step", "@steps")]
    plot.add_tools(HoverTool(renderers=[crosses], tooltips=tips, visible=False))
    return crosses


def _add_legend(plot: figure, entries: Sequence[tuple[str, GlyphRenderer]]) -> None:
    """Add an entry for each label. A click on it hides the lines of both runs."""
    by_label: dict[str, list[GlyphRenderer]] = {}
    for label, renderer in entries:
        by_label.setdefault(label, []).append(renderer)
    if len(entries) > 1:
        items = [LegendItem(label={"value": label}, renderers=renderers) for label, renderers in by_label.items()]
        legend = Legend(items=items, click_policy="hide", border_line_color=None, label_text_font_size="11px")
        legend.update(label_height=14, glyph_width=14, spacing=0, padding=2, margin=4)
        plot.add_layout(legend, "right")

"""Charts of the figures of the training loop: metrics, and values logged by each rank. Needs bokeh."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from legacy_ddp._compare import name_ranks
from legacy_ddp._text import shorten
from legacy_ddp.debug._page.call_table import CallTable
from legacy_ddp.debug._page.chart import Axis, Chart
from legacy_ddp.debug._page.lines import (
    ONE_RUN,
    TWO_RUNS,
    Line,
    add_legend,
    axis_type,
    draw_line,
    known_values,
    run_captions,
    with_run,
)
from legacy_ddp.debug._page.loop_values import LoggedText, LoggedValues, Metric
from legacy_ddp.debug._page.rank_lines import COLOURS, RankTable, bin_captions, draw_ranks

MAX_CHARTS = 8  # of metrics, and of logged values
_MAX_TEXTS = 12
_MAX_TEXT = 80  # characters

T = TypeVar("T")


def metric_charts(
    axis: Axis, runs: Sequence[Mapping[str, Metric]], calls: Sequence[CallTable], labels: Sequence[str]
) -> Iterator[Chart]:
    """A curve of each metric: the mean per item where calls have a ``sample_size``, else the sum over the ranks."""
    names = _names(runs)
    counted = any(run.counted for run in calls)
    for name in names[:MAX_CHARTS]:
        yield _metric_chart(axis, name, runs, labels, counted=counted)
    yield from _left_out("metrics", names[MAX_CHARTS:])


def logged_charts(axis: Axis, runs: Sequence[LoggedValues], labels: Sequence[str]) -> Iterator[Chart]:
    """The numbers that each rank logged under a name, and a table of the last texts."""
    tables = [run.tables() for run in runs]
    names = _names(tables)
    for name in names[:MAX_CHARTS]:
        yield _logged_chart(axis, name, tables, labels)
    yield from _left_out("logged names", names[MAX_CHARTS:])
    yield from _text_table(runs, labels)


def _metric_chart(
    axis: Axis, name: str, runs: Sequence[Mapping[str, Metric]], labels: Sequence[str], *, counted: bool
) -> Chart:
    what = "the sum over the ranks, divided by the sum of sample_size" if counted else "the sum over the ranks"
    title, y_label = f"Metric {name!r}: {what}", "per item" if counted else "sum"
    styles = TWO_RUNS if len(runs) == 2 else ONE_RUN
    lines, captions = [], run_captions(labels)
    for run, label, style in zip(runs, labels, styles, strict=True):
        if metric := run.get(name):
            values = metric.sums / metric.divisors if counted else metric.sums
            lines.append((Line(with_run(label, name), label or name, metric.steps, values, COLOURS[0]), style))
            captions += _gap_captions(metric, label)
    known = known_values(line.values for line, _ in lines)
    if not len(known):
        return Chart(title, (*captions, "Left out: no value is finite."))
    plot = axis.plot(y_label, y_axis_type=axis_type(known))
    add_legend(plot, [(line.label, draw_line(plot, line, style, y_label)) for line, style in lines])
    tables = [RankTable(line.steps, line.values[np.newaxis]) for line, _ in lines]
    return Chart(title, (*captions, *bin_captions(tables)), plot)


def _gap_captions(metric: Metric, label: str) -> list[str]:
    steps = metric.steps[np.isnan(metric.sums)]
    if not len(steps):
        return []
    where = f"in {len(steps)} of {len(metric.steps)} steps, first in step {steps[0]}"
    return [f"{f'{label}: ' if label else ''}NaN or infinite {where}: a gap."]


def _logged_chart(axis: Axis, name: str, runs: Sequence[Mapping[str, RankTable]], labels: Sequence[str]) -> Chart:
    title = f"Logged {name!r}: each rank's own value"
    tables = [run[name] if name in run else RankTable(np.zeros(0, dtype=np.int64), np.zeros((1, 0))) for run in runs]
    known = known_values(table.values.ravel() for table in tables)
    if not len(known):
        return Chart(title, ("Left out: no value is finite.",))
    plot = axis.plot("value", y_axis_type=axis_type(known))
    captions, entries = draw_ranks(plot, tables, labels, "value", "value")
    add_legend(plot, entries)
    return Chart(title, (*captions, *bin_captions(tables)), plot)


def _text_table(runs: Sequence[LoggedValues], labels: Sequence[str]) -> Iterator[Chart]:
    """The last text of each name, for the ranks with this text together."""
    holders: dict[tuple[str, str, int, str], list[int]] = {}
    for run, label in zip(runs, labels, strict=True):
        for item in run.texts:
            holders.setdefault(_row(item, label), []).append(item.rank)
    rows = [
        (with_run(label, name), name_ranks(ranks), str(step), text)
        for (label, name, step, text), ranks in holders.items()
    ]
    if rows:
        more = [f"{len(rows) - _MAX_TEXTS} more rows are left out."] if len(rows) > _MAX_TEXTS else []
        header = ("name", "ranks", "step", "text")
        yield Chart("Logged texts: the last of each name", tuple(more), table=(header, *rows[:_MAX_TEXTS]))


def _row(item: LoggedText, label: str) -> tuple[str, str, int, str]:
    return label, item.name, item.step, shorten(item.text, _MAX_TEXT)


def _names(runs: Sequence[Mapping[str, T]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run))


def _left_out(what: str, names: Sequence[str]) -> Iterable[Chart]:
    if names:
        yield Chart(f"{len(names)} more {what}", (f"Left out: {', '.join(map(repr, names))}.",))

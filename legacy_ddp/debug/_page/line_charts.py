"""Line charts of a page: norms of local gradients, and the gradient noise scale. Needs bokeh."""

from collections.abc import Iterable, Sequence

import numpy as np
from bokeh.models import GlyphRenderer
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._page.binning import MAX_POINTS, Bins
from legacy_ddp.debug._page.call_table import CallTable
from legacy_ddp.debug._page.chart import BLACK, Axis, Chart
from legacy_ddp.debug._page.lines import (
    ONE_RUN,
    TWO_RUNS,
    LegendEntries,
    Line,
    LineStyle,
    add_legend,
    axis_type,
    draw_band,
    draw_crosses,
    draw_line,
    known_values,
    run_captions,
    with_run,
)
from legacy_ddp.debug._page.rank_statistics import (
    MAX_OUTLIERS,
    OUTLIER_FACTOR,
    missing_noise_reason,
    noise_scales,
    outliers,
)

MAX_LINES = 12
# Okabe and Ito (2008) without their yellow, which is invisible on white; then the "muted" colours of Tol.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#332288", "#882255", "#999933", "#44aa99", "#000000", "#aa4499"),
)


def local_norm_chart(axis: Axis, calls: Sequence[CallTable], labels: Sequence[str]) -> Chart:
    """The norm of every rank's local gradient."""
    title = "Local gradients: every rank's own norm, before the reduction"
    known = known_values(run.local_norms for run in calls)
    if not len(known):
        return Chart(title, ("Left out: no finite norm of a local gradient is in the trace.",))
    plot = axis.plot("2-norm", y_axis_type=axis_type(known))
    captions, entries = run_captions(labels), LegendEntries()
    many = max(run.world_size for run in calls) > MAX_LINES
    for run, label, style in zip(calls, labels, TWO_RUNS if len(calls) == 2 else ONE_RUN, strict=True):
        if many:
            entries.append((with_run(label, "min to max"), _band(plot, run, style)))
            captions.append(_band_caption(run, label))
        for line in _summary_lines(run, label) if many else _rank_lines(run, label):
            entries.append((line.label, draw_line(plot, line, style, "2-norm")))
    for run, label in zip(calls, labels, strict=True):
        if run.damaged.any():
            entries.append(("not finite", draw_crosses(plot, run.steps, run.damaged, label, float(known.max()))))
    if any(run.damaged.any() for run in calls):
        captions.append("A cross at the height of the largest norm: a rank's own gradient was not finite.")
    add_legend(plot, entries)
    return Chart(title, (*captions, *_bin_captions(calls)), plot)


def noise_scale_chart(axis: Axis, calls: Sequence[CallTable], labels: Sequence[str]) -> Chart:
    """The gradient noise scale: the batch size from which larger batches hardly help."""
    title = "Gradient noise scale: the batch at which noise and signal are alike"
    captions, windows, lines = [], [], []
    for run, label, colour in zip(calls, labels, _COLOURS, strict=False):
        if reason := missing_noise_reason(run):
            captions.append(f"Left out{f' for {label}' if label else ''}: {reason}.")
            continue
        steps, scales, window = noise_scales(run)
        windows.append(f"{window} recorded steps{f' ({label})' if label else ''}")
        lines.append(Line(with_run(label, "noise scale"), label or "scale", steps, scales, colour))
    if windows:
        captions.append(
            f"Each point averages both parts of the estimate over {', '.join(windows)} up to it, and then divides "
            "them; a gap where one of them is not positive. Over fewer steps than hundreds it is rough."
        )
    known = known_values(line.values for line in lines)
    if not len(known):
        return Chart(title, (*captions, "Left out: no average is positive.") if lines else tuple(captions))
    unit = "items of sample_size" if any(run.counted for run in calls) else "contributions of a rank"
    plot = axis.plot(f"noise scale [{unit}]", y_axis_type=axis_type(known))
    add_legend(plot, [(line.label, draw_line(plot, line, ONE_RUN[0], "noise scale")) for line in lines])
    return Chart(title, tuple(captions), plot)


def _rank_lines(run: CallTable, label: str) -> Iterable[Line]:
    for rank, norms in enumerate(run.local_norms):
        yield Line(with_run(label, f"rank {rank}"), f"rank {rank}", run.steps, norms, _COLOURS[rank])


def _summary_lines(run: CallTable, label: str) -> Iterable[Line]:
    """The median, and the outliers."""
    medians = np.full(len(run.steps), np.nan)
    columns = _columns_with_norm(run)
    medians[columns] = np.nanmedian(run.local_norms[:, columns], axis=0)
    yield Line(with_run(label, "median"), with_run(label, "median"), run.steps, medians, BLACK)
    for rank, colour in zip(outliers(run.local_norms), _COLOURS, strict=False):
        yield Line(with_run(label, f"rank {rank}"), f"rank {rank}", run.steps, run.local_norms[rank], colour)


def _columns_with_norm(run: CallTable) -> NDArray[np.intp]:
    return np.flatnonzero(~np.isnan(run.local_norms).all(axis=0))


def _band(plot: figure, run: CallTable, style: LineStyle) -> GlyphRenderer:
    """Band from the smallest to the largest norm of all ranks, and of all steps of a bin."""
    columns = _columns_with_norm(run)
    starts = Bins.at_most(len(columns), MAX_POINTS).starts
    norms = run.local_norms[:, columns]
    if not len(columns):
        return draw_band(plot, run.steps[columns], np.zeros(0), np.zeros(0), style)
    low = np.minimum.reduceat(np.nanmin(norms, axis=0), starts)
    high = np.maximum.reduceat(np.nanmax(norms, axis=0), starts)
    return draw_band(plot, run.steps[columns][starts], low, high, style)


def _band_caption(run: CallTable, label: str) -> str:
    found = outliers(run.local_norms)
    return (
        f"{label or 'The run'} has {run.world_size} ranks: the band goes from the smallest norm to the largest, the "
        "black line is the median. Lines of their own have ranks that are off the median by a factor of "
        f"{OUTLIER_FACTOR} in half of the steps, {MAX_OUTLIERS} at most: {name_ranks(found) if found else 'none'}."
    )


def _bin_captions(calls: Sequence[CallTable]) -> list[str]:
    sizes = [Bins.at_most(len(run.steps), MAX_POINTS // 2).size for run in calls if len(run.steps) > MAX_POINTS]
    if not sizes:
        return []
    return [f"Of every {max(sizes)} recorded steps a line goes through the smallest and the largest value."]

"""Line charts of a page: norms of local gradients, and the gradient noise scale. Needs bokeh."""

from collections.abc import Sequence

from legacy_ddp.debug._page.call_table import CallTable
from legacy_ddp.debug._page.chart import Axis, Chart
from legacy_ddp.debug._page.lines import (
    ONE_RUN,
    Line,
    add_legend,
    axis_type,
    draw_crosses,
    draw_line,
    known_values,
    with_run,
)
from legacy_ddp.debug._page.rank_lines import COLOURS, RankTable, bin_captions, draw_ranks
from legacy_ddp.debug._page.rank_statistics import missing_noise_reason, noise_scales


def local_norm_chart(axis: Axis, calls: Sequence[CallTable], labels: Sequence[str]) -> Chart:
    """The norm of every rank's local gradient."""
    title = "Local gradients: every rank's own norm, before the reduction"
    known = known_values(run.local_norms for run in calls)
    if not len(known):
        return Chart(title, ("Left out: no finite norm of a local gradient is in the trace.",))
    plot = axis.plot("2-norm", y_axis_type=axis_type(known))
    tables = [RankTable(run.steps, run.local_norms) for run in calls]
    captions, entries = draw_ranks(plot, tables, labels, "norm", "2-norm")
    for run, label in zip(calls, labels, strict=True):
        if run.damaged.any():
            entries.append(("not finite", draw_crosses(plot, run.steps, run.damaged, label, float(known.max()))))
    if any(run.damaged.any() for run in calls):
        captions.append("A cross at the height of the largest norm: a rank's own gradient was not finite.")
    add_legend(plot, entries)
    return Chart(title, (*captions, *bin_captions(tables)), plot)


def noise_scale_chart(axis: Axis, calls: Sequence[CallTable], labels: Sequence[str]) -> Chart:
    """The gradient noise scale: the batch size from which larger batches hardly help."""
    title = "Gradient noise scale: the batch at which noise and signal are alike"
    captions, windows, lines = [], [], []
    for run, label, colour in zip(calls, labels, COLOURS, strict=False):
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

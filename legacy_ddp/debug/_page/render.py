"""Rendering of a page: charts, environment table and template. Needs bokeh."""

from collections.abc import Sequence
from pathlib import Path

import bokeh
from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from legacy_ddp.debug._diff.result import Comparison, Verdict
from legacy_ddp.debug._page.binning import Grid
from legacy_ddp.debug._page.chart import Axis, Chart
from legacy_ddp.debug._page.environment_table import environment_rows
from legacy_ddp.debug._page.line_charts import local_norm_chart, noise_scale_chart
from legacy_ddp.debug._page.loop_charts import logged_charts, metric_charts
from legacy_ddp.debug._page.operation_table import operation_table
from legacy_ddp.debug._page.parameter_chart import parameter_chart
from legacy_ddp.debug._page.series import Series, read_series
from legacy_ddp.debug._page.wait_chart import wait_chart
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.run import Run

PAGE_TAG = "a report of legacy_ddp"
_TEMPLATE = Path(__file__).with_name("page.html")
# Symbol and label, because some readers see no colours. A headline begins with the label.
_VERDICTS: dict[Verdict, tuple[str, str]] = {
    "same": ("✓", "same"),
    "different": ("✗", "different"),
    "unknown": ("?", "cannot tell"),
}


def render(
    runs: Sequence[Run], comparison: Comparison, text: Sequence[str], progress: Progress = lambda _: None
) -> str:
    """The page about the runs and their comparison; ``text``: the lines of the comparison.

    Raises:
        TraceError: a trace file cannot be read.
    """
    series = read_series(runs, progress)
    symbol, verdict_label = _VERDICTS[comparison.verdict]
    labels = ("A", "B")[: len(runs)] if len(runs) == 2 else ("",)
    charts = [*operation_table(comparison.operations), *draw_charts(series, labels)]
    plots = [chart.plot for chart in charts if chart.plot is not None]
    script, divisions = components(plots) if plots else ("", ())  # a trace without any step has no chart
    remaining = iter(divisions)
    environment = environment_rows(runs, [calls.ends for calls in series.calls])
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        page_tag=PAGE_TAG,
        title="Report: " + " against ".join(run.folder.name or str(run.folder) for run in runs),
        runs=[f"{label or 'trace'}: {run.folder}" for label, run in zip(labels, runs, strict=True)],
        verdict=comparison.verdict,
        verdict_label=f"{symbol} {verdict_label.upper()}",
        headline=comparison.headline.removeprefix(f"{verdict_label}: "),
        text="\n".join(text),
        columns=labels if len(runs) == 2 else ("all ranks",),
        environment=environment,
        differing=sum(bool(row.differs) for row in environment),
        charts=charts,
        # Code from bokeh, which escapes the text of a trace.
        divisions=[Markup(next(remaining)) if chart.plot is not None else "" for chart in charts],
        bokeh_js=Markup("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        bokeh_script=Markup(script),
        footer=f"Made with bokeh {bokeh.__version__}; the page loads nothing.",
    )


def draw_charts(series: Series, labels: Sequence[str]) -> list[Chart]:
    """All charts, over a shared axis of steps."""
    steps = {int(step) for calls in series.calls for step in calls.steps}
    # Equal columns in all charts, unless rank 0 lacks steps of other ranks.
    grid = series.parameters.grid if series.parameters.grid.holds(steps) else Grid.of(steps)
    spans = [(item.left, item.last + item.stride / 2) for item in (grid, series.parameters.grid)]
    axis = Axis.over(min(left for left, _ in spans), max(right for _, right in spans))
    return [
        *metric_charts(axis, series.metrics, series.calls, labels),
        parameter_chart(axis, series),
        local_norm_chart(axis, series.calls, labels),
        *(wait_chart(axis, calls, grid, label) for calls, label in zip(series.calls, labels, strict=True)),
        noise_scale_chart(axis, series.calls, labels),
        *logged_charts(axis, series.logged, labels),
    ]

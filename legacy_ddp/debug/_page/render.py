"""What is on the page, from top to bottom? Needs bokeh."""

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
from legacy_ddp.debug._page.heatmap_charts import parameters, waits
from legacy_ddp.debug._page.line_charts import local_norms, noise_scale
from legacy_ddp.debug._page.series import Series, read_series
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.run import Run

MARK = "a report of legacy_ddp"
_TEMPLATE = Path(__file__).with_name("page.html")
# A sign and a word, for colour alone says nothing to some; headlines begin with the word.
_VERDICTS: dict[Verdict, tuple[str, str]] = {
    "same": ("✓", "same"),
    "different": ("✗", "different"),
    "unknown": ("?", "cannot tell"),
}


def render(
    runs: Sequence[Run], comparison: Comparison, text: Sequence[str], progress: Progress = lambda _: None
) -> str:
    """The page about runs, what comparing them found, and that in lines of text.

    Raises:
        TraceError: a trace cannot be read.
    """
    series = read_series(runs, progress)
    sign, word = _VERDICTS[comparison.verdict]
    labels = ("A", "B")[: len(runs)] if len(runs) == 2 else ("",)
    charts = draw(series, labels)
    plots = [chart.plot for chart in charts if chart.plot is not None]
    script, divisions = components(plots) if plots else ("", ())  # a trace that ends before its start has no chart
    placed = iter(divisions)
    environment = environment_rows(runs, [calls.ends for calls in series.calls])
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        mark=MARK,
        title="Report: " + " against ".join(run.folder.name or str(run.folder) for run in runs),
        runs=[f"{label or 'trace'}: {run.folder}" for label, run in zip(labels, runs, strict=True)],
        verdict=comparison.verdict,
        verdict_words=f"{sign} {word.upper()}",
        headline=comparison.headline.removeprefix(f"{word}: "),
        text="\n".join(text),
        columns=labels if len(runs) == 2 else ("all ranks",),
        environment=environment,
        differing=sum(bool(row.differs) for row in environment),
        charts=charts,
        # Code of bokeh's: what it holds of a trace is escaped in it.
        divisions=[Markup(next(placed)) if chart.plot is not None else "" for chart in charts],
        bokeh_js=Markup("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        bokeh_script=Markup(script),
        footer=f"Made with bokeh {bokeh.__version__}; the page loads nothing.",
    )


def draw(series: Series, labels: Sequence[str]) -> list[Chart]:
    """All charts, over the same steps."""
    steps = {int(step) for calls in series.calls for step in calls.steps}
    # The same columns in all charts, unless rank 0 has not all the steps that others have.
    grid = series.heat.grid if series.heat.grid.holds(steps) else Grid.of(steps)
    spans = [(one.left, one.last + one.stride / 2) for one in (grid, series.heat.grid)]
    axis = Axis.over(min(left for left, _ in spans), max(right for _, right in spans))
    return [
        parameters(axis, series),
        local_norms(axis, series.calls, labels),
        *(waits(axis, calls, grid, label) for calls, label in zip(series.calls, labels, strict=True)),
        noise_scale(axis, series.calls, labels),
    ]

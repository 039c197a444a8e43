"""The page of ``legacy-ddp report``: a single HTML file which loads nothing. Needs bokeh."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import bokeh
from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._diff.compare import compare_ranks, compare_runs
from legacy_ddp.debug._diff.result import Comparison, Verdict
from legacy_ddp.debug._diff.text import lines
from legacy_ddp.debug._page.binning import Grid
from legacy_ddp.debug._page.chart import Axis, Chart
from legacy_ddp.debug._page.heatmap import parameter_chart, wait_chart
from legacy_ddp.debug._page.line_charts import local_norm_chart, logged_charts, metric_charts, noise_scale_chart
from legacy_ddp.debug._page.series import Series, read_series
from legacy_ddp.debug._page.tables import environment_rows, operation_table
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
_BEGINNING = f"<!DOCTYPE html>\n<!-- {PAGE_TAG}".encode()


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


def write_page(runs: Sequence[Run], output: Path, progress: Progress = lambda _: None) -> None:
    """Write a self-contained page about one run or two. An earlier report at ``output`` is replaced.

    Every trace file is read twice, for the comparison and for the charts; ``progress`` gets both.

    Raises:
        TraceError: a trace file cannot be read, ``output`` cannot be written, or ``output`` is no report.
    """
    with reserved(output) as part:
        comparison = compare_ranks(runs[0], progress) if len(runs) == 1 else compare_runs(runs[0], runs[1], progress)
        publish(render(runs, comparison, lines(comparison), progress), part, output)


@contextmanager
def reserved(output: Path) -> Iterator[Path]:
    """Create a new file beside ``output``, before the long comparison begins. It is removed after the block.

    Raises:
        TraceError: see :func:`write_page`.
    """
    _refuse_other_files(output)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        part.open("x").close()
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror}; name another place with -o") from error
    try:
        yield part
    finally:
        with suppress(OSError):  # renamed by publish()
            part.unlink()


def publish(page: str, part: Path, output: Path) -> None:
    """Write the page to ``part`` and rename ``part`` to ``output``, so that ``output`` is always complete.

    Raises:
        TraceError: the file cannot be written.
    """
    try:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")  # folder names may not be UTF-8
        os.replace(part, output)
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror}; name another place with -o") from error


def _refuse_other_files(output: Path) -> None:
    """Refuse to overwrite a file which is no report: -o may name a trace by mistake."""
    try:
        if not output.exists():
            return
        if not output.is_file():
            raise TraceError(f"{output} is no file, expected a place for a page; name another one with -o")
        with open(output, "rb") as file:
            beginning = file.read(len(_BEGINNING))
    except OSError as error:
        raise TraceError(f"{output} cannot be read: {error.strerror}; name another place with -o") from error
    if beginning not in (b"", _BEGINNING):
        raise TraceError(f"{output} exists and is no report; name another place with -o, or remove it")

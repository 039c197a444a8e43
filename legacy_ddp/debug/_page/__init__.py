"""The page of ``legacy-ddp report``: one HTML file about one run, or two runs and their differences, drawn with bokeh.

The file loads nothing.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import bokeh
import jinja2
from bokeh.embed import components
from bokeh.resources import Resources
from markupsafe import Markup

from legacy_ddp._errors import TraceError
from legacy_ddp._text import MAX_LINES, MISSING, compare_rows, first_few, name_ranks, printable_lines
from legacy_ddp.debug._diff.compare import compare_ranks, compare_runs
from legacy_ddp.debug._diff.result import (
    Answer,
    Cause,
    Comparison,
    OperationFinding,
    OperationRow,
    cause_parts,
    lines,
    on_ranks,
)
from legacy_ddp.debug._operations.operation import at
from legacy_ddp.debug._page.chart import Axis, Chart, Grid
from legacy_ddp.debug._page.heatmap import parameter_chart, wait_chart
from legacy_ddp.debug._page.line_charts import local_norm_chart, logged_charts, metric_charts, noise_scale_chart
from legacy_ddp.debug._page.series import Series, read_series
from legacy_ddp.debug._trace.read import Run
from legacy_ddp.debug._trace.records import Environment

PAGE_TAG = "a report of legacy_ddp"
_BEGINNING = f"<!DOCTYPE html>\n<!-- {PAGE_TAG}".encode()
_TEMPLATE = Path(__file__).with_name("page.html")
# Symbol and label, because some readers see no colours. A headline begins with the label.
_VERDICTS: dict[Answer, tuple[str, str]] = {
    "same": ("✓", "same"),
    "different": ("✗", "different"),
    "unknown": ("?", "cannot tell"),
}
_MARK = "▶"  # besides colour, because some readers see none
_MAX_GROUPS = 6


def write_page(runs: Sequence[Run], output: Path) -> None:
    """Write a self-contained page about one run or two. Replaces an earlier report at ``output``.

    Every trace file is read twice, for the comparison and for the charts.

    Raises:
        TraceError: a trace file cannot be read, ``output`` cannot be written, or ``output`` is no report.
    """
    _refuse_other_files(output)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    with _explained(output, "written"):
        part.open("x").close()  # a failure comes before the long comparison
    try:
        comparison = compare_ranks(runs[0]) if len(runs) == 1 else compare_runs(runs[0], runs[1])
        page = render(runs, comparison)
        with _explained(output, "written"):
            part.write_text(page, encoding="utf-8", errors="backslashreplace")  # folder names may not be UTF-8
            os.replace(part, output)  # output is always complete
    finally:
        with suppress(OSError):  # renamed
            part.unlink()


def _refuse_other_files(output: Path) -> None:
    """Raises a TraceError if ``output`` is a file but no report: -o may name a trace by mistake."""
    with _explained(output, "read"):
        if not output.exists():
            return
        if not output.is_file():
            raise TraceError(f"{output} is no file, expected a place for a page; name another one with -o")
        with open(output, "rb") as file:
            beginning = file.read(len(_BEGINNING))
    if beginning not in (b"", _BEGINNING):
        raise TraceError(f"{output} exists and is no report; name another place with -o, or remove it")


@contextmanager
def _explained(output: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceError(f"{output} cannot be {done}: {error.strerror}; name another place with -o") from error


def _shown(value: object) -> object:
    """A value for the page. Only code is Markup, and stays as it is."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def render(runs: Sequence[Run], comparison: Comparison) -> str:
    series = read_series(runs)
    symbol, verdict_label = _VERDICTS[comparison.verdict]
    labels = ("A", "B")[: len(runs)] if len(runs) == 2 else ("",)
    findings = [*cause_table(comparison.causes), *operation_table(comparison.operations)]
    charts = draw_charts(series, labels)
    plots = [chart.plot for chart in charts if chart.plot is not None]
    script, divisions = components(plots) if plots else ("", ())  # a trace without any step has no chart
    remaining = iter(divisions)
    environment = environment_rows(runs, [calls.ends for calls in series.calls])
    template = jinja2.Environment(
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        page_tag=PAGE_TAG,
        title="Report: " + " against ".join(run.folder.name or str(run.folder) for run in runs),
        runs=[f"{label or 'trace'}: {run.folder}" for label, run in zip(labels, runs, strict=True)],
        verdict=comparison.verdict,
        verdict_label=f"{symbol} {verdict_label.upper()}",
        headline=comparison.headline.removeprefix(f"{verdict_label}: "),
        findings=findings,
        text="\n".join(lines(comparison)),
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
    steps = {int(step) for calls in series.calls for step in calls.steps}
    parameters = series.parameters.grid
    # Equal columns in all charts, unless rank 0 lacks steps of other ranks.
    grid = parameters if parameters.holds(steps) else Grid.of(steps)
    axis = Axis(min(parameters.left, grid.left), max(parameters.right, grid.right))
    return [
        *metric_charts(axis, series.metrics, series.calls, labels),
        parameter_chart(axis, series),
        local_norm_chart(axis, series.calls, labels),
        *(wait_chart(axis, calls, grid, label) for calls, label in zip(series.calls, labels, strict=True)),
        noise_scale_chart(axis, series.calls, labels),
        *logged_charts(axis, series.logged, labels),
    ]


def cause_table(causes: Sequence[Cause]) -> Iterator[Chart]:
    if not causes:
        return
    rows = [cause_parts(cause) for cause in causes[:MAX_LINES]]
    more = (f"{len(causes) - MAX_LINES} more rows are left out.",) if len(causes) > MAX_LINES else ()
    yield Chart("What differs around the training, and may explain it", more, table=(("what", "values"), *rows))


def operation_table(found: OperationFinding | None) -> Iterator[Chart]:
    if found is None or not found.rows:
        return
    captions = (
        f"{_MARK} The first difference: {'; '.join((found.summary, *found.details))}.",
        f"Meaning: {found.meaning}",
        *([f"Next: {found.next_step}."] if found.next_step else []),
        f"Numbers count the operations of the step, {found.counts[0]:,} {at(found.labels[0])}, {found.counts[1]:,} "
        f"{at(found.labels[1])}.{_consequences(found)}",
    )
    header = ("", *found.labels, "stage", "module", "operation", "comparison")
    yield Chart(f"Operations of step {found.step}{on_ranks(found)}", captions, table=(header, *map(_cells, found.rows)))


def _consequences(found: OperationFinding) -> str:
    """A sentence if operations after the first difference had other inputs; otherwise empty."""
    rest = [*dropwhile(lambda row: not row.is_first, found.rows)]
    if not any(row.result == "inputs differ" and not row.is_first for row in rest):
        return ""
    return " After the first difference, operations with other inputs follow from a difference before them."


def _cells(row: OperationRow) -> tuple[str, ...]:
    numbers = ("" if number is None else f"{number:,}" for number in row.numbers)
    return (_MARK if row.is_first else "", *numbers, row.stage, row.module, row.name, row.result)


@dataclass(frozen=True)
class Row:
    """One fact: a cell for each run, and a text if ranks or runs differ."""

    fact: str
    values: tuple[str, ...]
    differs: str


def environment_rows(runs: Sequence[Run], ends: Sequence[Sequence[str]]) -> list[Row]:
    """A row for every fact. ``ends``: for every run, the end of each rank's trace."""
    facts = [
        [_facts(environment, end) for environment, end in zip(run.environments, run_ends, strict=True)]
        for run, run_ends in zip(runs, ends, strict=True)
    ]
    names = dict.fromkeys(name for run in facts for rank in run for name in rank)
    return [_row(name, [[rank.get(name, MISSING) for rank in run] for run in facts]) for name in names]


def _facts(environment: Environment, end: str) -> dict[str, str]:
    return {
        "ranks": str(environment.world_size),
        "started": environment.started,
        "recorded": f"every {environment.every} steps" if environment.every > 1 else "every step",
        "first step": str(environment.first_step),
        "parameters": str(len(environment.parameters)),
        "layout": environment.layout,
        **environment.facts,
        "end of the trace": end,
    }


def _row(fact: str, runs: Sequence[Sequence[str]]) -> Row:
    differs = []
    if fact != "started":  # this always differs, and explains nothing
        if any(len(set(ranks)) > 1 for ranks in runs):
            differs.append("ranks differ")
        if len({tuple(dict.fromkeys(ranks)) for ranks in runs}) > 1:
            differs.append("runs differ")
    return Row(fact, tuple(_cell(ranks) for ranks in runs), ", ".join(differs))


def _cell(ranks: Sequence[str]) -> str:
    """The common value of all ranks, or every value with its ranks."""
    differences = compare_rows([{"": value} for value in ranks]).differences
    if not differences:
        return ranks[0]
    groups = differences[0].holders
    texts = [f"{name_ranks(which)}: {value}" for value, which in groups]
    return "; ".join(first_few(texts, _MAX_GROUPS, "{} more values"))

"""Charts of metrics and logged values, as read from traces."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.models import Line

from legacy_ddp.debug._page.chart import Axis, Chart
from legacy_ddp.debug._page.line_charts import MAX_CHARTS, logged_charts, metric_charts
from legacy_ddp.debug._page.page import draw, draw_charts
from legacy_ddp.debug._page.series import read_series
from legacy_ddp.debug._trace.records import CallFacts
from legacy_ddp.debug._trace.run import open_run
from tests.helpers.traces import call_facts, write_trace

AXIS = Axis.over(0.5, 6.5)
Logs = Callable[[int, int], dict[str, float | str]]


def _weighted(step: int, rank: int) -> CallFacts:
    return call_facts(step, rank, divisor=10 * step, metrics={"loss": 20.0 * step**2})


def _plain(step: int, rank: int) -> CallFacts:
    return call_facts(step, rank, sample_size=None, divisor=2, metrics={"loss": 20.0 * step**2})


def _charts(folder: Path, *runs: dict[str, Any]) -> tuple[list[Chart], list[Chart]]:
    """Charts of metrics, and of logged values."""
    labels = ("A", "B") if len(runs) == 2 else ("",)
    opened = [open_run(write_trace(folder / str(index), **run)) for index, run in enumerate(runs)]
    series = read_series(opened)
    titles = [chart.title for chart in draw_charts(series, labels)]
    metrics = [draw(AXIS, item, labels) for item in metric_charts(series.metrics, series.calls, labels)]
    logged = [draw(AXIS, item, labels) for item in logged_charts(series.logged, labels)]
    assert [chart.title for chart in (*metrics, *logged)] == [
        title for title in titles if title.startswith(("Metric", "Logged")) or " more " in title
    ]
    return metrics, logged


def _lines(chart: Chart) -> list[tuple[list[int], list[float]]]:
    assert chart.plot is not None
    found = [item.data_source.data for item in chart.plot.renderers if isinstance(item.glyph, Line)]
    return [(data["step"].tolist(), data["value"].tolist()) for data in found]


def test_a_weighted_metric_is_a_mean_per_item(tmp_path: Path) -> None:
    (chart,), _ = _charts(tmp_path, {"calls": _weighted})

    assert chart.title == "Metric 'loss': the sum over the ranks, divided by the sum of sample_size"
    assert _lines(chart) == [([1, 2, 3, 4, 5], [2.0, 4.0, 6.0, 8.0, 10.0])]


def test_a_plain_metric_is_the_sum(tmp_path: Path) -> None:
    (chart,), _ = _charts(tmp_path, {"calls": _plain})

    assert chart.title == "Metric 'loss': the sum over the ranks"
    assert _lines(chart) == [([1, 2, 3, 4, 5], [20.0, 80.0, 180.0, 320.0, 500.0])]


def test_two_runs_share_the_chart_of_a_metric(tmp_path: Path) -> None:
    def other(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, divisor=10 * step, metrics={"loss": 10.0 * step, "only": 30.0 * step})

    (loss, only), _ = _charts(tmp_path, {"calls": _weighted}, {"calls": other, "steps": 3})

    assert _lines(loss) == [([1, 2, 3, 4, 5], [2.0, 4.0, 6.0, 8.0, 10.0]), ([1, 2, 3], [1.0, 1.0, 1.0])]
    assert _lines(only) == [([1, 2, 3], [3.0, 3.0, 3.0])]
    assert loss.plot is not None
    assert [item.label.value for legend in loss.plot.legend for item in legend.items] == ["A", "B"]


def test_values_that_are_not_finite_are_gaps_and_told(tmp_path: Path) -> None:
    values = {1: 2.0, 2: nan, 3: inf, 4: 8.0, 5: -inf}

    def calls(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, divisor=0 if step == 4 else 2, metrics={"loss": values[step], "bad": nan})

    (loss, bad), _ = _charts(tmp_path, {"calls": calls})

    assert loss.captions == ("NaN or infinite in 3 of 5 steps, first in step 2: a gap.",)
    assert np.isnan(_lines(loss)[0][1]).tolist() == [False, True, True, True, True]
    assert bad.plot is None
    assert bad.captions[-1] == "Left out: no value is finite."


def test_every_rank_has_a_line_of_its_logged_values(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"lr": 1.0 / (1 + step) + rank} if step < 3 or rank else {}

    _, (chart,) = _charts(tmp_path, {"logs": logs, "steps": 3})

    assert chart.title == "Logged 'lr': each rank's own value"
    (steps, first), (_, second) = _lines(chart)
    assert steps == [0, 1, 2, 3]
    assert first[:3] == [1.0, 0.5, 1 / 3]
    assert np.isnan(first[3])
    assert second == [2.0, 1.5, 4 / 3, 1.25]


def test_many_ranks_are_a_band_of_logged_values(tmp_path: Path) -> None:
    _, (chart,) = _charts(tmp_path, {"logs": lambda step, rank: {"lr": 1.0 + step + rank}, "world_size": 13})

    assert "has 13 ranks: the band goes from the smallest value to the largest" in chart.captions[0]


def test_a_value_logged_in_one_run_alone_has_a_chart(tmp_path: Path) -> None:
    logs: Logs = lambda step, rank: {"lr": 1.0 + step + rank}  # noqa: E731

    _, (chart,) = _charts(tmp_path, {"logs": logs, "steps": 2}, {"steps": 2})

    assert [line for line in _lines(chart) if line[0]] == [([0, 1, 2], [1.0, 2.0, 3.0]), ([0, 1, 2], [2.0, 3.0, 4.0])]


def test_the_last_text_of_each_name_is_in_a_table(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        return {"file": f"shard {step}"} if step < 3 else {"file": "<own>"} if rank == 2 else {}

    _, (chart,) = _charts(tmp_path, {"logs": logs, "world_size": 3})

    assert chart.table == (
        ("name", "ranks", "step", "text"),
        ("file", "ranks 0-1", "2", "shard 2"),
        ("file", "rank 2", "5", "<own>"),
    )


@pytest.mark.parametrize("number", [MAX_CHARTS, MAX_CHARTS + 2])
def test_very_many_names_are_listed_and_not_drawn(tmp_path: Path, number: int) -> None:
    names = {f"m{index}": 1.0 for index in range(number)}

    def calls(step: int, rank: int) -> CallFacts:
        return call_facts(step, rank, metrics=names)

    metrics, logged = _charts(tmp_path, {"calls": calls, "logs": lambda *_: names})

    for charts, noun in ((metrics, "metrics"), (logged, "logged names")):
        assert sum(chart.plot is not None for chart in charts) == MAX_CHARTS
        left = [(chart.title, chart.captions) for chart in charts[MAX_CHARTS:]]
        assert left == [(f"2 more {noun}", ("Left out: 'm8', 'm9'.",))] * (number > MAX_CHARTS)


def test_a_run_without_metrics_has_no_chart_of_them(tmp_path: Path) -> None:
    assert _charts(tmp_path, {}) == ([], [])

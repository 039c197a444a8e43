"""Content of the charts in a written report: points of lines, cells of heat maps, and what down-sampling keeps."""

from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.models import Line, Scatter

from tests.helpers.report import LOCAL, NOISE, Shown, report, text_of, titled
from tests.helpers.traces import NAMES, Planted, call_facts, environment, without, write_trace

A, B, PARAMETER_A, PARAMETER_B = "gradient of 'a'", "gradient of 'b'", "parameter 'a'", "parameter 'b'"
OTHER = "ff" * 8
RANK_0, RANK_1 = "rank-00000.jsonl", "rank-00001.jsonl"


def _pages(folder: Path, *runs: dict[str, Any]) -> list[Shown]:
    """The report about runs with these contents."""
    return report(folder, *(write_trace(folder / "ab"[index], **run) for index, run in enumerate(runs)))


def _with_norms(norms: list[list[float]] | np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    """A run in which ranks (rows) have these norms in each step; NaN for a gradient that was not finite."""
    table = np.array(norms)

    def calls(step: int, rank: int) -> Any:
        norm = float(table[rank, step - 1])
        return call_facts(step, rank, local_norm=1.0 if np.isnan(norm) else norm, finite=not np.isnan(norm))

    return {"world_size": len(table), "steps": table.shape[1], "calls": calls, "names": {}, **more}


def _local(folder: Path, *runs: dict[str, Any]) -> Shown:
    return titled(_pages(folder, *runs), LOCAL)


def _map(folder: Path, *planted: Planted, **more: Any) -> Shown:
    """The heat map of parameters about runs with planted entries."""
    return _pages(folder, *({"planted": of_run, **more} for of_run in planted))[0]


def test_every_rank_has_a_line_in_the_colour_of_the_rank_and_the_dash_of_the_run(tmp_path: Path) -> None:
    chart = _local(tmp_path, _with_norms([[1.0, 2.0], [3.0, 4.0]]), _with_norms([[5.0, 6.0], [7.0, 8.0]]))
    lines = [line.glyph for line in chart.glyphs(Line)]

    assert chart.lines == [([1, 2], values) for values in ([1, 2], [3, 4], [5, 6], [7, 8])]
    assert [line.line_color for line in lines[:2]] == [line.line_color for line in lines[2:]]
    assert len({line.line_color for line in lines}) == 2
    assert [line.line_dash for line in lines] == [[], [], [6], [6]]
    assert chart.legend == ["rank 0", "rank 1"]


def test_a_gradient_that_was_not_finite_is_a_gap_and_a_cross_and_a_point_between_gaps_is_a_dot(tmp_path: Path) -> None:
    run = _with_norms([[1.0, nan, 3.0], [4.0, nan, nan]])
    chart = _local(tmp_path, run, run)

    assert np.array_equal([values for _, values in chart.lines], [[1, nan, 3], [4, nan, nan]] * 2, equal_nan=True)
    found = [item.data_source.data for item in chart.glyphs(Scatter)]
    dots = [(data["step"].tolist(), data["value"].tolist()) for data in found if "owner" not in data]
    assert dots == [([1, 3], [1.0, 3.0]), ([1], [4.0])] * 2
    crosses = [data for data in found if "owner" in data]
    assert [data["step"] for data in crosses] == [[2, 3]] * 2
    assert [data["value"] for data in crosses] == [[4.0, 4.0]] * 2
    assert [data["owner"] for data in crosses] == [["A, ranks 0-1", "A, rank 1"], ["B, ranks 0-1", "B, rank 1"]]
    assert chart.legend == ["rank 0", "rank 1", "NaN, inf"]


def test_a_long_line_keeps_smallest_and_largest_value_of_every_bin_and_crosses_are_counted(tmp_path: Path) -> None:
    norms = np.random.default_rng(0).uniform(50, 90, (2, 2001))
    norms[0, [3, 5, 900]] = nan
    charts = _pages(tmp_path, _with_norms(norms))
    chart = titled(charts, LOCAL)

    assert "Of every 3 recorded steps a line goes through the smallest and the largest value." in chart.captions
    assert "Each column stands for 6 steps and shows the longest wait." in titled(charts, "Who waited").captions
    for (steps, values), of_rank in zip(chart.lines, norms, strict=True):
        drawn = dict(zip(steps, values, strict=True))
        assert len(drawn) < 2001
        for first in range(0, 2001, 3):
            kept = [drawn[step] for step in range(first + 1, first + 4) if step in drawn]
            part = of_rank[first : first + 3]
            assert (min(kept), max(kept)) == (np.nanmin(part), np.nanmax(part))
    assert chart.glyphs(Scatter)[-1].data_source.data["steps"] == ["2 of 4 to 6", "901"]


def test_of_many_ranks_the_smallest_the_median_and_the_largest_are_lines_with_their_ranks(tmp_path: Path) -> None:
    norms = np.full((13, 4), 2.0)
    norms[4, :2], norms[5, :2], norms[:, 2], norms[7:9, 3] = 1.0, 9.0, nan, nan
    chart = _local(tmp_path, _with_norms(norms))

    assert chart.legend == ["largest", "median", "smallest", "NaN, inf"]
    values = [line[1] for line in chart.lines]
    assert np.array_equal(values, [[9, 9, nan, 2], [2, 2, nan, 2], [1, 1, nan, 2]], equal_nan=True)
    ranks = [item.data_source.data["rank"][:2].tolist() for item in chart.glyphs(Line)]
    assert (ranks[0], ranks[2]) == ([5, 5], [4, 4])
    assert [tool.tooltips[0][1] for tool in chart.hover[:2]] == ["largest: rank @rank", "median: rank @rank"]


def test_ranks_off_the_median_of_many_ranks_are_named(tmp_path: Path) -> None:
    norms = np.ones((13, 8))
    norms[3] = 1.4  # not enough
    norms[[4, 5, 6]] = np.array([[1.6], [0.1], [3.0]])
    norms[9, :3] = 100.0  # not in half of the steps
    norms[5, 0] = nan
    norms[:, 1] = nan

    captions = _local(tmp_path, _with_norms(norms), _with_norms(np.ones((13, 3)))).captions

    assert captions[1].startswith("A has 13 ranks: the pointer shows whose the smallest, the median and the largest")
    assert captions[1].endswith("by a factor of 1.5 in half of the steps: ranks 4-6.")
    assert captions[2].endswith("in half of the steps: none.")


def test_an_axis_is_logarithmic_where_a_linear_one_would_squeeze(tmp_path: Path) -> None:
    ends = {"narrow": (1.0, 19.0), "wide": (1.0, 21.0), "zero": (0.0, 21.0)}
    calls = lambda step, rank: call_facts(  # noqa: E731  # short, and used once
        step, rank, sample_size=None, metrics={name: pair[step - 1] for name, pair in ends.items()}
    )

    charts = _of_values(tmp_path, {"calls": calls, "steps": 2})

    scales = [type(chart.figure.y_scale).__name__ for chart in charts]
    assert scales == ["LinearScale", "LogScale", "LinearScale"]
    assert charts[0].title == "Metric 'narrow': the sum over the ranks"  # without sample_size
    assert charts[0].lines == [([1, 2], [1.0, 19.0])]


def _noisy(norms: np.ndarray[Any, Any], reduced: np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    planted = {
        (0, step + 1, "reduced_gradients", A): (f"{step:016x}", float(norm)) for step, norm in enumerate(reduced)
    }
    return {**_with_norms(norms), "names": {"reduced_gradients": (A,)}, "planted": planted, **more}


def test_the_noise_scale_averages_both_parts_before_it_divides(tmp_path: Path) -> None:
    norms = np.random.default_rng(0).uniform(50, 90, (3, 60))
    reduced = np.repeat([2.0, 0.9, 0.3], 20)  # less noise than none, some, and less signal than none
    chart = titled(_pages(tmp_path, _noisy(norms, reduced)), NOISE)

    ((steps, scales),) = chart.lines
    assert "both parts of the estimate over 10 recorded steps up to it" in chart.captions[0]
    assert chart.figure.yaxis[0].axis_label == "noise scale [items of sample_size]"
    assert steps == list(range(10, 61))
    # Of batches of 64 items, and of 192 together: McCandlish et al. (2018), appendix A.
    small, large = ((norms / 64) ** 2).mean(axis=0), reduced**2  # each rank's norm is that of a sum
    signals, noises = (192 * large - 64 * small) / 128, (small - large) / (1 / 64 - 1 / 192)
    for step, scale in zip(steps, scales, strict=True):
        signal, noise = signals[step - 10 : step].sum(), noises[step - 10 : step].sum()
        if signal > 0 and noise > 0:
            assert scale == pytest.approx(noise / signal, rel=1e-9)  # another order of operations
        else:
            assert np.isnan(scale)
    assert np.isnan([scales[0], scales[-1]]).all()
    assert not np.isnan(scales[20:25]).any()


def test_the_window_of_the_noise_scale_grows_with_the_run(tmp_path: Path) -> None:
    runs = [_noisy(np.full((2, steps), 2.0), np.full(steps, 1.5)) for steps in (3, 400)]

    caption = titled(_pages(tmp_path, *runs), NOISE).captions[0]
    assert "over 3 recorded steps (A), 20 recorded steps (B) up to it" in caption


def test_a_rank_that_took_no_part_has_a_gap_and_steps_of_unknown_noise_are_left_out(tmp_path: Path) -> None:
    def calls(step: int, rank: int) -> Any:
        sits_out = rank == 2 or (rank, step) == (1, 1)  # in step 1 a single rank takes part
        return call_facts(
            step,
            rank,
            sample_size=None,
            took_part=not sits_out,
            local_norm=None if sits_out or (rank, step) == (0, 2) else 2.0,
            finite=None if sits_out else (rank, step) != (0, 4),
        )

    run = _noisy(np.ones((3, 5)), np.array([1.5, 1.5, nan, 1.5, 1.5]), calls=calls)
    run["planted"][0, 3, "reduced_gradients", A] = (OTHER, 1.0, 1)
    charts = _pages(tmp_path, run)
    chart, local = titled(charts, NOISE), [values for _, values in titled(charts, LOCAL).lines]

    assert np.isnan(local).tolist() == [[at in gone for at in range(1, 6)] for gone in ((2, 4), (1,), range(1, 6))]
    assert chart.lines[0][0] == [5]
    assert chart.figure.yaxis[0].axis_label == "noise scale [contributions of a rank]"


def _waits(waited: list[list[float]]) -> dict[str, Any]:
    """A run in which ranks (rows) waited these seconds in each step."""
    calls = lambda step, rank: call_facts(step, rank, seconds_waited=waited[rank][step - 1])  # noqa: E731
    return {"world_size": len(waited), "steps": len(waited[0]), "calls": calls, "names": {}}


def test_the_rank_that_waited_least_was_waited_for_and_the_one_that_cost_most_is_the_first(tmp_path: Path) -> None:
    waited = [[0.5, 0.0, 0.3, 0.125, 0.125], [0.0, 0.0, 0.0, 0.5, 0.1875], [0.25, 0.0, 0.25, 0.25, 0.1875]]
    run = write_trace(tmp_path / "a", **_waits(waited), end=None)
    without(run / RANK_0, lambda line: b'"line":"call"' in line and b'"step":3' in line)
    chart = titled(report(tmp_path, run), "Who waited")

    assert chart.columns == ["1, waiting for rank 1", "2", "3", "4, waiting for rank 0", "5, waiting for rank 0"]
    assert np.array_equal(chart.values[0], [0.5, 0.0, nan, 0.125, 0.125], equal_nan=True)
    assert chart.labels[0] == ["", "did not wait", "not recorded", "", ""]
    assert chart.table[1:] == [("rank 1", "1 of 5", "0.375", "0.375"), ("rank 0", "2 of 5", "0.156", "0.312")]


def test_a_column_names_the_rank_that_was_waited_for_most_often_in_it(tmp_path: Path) -> None:
    steps = [[0.0, 0.5, 0.5], [0.5, 0.0, 0.0], [0.5] * 3]
    waited = [of_rank * 267 for of_rank in steps]  # 801 steps in columns of three
    chart = titled(_pages(tmp_path, _waits(waited)), "Who waited")

    assert chart.columns[:2] == [f"{span}, waiting for rank 1 in 2 of 3 steps" for span in ("1 to 3", "4 to 6")]
    assert len(chart.columns) == 267


def test_a_run_shows_norms_of_reduced_gradients_elements_not_finite_and_where_ranks_differ(tmp_path: Path) -> None:
    planted = {
        **{(rank, 2, "reduced_gradients", A): ("aa" * 8, 7.5, 3) for rank in range(3)},
        **{(rank, 3, "reduced_gradients", B): (None, None) for rank in range(3)},
        (1, 3, "reduced_gradients", A): (OTHER, 1.0),
        (1, 4, "parameters", PARAMETER_B): (OTHER, 1.0, 9),
        (1, 0, "parameters", PARAMETER_A): (OTHER, 1.0),
        (2, 4, "optimizer", "exp_avg of 'a'"): (OTHER, 1.0),  # is not shown
    }
    chart = _map(tmp_path, planted, world_size=3)

    assert chart.rows == ["'a'", "'b'"]
    assert chart.cell("'a'", "2") == (7.5, "NaN or infinity, 3")
    assert chart.cell("'b'", "2") == (2.25, "")
    assert chart.cell("'b'", "3")[1] == chart.cell("'b'", "start")[1] == "no gradient"
    assert chart.cells_with("ranks differ") == {("'a'", "start"), ("'a'", "3"), ("'b'", "4")}
    assert chart.cell("'b'", "4")[1] == "ranks differ, 9"
    assert chart.cells_with(", ") == {("'a'", "2"), ("'b'", "4")}


def test_the_distance_of_two_runs_is_that_of_norms_over_the_larger_one(tmp_path: Path) -> None:
    a = {
        (0, 2, "reduced_gradients", A): (OTHER, 5.0),  # 1.25 in the other run
        (0, 4, "reduced_gradients", B): (None, None),
        **{(rank, 2, "reduced_gradients", B): (None, None) for rank in (0, 1)},  # neither run has it
        # Rank 1 differs alone, or by more than rank 0, which is looked at first.
        (1, 1, "reduced_gradients", A): (OTHER, 4.5),  # 1.125 in the other run
        (0, 8, "reduced_gradients", A): ("ee" * 8, 3.0),  # 2 in the other run
        (1, 8, "reduced_gradients", A): (OTHER, 8.0),
    }
    b = {
        **{(rank, 2, "reduced_gradients", B): (None, None) for rank in (0, 1)},
        (0, 3, "parameters", PARAMETER_B): (OTHER, 2.375),  # the same norm
        (0, 3, "reduced_gradients", A): (OTHER, 5.5),  # 1.375 in the other run
        (0, 5, "reduced_gradients", B): (OTHER, 0.0),
        # The larger of two differences, of gradient and parameter, is shown.
        (0, 6, "reduced_gradients", A): (OTHER, 3.5),  # 1.75
        (0, 6, "parameters", PARAMETER_A): (OTHER, 7.0),
        (0, 7, "reduced_gradients", A): (OTHER, 7.5),  # 1.875
        (0, 7, "parameters", PARAMETER_A): (OTHER, 3.75),
    }
    chart = _map(tmp_path, a, b, steps=8)

    assert chart.cell("'a'", "start") == chart.cell("'a'", "5") == (0.0, "equal bits")
    assert [chart.cell("'a'", step) for step in "123678"] == [(0.75, "bits differ")] * 6
    assert chart.cell("'b'", "2") == (0.0, "equal bits")
    assert chart.cell("'b'", "3") == (0.0, "norms equal, bits differ")
    assert chart.cell("'b'", "4") == chart.cell("'b'", "5") == (1.0, "bits differ")
    assert len(chart.cells_with("bits differ")) == 9


def test_runs_of_other_sizes_are_compared_on_rank_0(tmp_path: Path) -> None:
    planted = {(1, 2, "reduced_gradients", A): (OTHER, 5.0), (2, 3, "reduced_gradients", A): (OTHER, 5.0)}
    charts = _pages(tmp_path, {}, {"planted": planted, "world_size": 3})

    assert "Only rank 0 of both is compared." in charts[0].captions
    assert not charts[0].cells_with("bits differ")
    assert [len(titled(charts, f"Who waited for whom: {run}").rows) for run in "AB"] == [2, 3]


def test_steps_and_parameters_that_only_one_run_has_are_no_difference_but_a_gap(tmp_path: Path) -> None:
    names = {**NAMES, "reduced_gradients": (A, B, "gradient of 'c'"), "parameters": ()}
    chart = _pages(tmp_path, {"steps": 3}, {"names": names, "steps": 5})[0]

    assert chart.rows == ["'a'", "'b'", "'c'"]
    assert all(row[0] == row[4] == row[5] == "not in both runs" for row in chart.labels)
    assert chart.cell("'a'", "2") == (0.0, "equal bits")
    assert chart.cell("'c'", "2") == (1.0, "bits differ")


def test_the_start_of_a_run_that_goes_on_is_no_step_of_its_own(tmp_path: Path) -> None:
    later = {"environments": lambda rank, size: environment(rank, size, first_step=4)}
    chart = _pages(tmp_path / "both", {"steps": 6}, {"steps": 3, **later})[0]

    assert chart.columns == ["start", "1", "2", "3", "4", "5", "6"]
    assert (chart.values[:, 3] == 0).all()  # what both hold after step 3
    assert np.isnan(chart.values[:, :3]).all()
    without_start = _pages(tmp_path / "later", {"steps": 4, "start": ()}, {"steps": 1, **later})[0]
    assert without_start.columns == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "names, steps, caption",
    [
        (2, 401, "Each column stands for 2 steps and shows the largest value among them"),
        (501, 3, "Each row stands for 2 parameters in the same way."),
    ],
)
def test_cells_that_share_a_place_show_the_largest_and_whatever_stands_out(
    tmp_path: Path, names: int, steps: int, caption: str
) -> None:
    listed = {"reduced_gradients": tuple(f"gradient of 'p{index}'" for index in range(names))}
    not_finite = {("p1", 1): (2.0, 7), ("p0", 2): (2.0, 7), ("p1", 2): (1e6, 4)}
    planted: dict[Any, Any] = {
        (rank, step, "reduced_gradients", f"gradient of {name!r}"): ("ee" * 8, norm, number)
        for (name, step), (norm, number) in not_finite.items()
        for rank in (0, 1)
    }
    planted[1, 3, "reduced_gradients", "gradient of 'p0'"] = (OTHER, 1.0)
    chart = _map(tmp_path, planted, names=listed, steps=steps, start=())
    row = chart.rows[1] if names == 2 else "'p0' to 'p1' (2 parameters)"
    columns = [next(name for name in chart.columns if name.startswith(starts)) for starts in (("2", "1 to 2"), ("3",))]

    assert chart.cell(row, columns[0]) == (1e6, "NaN or infinity, up to 7")
    assert chart.cells_with("ranks differ") == {(chart.rows[0], columns[1])}
    assert next(text for text in chart.captions if "stands for" in text).startswith(caption)


def test_the_start_has_a_place_of_its_own_before_steps_that_are_far_apart(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "a", steps=21, world_size=1)
    without(run / RANK_0, lambda line: any(b'"step":%d,' % step in line for step in {*range(2, 21)} - {11}))
    chart, *_ = report(tmp_path, run)

    assert chart.columns == ["start", "1", "11", "21"]
    assert "Each column stands for a recorded step, every 10." in chart.captions


def test_a_rank_that_ended_early_leaves_a_gap_and_the_end_of_each_file_is_told(tmp_path: Path) -> None:
    early, damaged = write_trace(tmp_path / "a", steps=3, end=None), write_trace(tmp_path / "b")
    lines = (early / RANK_1).read_bytes().splitlines(keepends=True)
    last_call = max(number for number, line in enumerate(lines) if b'"line":"call"' in line)
    (early / RANK_1).write_bytes(b"".join(lines[:last_call]) + lines[last_call][:20])
    (damaged / RANK_0).write_bytes((damaged / RANK_0).read_bytes().replace(b'"line":"end"', b'"line":"eng"'))
    chart = titled(report(tmp_path, early, damaged), "Who waited for whom: A")

    assert np.isnan(chart.values).tolist() == [[True, *[False] * 3, True, True], [True, *[False] * 2, *[True] * 3]]
    text = text_of(tmp_path / "report.html")
    assert "rank 0: no last line: killed, still running, or recorder stopped; rank 1: last line torn: killed" in text
    assert "rank 0: damaged: line " in text
    assert "rank 1: closed" in text


def _of_values(folder: Path, *runs: dict[str, Any]) -> list[Shown]:
    """The charts of metrics and of logged values."""
    found = _pages(folder, *runs)
    return [chart for chart in found if chart.title.startswith(("Metric", "Logged")) or " more " in chart.title]


def test_two_runs_share_the_chart_of_a_metric_which_is_a_mean_per_item(tmp_path: Path) -> None:
    def weighted(step: int, rank: int) -> Any:
        return call_facts(step, rank, divisor=10 * step, metrics={"loss": 20.0 * step**2})

    def other(step: int, rank: int) -> Any:
        return call_facts(step, rank, divisor=10 * step, metrics={"loss": 10.0 * step, "only": 30.0 * step})

    loss, only = _of_values(tmp_path, {"calls": weighted}, {"calls": other, "steps": 3})

    assert loss.title == "Metric 'loss': the sum over the ranks, divided by the sum of sample_size"
    assert loss.lines == [([1, 2, 3, 4, 5], [2.0, 4.0, 6.0, 8.0, 10.0]), ([1, 2, 3], [1.0, 1.0, 1.0])]
    assert only.lines == [([1, 2, 3], [3.0, 3.0, 3.0])]
    assert loss.legend == ["A", "B"]


def test_values_that_are_not_finite_are_gaps_and_told(tmp_path: Path) -> None:
    values = {1: 2.0, 2: nan, 3: inf, 4: 8.0, 5: -inf}

    def calls(step: int, rank: int) -> Any:
        return call_facts(step, rank, divisor=0 if step == 4 else 2, metrics={"loss": values[step], "bad": nan})

    loss, bad = _of_values(tmp_path, {"calls": calls})

    assert loss.captions == ["NaN or infinite in 3 of 5 steps, first in step 2: a gap."]
    assert np.isnan(loss.lines[0][1]).tolist() == [False, True, True, True, True]
    assert bad.figure is None
    assert bad.captions[-1] == "Left out: no value is finite."


def test_every_rank_has_a_line_of_its_logged_values_and_the_last_text_of_a_name_is_in_a_table(tmp_path: Path) -> None:
    def logs(step: int, rank: int) -> dict[str, float | str]:
        if step < 3:
            return {"lr": 1.0 / (1 + step) + rank, "file": f"shard {step}"}
        return {"lr": 1.25, "file": "<own>"} if rank else {}

    lr, texts = _of_values(tmp_path, {"logs": logs, "steps": 3})

    assert lr.title == "Logged 'lr': each rank's own value"
    (steps, first), (_, second) = lr.lines
    assert steps == [0, 1, 2, 3]
    assert np.array_equal(first, [1.0, 0.5, 1 / 3, nan], equal_nan=True)
    assert second == [2.0, 1.5, 4 / 3, 1.25]
    held = [("file", "rank 0", "2", "shard 2"), ("file", "rank 1", "3", "<own>")]
    assert texts.table == [("name", "ranks", "step", "text"), *held]


def test_a_value_logged_in_one_run_alone_has_a_chart(tmp_path: Path) -> None:
    logs = lambda step, rank: {"lr": 1.0 + step + rank}  # noqa: E731  # short, and used once

    (chart,) = _of_values(tmp_path, {"logs": logs, "steps": 2}, {"steps": 2})

    assert [line for line in chart.lines if line[0]] == [([0, 1, 2], [1.0, 2.0, 3.0]), ([0, 1, 2], [2.0, 3.0, 4.0])]


def test_very_many_names_are_listed_and_not_drawn(tmp_path: Path) -> None:
    names = {f"m{index}": 1.0 for index in range(10)}
    run = {"calls": lambda step, rank: call_facts(step, rank, metrics=names), "logs": lambda *_: names}

    found = _of_values(tmp_path, run)

    assert sum(chart.figure is not None for chart in found) == 16
    left = [(chart.title, chart.captions) for chart in found if chart.figure is None]
    assert left == [(f"2 more {noun}", ["Left out: 'm8', 'm9'."]) for noun in ("metrics", "logged names")]

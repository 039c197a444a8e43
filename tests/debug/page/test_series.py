"""Data of a page as read from traces, and statistics over calls."""

from collections.abc import Callable
from dataclasses import replace
from math import hypot, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legacy_ddp._errors import TraceError
from legacy_ddp._statistics import estimate_noise
from legacy_ddp.debug._page.calls import (
    NO_RANK,
    CallTable,
    Straggler,
    missing_noise_reason,
    noise_scales,
    noise_window,
    outliers,
    stragglers,
    stragglers_by_step,
)
from legacy_ddp.debug._page.chart import MAX_ROWS
from legacy_ddp.debug._page.series import ParameterCells, read_series
from legacy_ddp.debug._trace.records import CallFacts
from legacy_ddp.debug._trace.run import Run, open_run
from tests.helpers.call_tables import make_call_table
from tests.helpers.traces import NAMES, Planted, call_facts, environment, write_trace

A, B = "gradient of 'a'", "gradient of 'b'"
OTHER = "ff" * 8


def _run(folder: Path, planted: Planted | None = None, **more: Any) -> Run:
    return open_run(write_trace(folder, planted=planted, **more))


def _cell(parameters: ParameterCells, name: str, step: int) -> tuple[float, int, bool]:
    row, column = parameters.names.index(name) // parameters.cells.rows.size, parameters.grid.column(step)
    cells = parameters.cells
    return float(cells.largest[row, column]), int(cells.nonfinite[row, column]), bool(cells.differs[row, column])


def _differing(parameters: ParameterCells) -> set[tuple[str, int]]:
    """Names and columns, which are steps in a short trace that begins at step 1."""
    return {(parameters.names[row], int(column)) for row, column in np.argwhere(parameters.cells.differs)}


def test_a_whole_gradient_whose_norm_no_float64_holds_has_none(tmp_path: Path) -> None:
    planted = {(0, 2, "reduced_gradients", name): (OTHER, 1.7e308) for name in (A, B)}
    (calls,) = read_series([_run(tmp_path / "a", planted, world_size=1, steps=3)]).calls

    assert np.isnan(calls.reduced_norms).tolist() == [False, True, False]


def test_a_run_shows_the_norms_of_its_reduced_gradients(tmp_path: Path) -> None:
    planted = {(0, 2, "reduced_gradients", A): ("aa" * 8, 7.5), (0, 3, "reduced_gradients", B): (None, None)}
    parameters = read_series([_run(tmp_path / "a", planted, world_size=1)]).parameters

    assert parameters.names == ("'a'", "'b'")
    assert _cell(parameters, "'a'", 2) == (7.5, 0, False)
    assert _cell(parameters, "'b'", 2) == (2.25, 0, False)
    assert np.isnan(_cell(parameters, "'b'", 3)[0])  # no gradient
    assert np.isnan(parameters.cells.largest[:, 0]).all()  # the start has none


def test_elements_that_are_not_finite_are_counted_on_every_rank_that_differs(tmp_path: Path) -> None:
    planted = {
        (0, 2, "reduced_gradients", A): ("aa" * 8, 1.0, 3),
        (1, 2, "reduced_gradients", A): ("aa" * 8, 1.0, 3),
        (1, 4, "parameters", "parameter 'b'"): (OTHER, 1.0, 9),
    }
    series = read_series([_run(tmp_path / "a", planted)])
    parameters = series.parameters

    assert np.isnan(series.calls[0].reduced_norms).tolist() == [False, True, False, False, False]
    assert _cell(parameters, "'a'", 2) == (1.0, 3, False)
    assert _cell(parameters, "'b'", 4)[1:] == (9, True)
    assert np.count_nonzero(parameters.cells.nonfinite) == 2


@pytest.mark.parametrize("rank", [1, 2])
def test_a_run_marks_where_ranks_hold_other_gradients_or_parameters(tmp_path: Path, rank: int) -> None:
    planted = {
        (rank, 2, "reduced_gradients", A): (OTHER, 1.0),
        (rank, 3, "parameters", "parameter 'b'"): (OTHER, 2.375),
        (rank, 0, "parameters", "parameter 'a'"): (OTHER, 1.0),
        (rank, 4, "optimizer", "exp_avg of 'a'"): (OTHER, 1.0),  # is not shown
    }
    parameters = read_series([_run(tmp_path / "a", planted, world_size=3)]).parameters

    assert _differing(parameters) == {("'a'", 2), ("'b'", 3), ("'a'", 0)}


def test_local_gradients_are_no_difference(tmp_path: Path) -> None:
    assert not _differing(read_series([_run(tmp_path / "a")]).parameters)


def test_two_equal_runs_are_at_distance_0_wherever_they_hold_something(tmp_path: Path) -> None:
    parameters = read_series([_run(tmp_path / "a"), _run(tmp_path / "b")]).parameters

    assert (parameters.cells.largest == 0).all()  # at the start, too: there are parameters
    assert not parameters.cells.differs.any()


def test_the_distance_of_two_runs_is_that_of_norms_over_the_larger_one(tmp_path: Path) -> None:
    planted = {
        (0, 2, "reduced_gradients", A): (OTHER, 5.0),  # 1.25 in the other run
        (0, 3, "parameters", "parameter 'b'"): (OTHER, 2.375),  # the same norm
        (0, 4, "reduced_gradients", B): (None, None),
        (0, 5, "reduced_gradients", B): (OTHER, 0.0),
    }
    runs = [_run(tmp_path / "a", world_size=1), _run(tmp_path / "b", planted, world_size=1)]

    for pair in (runs, runs[::-1]):
        parameters = read_series(pair).parameters
        assert _cell(parameters, "'a'", 2) == (0.75, 0, True)
        assert _cell(parameters, "'b'", 3) == (0.0, 0, True)
        assert _cell(parameters, "'b'", 4) == (1.0, 0, True)
        assert _cell(parameters, "'b'", 5) == (1.0, 0, True)
        assert len(_differing(parameters)) == 4


def test_what_neither_run_has_is_equal_whatever_else_differs(tmp_path: Path) -> None:
    lacking = {(0, step, "reduced_gradients", A): (None, None) for step in (2, 3)}
    planted = {**lacking, (0, 3, "reduced_gradients", B): (OTHER, 1.0)}
    names = {"reduced_gradients": (A, B)}
    runs = [_run(tmp_path / "a", lacking, names=names, world_size=1)]
    runs += [_run(tmp_path / "b", planted, names=names, world_size=1)]
    parameters = read_series(runs).parameters

    assert _cell(parameters, "'a'", 2) == _cell(parameters, "'a'", 3) == (0.0, 0, False)
    assert _differing(parameters) == {("'b'", 2)}  # steps begin at 1 here: there was nothing at the start


def test_a_cell_is_the_larger_difference_of_gradient_and_parameter(tmp_path: Path) -> None:
    planted = {
        (0, 2, "reduced_gradients", A): (OTHER, 2.5),
        (0, 2, "parameters", "parameter 'a'"): (OTHER, 5.0),
        (0, 3, "reduced_gradients", A): (OTHER, 5.5),
        (0, 3, "parameters", "parameter 'a'"): (OTHER, 2.75),
    }
    parameters = read_series(
        [_run(tmp_path / "a", world_size=1), _run(tmp_path / "b", planted, world_size=1)]
    ).parameters

    assert (_cell(parameters, "'a'", 2)[0], _cell(parameters, "'a'", 3)[0]) == (0.75, 0.75)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_difference_of_two_runs_on_any_rank_shows(tmp_path: Path, everywhere: bool) -> None:
    planted: Planted = {(1, 2, "reduced_gradients", A): (OTHER, 5.0)}
    if everywhere:  # rank 1 differs by more than rank 0, which was looked at first
        planted = {**planted, (0, 2, "reduced_gradients", A): ("ee" * 8, 2.5)}
    series = read_series([_run(tmp_path / "a"), _run(tmp_path / "b", planted)])

    assert _differing(series.parameters) == {("'a'", 2)}
    assert _cell(series.parameters, "'a'", 2)[0] == 0.75
    assert series.every_rank


def test_runs_of_other_sizes_are_compared_on_rank_0(tmp_path: Path) -> None:
    planted = {(1, 2, "reduced_gradients", A): (OTHER, 5.0), (2, 3, "reduced_gradients", A): (OTHER, 5.0)}
    series = read_series([_run(tmp_path / "a"), _run(tmp_path / "b", planted, world_size=3)])

    assert not series.every_rank
    assert not series.parameters.cells.differs.any()
    assert [calls.world_size for calls in series.calls] == [2, 3]


def test_steps_and_parameters_that_only_one_run_has_are_no_difference_but_a_gap(tmp_path: Path) -> None:
    names = {**NAMES, "reduced_gradients": (A, B, "gradient of 'c'"), "parameters": ()}
    runs = [_run(tmp_path / "a", steps=3), _run(tmp_path / "b", names=names, steps=5)]
    parameters = read_series(runs).parameters

    assert parameters.names == ("'a'", "'b'", "'c'")
    assert np.isnan(parameters.cells.largest[:, 4:]).all()
    assert np.isnan(parameters.cells.largest[:, 0]).all()  # parameters are in one of them
    assert _cell(parameters, "'a'", 2) == (0.0, 0, False)
    assert _cell(parameters, "'c'", 2) == (1.0, 0, True)  # held there, and not here


def test_more_parameters_than_rows_share_rows(tmp_path: Path) -> None:
    count = MAX_ROWS + 1
    names = {"reduced_gradients": tuple(f"gradient of 'p{index}'" for index in range(count))}
    planted = {(1, 2, "reduced_gradients", "gradient of 'p7'"): (OTHER, 1e6, 4)}
    parameters = read_series([_run(tmp_path / "a", planted, names=names, steps=3)]).parameters

    assert parameters.cells.rows.size == 2
    assert parameters.cells.largest[3, parameters.grid.column(2)] == 1.0 + 7 + 2 / 8
    assert np.argwhere(parameters.cells.differs).tolist() == [[3, parameters.grid.column(2)]]
    assert parameters.cells.nonfinite[3, parameters.grid.column(2)] == 4


def test_the_calls_of_all_ranks_come_in_one_table(tmp_path: Path) -> None:
    def calls(step: int, rank: int) -> CallFacts:
        facts = call_facts(step, rank)
        if (step, rank) == (2, 1):
            return replace(facts, took_part=False, local_norm=None, sample_size=0, finite=None)
        if (step, rank) == (3, 0):
            return replace(facts, finite=False, local_norm=4.0)
        return facts

    (found,) = read_series([_run(tmp_path / "a", calls=calls, steps=3)]).calls

    assert found.steps.tolist() == [1, 2, 3]
    assert np.array_equal(found.local_norms, [[1.125, 1.25, nan], [2.125, nan, 2.375]], equal_nan=True)
    assert found.damaged.tolist() == [[False, False, True], [False, False, False]]
    assert found.waited.tolist() == [[0.0] * 3, [0.01] * 3]
    assert found.sizes.tolist() == [[64.0] * 3, [64.0, 0.0, 64.0]]
    assert found.reduced_norms.tolist() == [hypot(1 + step / 8, 2 + step / 8) for step in (1, 2, 3)]
    assert found.counted


def test_a_plain_call_is_one_item_of_every_rank(tmp_path: Path) -> None:
    calls = lambda step, rank: call_facts(step, rank, sample_size=None)  # noqa: E731  # short, and used once
    (found,) = read_series([_run(tmp_path / "a", calls=calls)]).calls

    assert (found.sizes == 1).all()
    assert not found.counted


def test_a_rank_that_ended_early_leaves_a_gap_and_its_end_is_known(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", steps=3, end=None)
    lines = run.paths[1].read_bytes().splitlines(keepends=True)
    last_call = max(number for number, line in enumerate(lines) if b'"line":"call"' in line)
    run.paths[1].write_bytes(b"".join(lines[:last_call]) + lines[last_call][:20])
    (found,) = read_series([run]).calls

    assert np.isnan(found.waited).tolist() == [[False] * 3, [False, False, True]]
    assert found.ends == (
        "no last line: killed, still running, or recorder stopped",
        "last line torn: killed while it wrote",
    )


def test_a_damaged_file_differs_from_one_that_ended_in_order(tmp_path: Path) -> None:
    run = _run(tmp_path / "a")
    run.paths[0].write_bytes(run.paths[0].read_bytes().replace(b'"line":"end"', b'"line":"eng"'))
    (found,) = read_series([run]).calls

    assert found.ends[0].startswith("damaged: line ")
    assert found.ends[1] == "closed"


def test_every_file_is_read_once_and_its_bytes_are_reported(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", world_size=3), _run(tmp_path / "b")]
    progress: list[int] = []

    read_series(runs, progress.append)

    assert sum(progress) == sum(run.size_bytes for run in runs)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    run = _run(tmp_path / "a")
    run.paths[1].unlink()

    with pytest.raises(TraceError, match=r"rank-00001\.jsonl cannot be read"):
        read_series([run])


def test_the_noise_scale_averages_both_parts_before_it_divides() -> None:
    rng = np.random.default_rng(0)
    norms = rng.uniform(50, 90, (3, 60))
    reduced = np.repeat([2.0, 0.9, 0.3], 20)  # less noise than none, some, and less signal than none
    calls = make_call_table(norms, reduced.tolist(), sizes=64.0)

    steps, scales, window = noise_scales(calls)

    assert window == 10
    assert steps.tolist() == list(range(10, 61))
    parts = [estimate_noise(norms[:, step].tolist(), [64] * 3, reduced[step]) for step in range(60)]
    for step, scale in zip(steps, scales, strict=True):
        taken = parts[step - 10 : step]
        signal, noise = sum(part.squared_norm for part in taken), sum(part.noise for part in taken)
        if signal > 0 and noise > 0:
            assert scale == pytest.approx(noise / signal, rel=1e-12)  # another order of summation
        else:
            assert np.isnan(scale)
    assert np.isnan(scales[[0, -1]]).all()
    assert not np.isnan(scales[20:25]).any()


@pytest.mark.parametrize("steps, window", [(0, 0), (3, 3), (10, 10), (199, 10), (400, 20), (10_000, 200)])
def test_the_window_grows_with_the_run(steps: int, window: int) -> None:
    assert noise_window(steps) == window


def test_steps_in_which_the_noise_is_unknown_are_left_out() -> None:
    calls = make_call_table([[2.0] * 5, [2.0] * 5, [9.0] * 5], [1.5, 1.5, nan, 1.5, 1.5])
    calls.sizes[2] = 0.0  # sits out
    calls.sizes[1, 0] = 0.0  # one rank is left
    calls.local_norms[0, 1] = nan
    calls.damaged[0, 3] = True

    steps, _, window = noise_scales(calls)

    assert (steps.tolist(), window) == ([5], 1)


def _lonely() -> CallTable:
    return make_call_table([[2.0, 2.0]], [1.0, 1.0])


def _without_norms() -> CallTable:
    return make_call_table([[nan, nan]] * 2, [1.0, 1.0])


@pytest.mark.parametrize("make, why", [(_lonely, "only one"), (_without_norms, "in no step")])
def test_a_missing_noise_scale_has_a_reason(make: Callable[[], CallTable], why: str) -> None:
    assert why in missing_noise_reason(make())
    assert not len(noise_scales(make())[0])
    assert not missing_noise_reason(make_call_table([[2.0], [3.0]], [1.0]))


def test_the_rank_that_waited_least_was_waited_for() -> None:
    waited = np.array([[0.5, 0.0, nan, 0.125], [0.0, 0.0, 0.0, 0.5], [0.25, 0.0, 0.25, 0.25]])

    ranks, seconds = stragglers_by_step(waited)

    assert ranks.tolist() == [1, NO_RANK, NO_RANK, 0]
    assert np.array_equal(seconds, [0.375, nan, nan, 0.25], equal_nan=True)
    assert stragglers(waited) == [Straggler(1, 1, 0.375, 0.375), Straggler(0, 1, 0.25, 0.25)]


def test_the_rank_that_cost_most_is_named_before_one_that_was_last_more_often() -> None:
    waited = np.array([[0.0, 0.0, 5.0, 0.0], [0.25, 0.75, 0.0, 0.5]])

    assert stragglers(waited) == [Straggler(1, 1, 5.0, 5.0), Straggler(0, 3, 0.5, 1.5)]


def test_ranks_off_the_median_are_outliers_the_furthest_first_and_four_at_most() -> None:
    norms = np.ones((20, 8))
    norms[3] = 1.4  # not enough
    norms[[4, 5, 6, 7, 8]] = np.array([[1.6], [0.1], [3.0], [2.0], [1.7]])
    norms[9, :3] = 100.0  # not in half of the steps
    norms[5, 0] = nan
    norms[:, 1] = nan

    assert outliers(norms) == [5, 6, 7, 8]
    assert outliers(np.ones((20, 3))) == []
    assert outliers(np.full((20, 3), nan)) == []


def test_the_start_of_a_run_that_goes_on_is_no_step_of_its_own(tmp_path: Path) -> None:
    environments = lambda rank, size: environment(rank, size, first_step=4)  # noqa: E731  # short, and used once
    runs = [_run(tmp_path / "a", steps=6), _run(tmp_path / "b", steps=3, environments=environments)]
    parameters = read_series(runs).parameters

    assert (parameters.grid.first, parameters.grid.stride, parameters.grid.count) == (0, 1, 7)
    assert (parameters.cells.largest[:, 3] == 0).all()  # what both hold after step 3
    assert np.isnan(parameters.cells.largest[:, :3]).all()

"""Down-sampling keeps extreme values, for all sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp.debug._page.chart import Bins, Cells, Grid, extremes

VALUES = st.one_of(st.just(float("nan")), st.floats(min_value=0, max_value=1e30))


@given(st.integers(0, 5000), st.integers(1, 500))
def test_bins_hold_everything_once_and_are_no_more_than_allowed(total: int, most: int) -> None:
    bins = Bins.at_most(total, most)
    spans = [bins.span(number) for number in range(bins.count)]

    assert bins.count <= most
    assert [item for first, last in spans for item in range(first, last + 1)] == list(range(total))
    assert bins.starts.tolist() == [first for first, _ in spans]
    assert total > most or bins.size == 1


@given(st.data(), st.integers(1, 25), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_every_cell_keeps_the_largest_value_and_whatever_stands_out(
    data: st.DataObject, items: int, steps: int, most_rows: int, most_columns: int
) -> None:
    rows, columns = Bins.at_most(items, most_rows), Bins.at_most(steps, most_columns)
    cells = Cells(rows, columns.count)
    values = [[data.draw(VALUES) for _ in range(items)] for _ in range(steps)]
    places = st.tuples(st.integers(0, steps - 1), st.integers(0, items - 1))
    counts = data.draw(st.dictionaries(places, st.integers(1, 10**6), max_size=5))
    differing = data.draw(st.sets(places, max_size=5))

    for step in range(steps):
        column = step // columns.size
        cells.add_values(column, np.array(values[step]))
        cells.add_nonfinite(column, {item: number for (at, item), number in counts.items() if at == step})
        cells.add_differing(column, np.array([item for at, item in differing if at == step], dtype=np.intp))

    for row in range(rows.count):
        for column in range(columns.count):
            (first, last), (begin, end) = rows.span(row), columns.span(column)
            inside = [(step, item) for step in range(begin, end + 1) for item in range(first, last + 1)]
            known = [values[step][item] for step, item in inside if not np.isnan(values[step][item])]
            assert np.array_equal(cells.largest[row, column], max(known, default=float("nan")), equal_nan=True)
            assert cells.nonfinite[row, column] == max((counts.get(place, 0) for place in inside), default=0)
            assert cells.differs[row, column] == any(place in differing for place in inside)


def test_cells_without_parameters_take_nothing() -> None:
    cells = Cells(Bins.at_most(0, 10), 3)

    cells.add_values(1, np.zeros(0))

    assert cells.largest.shape == (0, 3)


@given(st.lists(VALUES, max_size=300), st.integers(2, 40))
def test_a_line_keeps_the_smallest_and_the_largest_value_of_every_bin(values: list[float], most: int) -> None:
    taken = np.array(values, dtype=np.float64)
    kept = extremes(taken, most)

    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    bins = Bins.at_most(len(values), most if len(values) <= most else most // 2)
    for number in range(bins.count):
        first, last = bins.span(number)
        inside = taken[first : last + 1]
        drawn = taken[[place for place in kept if first <= place <= last]]
        assert len(drawn)  # a gap stays a gap
        if not np.isnan(inside).all():
            assert (np.nanmin(drawn), np.nanmax(drawn)) == (np.nanmin(inside), np.nanmax(inside))


def test_a_short_line_is_kept_as_it_is() -> None:
    assert extremes(np.array([3.0, float("nan"), 1.0]), 3).tolist() == [0, 1, 2]


@given(st.sets(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 30))
def test_every_step_is_in_the_column_that_says_so(numbers: set[int], every: int, most: int) -> None:
    steps = {number * every for number in numbers}
    grid = Grid.of(steps, max_columns=most)

    assert grid.count <= most
    assert grid.stride % every == 0 or len(steps) == 1
    for step in steps:
        column = grid.column(step)
        first, last = grid.span(column)
        assert 0 <= column < grid.count
        assert first <= step <= last
        assert grid.left + column * grid.width < step < grid.left + (column + 1) * grid.width
    assert grid.last == max(steps)


@pytest.mark.parametrize(
    "steps, start, first, stride",
    [
        ({1, 2, 3}, 0, 0, 1),  # before every step
        ({1, 11, 21}, 0, -9, 10),  # one place before, however near it is
        ({10, 20}, 0, 0, 10),
        ({110, 120}, 104, 100, 10),  # taken up again in the middle
        ({5}, 4, 4, 1),
    ],
)
def test_the_start_has_a_place_of_its_own(steps: set[int], start: int, first: int, stride: int) -> None:
    grid = Grid.of(steps, {start})

    assert (grid.first, grid.stride, grid.start) == (first, stride, True)
    assert grid.column(start) == 0
    assert min(grid.column(step) for step in steps) == 1


def test_a_grid_holds_steps_that_have_a_place_in_it() -> None:
    grid = Grid.of({10, 20, 40})

    assert grid.holds({10, 30, 40})
    assert grid.holds(())
    assert not grid.holds({10, 50})
    assert not grid.holds({0, 10})
    assert not grid.holds({15})


def test_a_later_start_of_another_run_is_one_of_the_steps() -> None:
    grid = Grid.of({1, 2, 3, 4}, {0, 2})

    assert [grid.column(step) for step in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 4]


def test_a_trace_of_a_start_alone_has_one_column() -> None:
    grid = Grid.of((), {7})

    assert (grid.first, grid.count, grid.start, grid.column(7)) == (7, 1, True, 0)


def test_a_column_of_several_recorded_steps_is_as_wide_as_they_are() -> None:
    grid = Grid.of(range(10, 10010, 10), max_columns=400)

    assert (grid.bins.size, grid.width, grid.count) == (3, 30, 334)
    assert grid.span(0) == (10, 30)
    assert grid.span(333) == (10000, 10000)

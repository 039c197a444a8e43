"""Comparison of rows: the differences, and the ranks outside the majority."""

import pytest

from legacy_ddp._compare import MAX_LINES, compare_rows, name_ranks


def test_equal_rows_are_no_finding() -> None:
    assert not compare_rows([{"call": "1"}] * 3)


def test_the_minority_is_blamed() -> None:
    finding = compare_rows([{"call": "7"}, {"call": "8"}, {"call": "7"}])

    assert finding.ranks == (1,)
    assert str(finding) == "  call: rank 1 has 8; ranks 0, 2 have 7"


def test_rank_0_is_not_right_by_default() -> None:
    assert compare_rows([{"call": "8"}, {"call": "7"}, {"call": "7"}]).ranks == (0,)


@pytest.mark.parametrize("values", ["ab", "aabb", "abc"])
def test_without_a_strict_majority_nobody_is_blamed(values: str) -> None:
    finding = compare_rows([{"x": value} for value in values])

    assert finding
    assert finding.ranks == ()
    assert all(value in str(finding) for value in values)


def test_a_missing_thing_counts_as_nothing() -> None:
    finding = compare_rows([{"p": "float32"}, {}, {"p": "float32"}])

    assert finding.ranks == (1,)
    assert str(finding) == "  p: rank 1 has nothing; ranks 0, 2 have float32"


def test_every_difference_adds_its_ranks() -> None:
    rows = [{"a": "1", "b": "1"}, {"a": "2", "b": "1"}, {"a": "1", "b": "1"}, {"a": "1", "b": "2"}]

    assert compare_rows(rows).ranks == (1, 3)


def test_a_long_list_is_capped() -> None:
    finding = compare_rows([{f"p{i}": "x" for i in range(50)}, {}])

    assert len(str(finding).splitlines()) == MAX_LINES + 1
    assert str(finding).endswith(f"... {50 - MAX_LINES} more")


@pytest.mark.parametrize(
    "ranks, text",
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), ([5, 0, 1, 2], "ranks 0-2, 5"), (range(64), "ranks 0-63")],
)
def test_ranks_are_named_briefly(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text

"""Parts of messages: rows that differ between ranks, names of ranks, and texts of exceptions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp import LayoutError
from legacy_ddp._text import (
    MAX_LINE,
    MAX_LINES,
    MAX_TEXT,
    compare_groups,
    compare_rows,
    error_line,
    error_text,
    first_line,
    name_ranks,
)


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


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, max_size=8), st.data())
def test_rows_with_their_ranks_are_compared_as_a_row_for_each_rank(distinct: list[dict[str, str]], data: Any) -> None:
    rows = data.draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=30))
    groups = [(row, [rank for rank, other in enumerate(rows) if other is row]) for row in distinct]

    by_lowest_rank = sorted((group for group in groups if group[1]), key=lambda group: group[1])

    assert compare_groups(by_lowest_rank) == compare_rows(rows)


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


class MuteError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        return f"{1 / 0}"


class NumberError(Exception):
    """Its text is none."""

    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # the mistake that is tested


@pytest.mark.parametrize(
    "error, whole, line",
    [
        (ValueError("bad batch"), "ValueError: bad batch", "ValueError: bad batch"),
        (KeyError("name"), "KeyError: 'name'", "KeyError: 'name'"),
        (ValueError("what\nand why"), "ValueError: what\nand why", "ValueError: what"),
        (ValueError("what\r\nand why"), "ValueError: what\nand why", "ValueError: what"),
        (ValueError("\n  what\nand why"), "ValueError: \n  what\nand why", "ValueError: what"),
        (ValueError(), "ValueError", "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
        (OSError("a\udcff\ud800b.pt"), r"OSError: a\udcff\ud800b.pt", r"OSError: a\udcff\ud800b.pt"),
        (
            MuteError(),
            "MuteError: (no text: its __str__ raised ZeroDivisionError)",
            "MuteError: (no text: its __str__ raised ZeroDivisionError)",
        ),
        (
            NumberError(),
            "NumberError: (no text: its __str__ raised TypeError)",
            "NumberError: (no text: its __str__ raised TypeError)",
        ),
    ],
)
def test_the_text_and_its_first_line_come_with_the_type(error: BaseException, whole: str, line: str) -> None:
    assert error_text(error) == whole
    assert error_line(error) == line


def test_a_long_text_is_cut_and_says_how_much_is_left_out() -> None:
    error = ValueError("x" * 300_000)

    assert first_line(error) == "x" * MAX_LINE + f" ... ({300_000 - MAX_LINE:,} more characters)"
    told = MAX_TEXT - len("ValueError: ")
    assert error_text(error) == "ValueError: " + "x" * told + f" ... ({300_000 - told:,} more characters)"


def test_of_50_mb_the_first_line_is_told_as_it_is() -> None:
    error = ValueError("the reason\n" + "x\n" * 25_000_000)

    assert error_line(error) == "ValueError: the reason"
    assert error_text(error).startswith("ValueError: the reason\nx\n")
    assert len(error_text(error)) < MAX_TEXT + 50


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_can_be_written_and_its_first_line_is_one(text: str) -> None:
    error = ValueError(text)

    error_text(error).encode()
    error_line(error).encode()
    assert len(error_line(error).splitlines()) == 1


def test_an_error_of_ours_about_a_name_with_a_lone_surrogate_can_be_written_and_keeps_the_name() -> None:
    error = LayoutError("shared with a\udcff", parameter="a\udcff")

    assert str(error).encode() == rb"shared with a\udcff"
    assert error.parameter == "a\udcff"

"""Bounded, encodable texts of arbitrary exceptions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp import LayoutError
from legacy_ddp._text import MAX_LINE, MAX_TEXT, error_line, error_text, first_line


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
        (ValueError("what\r\nand why"), "ValueError: what\r\nand why", "ValueError: what"),
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

"""Texts of exceptions in messages, here in the message about a micro-batch that an exception has ended."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legacy_ddp import GradientError, LayoutError, LegacyDistributedDataParallel


class MuteError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        return f"{1 / 0}"


class NumberError(Exception):
    """Its text is none."""

    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # the mistake that is tested


@pytest.fixture(scope="module")
def model(alone_in_module: None) -> LegacyDistributedDataParallel:
    """A wrapper that exchanges nothing in these tests."""
    return LegacyDistributedDataParallel(nn.Linear(1, 1), reproducible=True)


def _line_of(model: LegacyDistributedDataParallel, error: BaseException) -> str:
    with pytest.raises(type(error)), model.no_sync():
        raise error
    with pytest.raises(GradientError) as caught:
        model.all_reduce(sample_size=1)
    str(caught.value).encode()
    (line,) = re.findall(
        r"micro-batch 1 \(counted from 1\) \((.*)\), so gradients are missing; ", str(caught.value), re.DOTALL
    )
    return line


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (KeyError("name"), "KeyError: 'name'"),
        (ValueError("what\nand why"), "ValueError: what"),
        (ValueError("what\r\nand why"), "ValueError: what"),
        (ValueError("\n  what\nand why"), "ValueError: what"),
        (ValueError(), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (OSError("a\udcff\ud800b.pt"), r"OSError: a\udcff\ud800b.pt"),
        (MuteError(), "MuteError: (no text: its __str__ raised ZeroDivisionError)"),
        (NumberError(), "NumberError: (no text: its __str__ raised TypeError)"),
        (
            ValueError(
                "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                "ValueError: first\n  File ...\nvalues.ValueError: bad batch\nand why\n"
            ),
            "values.ValueError: bad batch (in DataLoader worker process 0)",
        ),
        (ValueError("x" * 300_000), f"ValueError: {'x' * 1000} ... (299,000 more characters)"),
    ],
)
def test_the_first_line_of_a_text_comes_with_its_type(
    error: BaseException, line: str, model: LegacyDistributedDataParallel
) -> None:
    assert _line_of(model, error) == line


@given(text=st.text(alphabet=st.characters(exclude_categories=())))
def test_the_first_line_of_any_text_is_one(text: str, model: LegacyDistributedDataParallel) -> None:
    assert len(_line_of(model, ValueError(text)).splitlines()) == 1


def test_an_error_of_ours_about_a_name_with_a_lone_surrogate_can_be_written_and_keeps_the_name() -> None:
    error = LayoutError("shared with a\udcff", parameter="a\udcff")

    assert str(error).encode() == rb"shared with a\udcff"
    assert error.parameter == "a\udcff"

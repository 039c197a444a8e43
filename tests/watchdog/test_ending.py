"""The error that ends a process, behind the exit code that came of it."""

import pytest

from legacy_ddp._watchdog.ending import error_behind


def _caught(cause: BaseException | None, context: BaseException | None, code: object) -> BaseException:
    end = SystemExit(code)
    end.__context__ = context
    if cause is not None:
        end.__cause__ = cause
    return end


_ERROR, _OTHER = ValueError("bad batch"), KeyError("other")


@pytest.mark.parametrize(
    "end, expected",
    [
        (_caught(None, _ERROR, 1), _ERROR),
        (_caught(_ERROR, _OTHER, 3), _ERROR),
        (_caught(None, _caught(None, _ERROR, 1), 2), _ERROR),  # an exit code of an exit code
        (_ERROR, _ERROR),
    ],
)
def test_an_exit_code_leads_to_the_error_behind_it(end: BaseException, expected: BaseException) -> None:
    assert error_behind(end) is expected


@pytest.mark.parametrize(
    "end",
    [
        _caught(None, None, 1),
        _caught(None, StopIteration(), 0),  # a normal end
        _caught(None, StopIteration(), None),
        _caught(None, _ERROR, "no data in /data"),  # says more than the error behind it
    ],
)
def test_an_exit_that_says_enough_stays(end: BaseException) -> None:
    assert error_behind(end) is end


def test_a_circle_of_causes_ends() -> None:
    first, second = SystemExit(1), SystemExit(2)
    first.__cause__, second.__cause__ = second, first

    assert error_behind(first) is first

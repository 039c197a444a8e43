"""The lines about settings that differ between ranks."""

from collections.abc import Sequence

import pytest

from legacy_ddp._compare import compare_rows
from legacy_ddp.debug._cross_check.settings_text import describe_settings


def _lines(names: Sequence[str]) -> list[str]:
    rows = [{f"module {name!r}": mode for name in names} for mode in ("training", "eval", "training")]
    return list(describe_settings(compare_rows(rows).differences))


@pytest.mark.parametrize(
    "names, line",
    [
        (["", "a", "a.b", "c"], "the model and 3 modules inside"),
        (["body.0", "body.0.norm", "body.1", "body.12"], "4 modules of 'body'"),
        (["body.0", "body.0.norm", "body.0.act", "body.0.drop"], "4 modules of 'body.0'"),
        (["a", "b", "c", "d"], "4 modules, first 'a'"),
    ],
)
def test_many_modules_in_eval_are_one_line(names: list[str], line: str) -> None:
    assert _lines(names) == [f"{line}: ranks 0, 2 have training; rank 1 has eval"]


def test_few_modules_are_named() -> None:
    end = ": ranks 0, 2 have training; rank 1 has eval"

    assert _lines(["a", "b", "c"]) == [f"module 'a'{end}", f"module 'b'{end}", f"module 'c'{end}"]


def test_ranks_are_told_in_ascending_order() -> None:
    rows = [{"threads": value} for value in ("7", "8", "9")]

    assert [*describe_settings(compare_rows(rows).differences)] == ["threads: rank 0 has 7; rank 1 has 8; rank 2 has 9"]


def test_modules_with_other_values_and_other_settings_keep_their_lines() -> None:
    rows = [{"threads": "1", "module 'a'": "eval"}, {"threads": "2", "module 'a'": "training"}]

    assert len([*describe_settings(compare_rows(rows).differences)]) == 2

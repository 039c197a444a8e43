"""The lines about settings that differ between ranks."""

from collections.abc import Sequence

import pytest

from legacy_ddp._compare import compare_rows
from legacy_ddp.debug._cross_check.explain import RankSettings, describe_settings, differing_settings


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


def _differing(held: Sequence[object], numbers: Sequence[dict[str, int]] | None = None) -> list[str]:
    """The differing settings of ranks that hold a value each; ranks of the third host of two by default."""
    numbers = numbers or [{"rank": rank, "global rank": rank + 4, "local rank": rank % 2} for rank in range(len(held))]
    rows = [RankSettings({"run variable 'value'": repr(value)}, own) for value, own in zip(held, numbers, strict=True)]
    return [item.name for item in differing_settings(rows)]


@pytest.mark.parametrize("held", [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 0, 1], ["0", "1", "0", "1"], ["4", "5", "6", "7"]])
def test_the_rank_s_own_number_is_no_different_setting(held: list[object]) -> None:
    assert _differing(held) == []


@pytest.mark.parametrize(
    "held",
    [
        [0, 1, 2, 2],  # not the own number on every rank
        [4, 1, 2, 3],  # a number of another kind on one rank
        [3, 2, 1, 0],
        [100, 101, 102, 103],  # a seed
        ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
        [0.0, 1.0, 2.0, 3.0],
        [False, True, False, True],
    ],
)
def test_other_values_of_each_rank_are_different_settings(held: list[object]) -> None:
    assert _differing(held) == ["run variable 'value'"]


def test_a_kind_of_number_counts_only_if_every_rank_has_it() -> None:
    assert _differing([0, 1], [{"rank": 0, "local rank": 0}, {"rank": 3}]) == ["run variable 'value'"]


def test_a_setting_that_is_no_value_of_run_may_not_follow_the_rank() -> None:
    rows = [RankSettings({"threads": str(rank)}, {"rank": rank}) for rank in (1, 2)]

    assert [item.name for item in differing_settings(rows)] == ["threads"]


def test_few_modules_are_named() -> None:
    end = ": ranks 0, 2 have training; rank 1 has eval"

    assert _lines(["a", "b", "c"]) == [f"module 'a'{end}", f"module 'b'{end}", f"module 'c'{end}"]


def test_ranks_are_told_in_ascending_order() -> None:
    rows = [{"threads": value} for value in ("7", "8", "9")]

    assert [*describe_settings(compare_rows(rows).differences)] == ["threads: rank 0 has 7; rank 1 has 8; rank 2 has 9"]


def test_modules_with_other_values_and_other_settings_keep_their_lines() -> None:
    rows = [{"threads": "1", "module 'a'": "eval"}, {"threads": "2", "module 'a'": "training"}]

    assert len([*describe_settings(compare_rows(rows).differences)]) == 2

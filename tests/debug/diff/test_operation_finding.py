"""The first different operation as a record with the rows around it, and its text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._text import WIDTH
from legacy_ddp.debug._diff import text as operation_text
from legacy_ddp.debug._diff.operations import (
    MAX_FIRST,
    ROWS_AFTER,
    ROWS_BEFORE,
    RankOperations,
    agreement,
    finding,
    judge_values,
)
from legacy_ddp.debug._diff.result import Comparison, OperationFinding
from legacy_ddp.debug._diff.text import as_json, lines
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.command import compare
from tests.helpers.operations import model, numbered, operation, rewritten
from tests.helpers.traces import write_trace

STEP = model()


def found_in(a: Sequence[Operation], b: Sequence[Operation], **changes: Any) -> OperationFinding:
    a, b = numbered(a), numbered(b)
    difference = first_difference(a, b)
    assert difference is not None
    given: dict[str, Any] = {"labels": ("A", "B"), "ranks": (1,), "facts": {}, "judge": judge_values}
    return finding(41, (a, b), difference, counts=(len(a), len(b)), **{**given, **changes})


def test_the_rows_around_a_culprit_are_compared_one_by_one() -> None:
    found = found_in(STEP, rewritten(STEP, 7, "h2(x)", "wrong"))

    assert (found.kind, found.stage, found.module, found.name) == ("output", "forward", "2", "aten::mm")
    assert [(row.numbers, row.name, row.result) for row in found.rows if row.is_first] == [
        ((8, 8), "aten::mm", "inputs agree, output differs")
    ]
    assert [row.numbers for row in found.rows] == [(number, number) for number in range(2, 17)]
    assert {row.result for row in found.rows[:ROWS_BEFORE]} == {"agrees"}
    assert {row.result for row in found.rows[ROWS_BEFORE + 1 :]} == {"inputs differ"}
    assert len(found.rows) == ROWS_BEFORE + 1 + ROWS_AFTER


def test_operations_of_one_side_alone_have_rows_of_their_own() -> None:
    extra = [operation("mul", ["r0(x)"], ["e"], module="0.act"), operation("add", ["e"], ["e2"], module="0.act")]

    found = found_in(STEP, [*STEP[:3], *extra, *rewritten(STEP[3:], 1, "r0(x)", "e2")])

    assert [(row.numbers, row.name, row.result) for row in found.rows if row.is_first] == [
        ((None, 4), "aten::mul", "only in B"),
        ((None, 5), "aten::add", "only in B"),
    ]
    assert [row.numbers for row in found.rows if not row.is_first][:4] == [(1, 1), (2, 2), (3, 3), (4, 6)]


def test_a_long_block_of_one_side_is_cut_in_the_table_and_counted_in_the_text() -> None:
    extra = [operation("mul", [f"e{i}"], [f"e{i + 1}"]) for i in range(500)]

    found = found_in(STEP, [*STEP[:3], *extra, *STEP[3:]])

    assert len([row for row in found.rows if row.is_first]) == MAX_FIRST
    assert found.summary.startswith("500 operations only in B: forward outside of submodules (aten::mul)")


@given(st.data())
def test_rows_stand_in_order_and_never_twice(data: st.DataObject) -> None:
    a, b = (
        [operation(name, [], [name]) for name in data.draw(st.lists(st.sampled_from("abc"), max_size=25))]
        for _ in range(2)
    )
    difference = first_difference(a, b)
    if difference is None:
        return

    rows = found_in(a, b).rows

    for side in (0, 1):
        numbers = [row.numbers[side] for row in rows if row.numbers[side] is not None]
        assert numbers == sorted(set(numbers))
    assert any(row.is_first for row in rows)


def test_the_text_has_80_columns_and_names_place_and_meaning() -> None:
    found = found_in(STEP, rewritten(STEP, 7, "h2(x)", "wrong"))

    text = [*operation_text.operation_lines(found)]

    assert text == [
        "operations of step 41 on rank 1: 16, the first that differs:",
        "  forward of 2 (aten::mm): inputs agree, output differs (operation 8)",
        "    output 1, float32 (4, 8): h2(x) in A, wrong in B",
        "  meaning: The same kernel gave another result for the same bits: a kernel that",
        "    is not deterministic, a faulty custom operation, memory or hardware.",
        "  next: legacy_ddp.debug.cross_check() repeats the step on another rank and",
        "    compares the elements",
    ]


def test_numbers_of_operations_are_told_for_each_side_where_they_differ() -> None:
    extra = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")
    wrong = rewritten(STEP, 7, "h2(x)", "wrong")

    text = [*operation_text.operation_lines(found_in(STEP, [*wrong[:2], extra, *wrong[2:]]))]

    assert text[:5] == [
        "operations of step 41 on rank 1: 16 in A, 17 in B, the first that differs:",
        "  forward of 2 (aten::mm): inputs agree, output differs (operation 8 in A,",
        "    operation 9 in B)",
        "    output 1, float32 (4, 8): h2(x) in A, wrong in B",
        "  before, without influence: 1 operation only in B: forward of 0.act",
    ]


def test_groups_of_ranks_stand_in_the_text_as_labels() -> None:
    found = found_in(STEP, STEP[:5] + STEP[6:], labels=("ranks 0, 2", "rank 1"))

    text = [*operation_text.operation_lines(found)]

    assert text[:2] == [
        "operations of step 41: 16 on ranks 0, 2, 15 on rank 1, the first that differs:",
        "  1 operation only on ranks 0, 2: forward of 1.act (aten::relu) (operation 6 on",
    ]


def test_equal_operations_are_one_sentence() -> None:
    text = [
        *operation_text.operation_lines(agreement(3, (371, 371), ("A", "B"), "Forward and backward computed the same."))
    ]

    assert text == [
        "operations of step 3: 371",
        "  all 371 operations agree",
        "  meaning: Forward and backward computed the same.",
    ]


def test_operations_in_another_order_are_rows_of_their_own() -> None:
    a = [operation("relu", ["x"], ["r"], module="a"), operation("tanh", ["x"], ["t"], module="b"), *STEP]

    found = found_in(a, [a[1], a[0], *STEP])

    assert found.kind == "order"
    assert [(row.numbers, row.name, row.result) for row in found.rows][:5] == [
        ((1, None), "aten::relu", "in another order"),
        ((2, None), "aten::tanh", "in another order"),
        ((None, 1), "aten::tanh", "in another order"),
        ((None, 2), "aten::relu", "in another order"),
        ((3, 3), "aten::t", "agrees"),
    ]


@given(st.text(max_size=200), st.text(max_size=300))
def test_the_text_keeps_to_the_page_whatever_the_names(module: str, settings: str) -> None:
    a = [operation("mul", ["x"], ["y"], module=module, settings=settings)]
    b = [operation("mul", ["x"], ["z"], module=module, settings=settings + "!")]

    assert all(len(line) <= WIDTH for line in operation_text.operation_lines(found_in(a, b)))


def test_the_section_stands_in_text_and_json_of_the_comparison() -> None:
    found = found_in(STEP, rewritten(STEP, 7, "h2(x)", "wrong"))
    comparison = Comparison(("a", "b"), "different", "different: somewhere", operations=found)

    assert "operations of step 41 on rank 1: 16, the first that differs:" in lines(comparison)
    given = as_json(comparison)["operations"]
    assert (given["step"], given["kind"], given["module"], given["name"]) == (41, "output", "2", "aten::mm")
    assert given["rows"][ROWS_BEFORE]["is_first"] is True


def test_a_rank_that_agrees_with_two_different_ranks_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankOperations, "_is_same", lambda *_: True)
    product = operation("mul", ["0a" * 8], ["0b" * 8])
    recorded = [product], [product, operation("neg", ["0b" * 8], ["0c" * 8])]

    comparison = compare(write_trace(tmp_path, operations=lambda _, rank: recorded[rank]))

    assert comparison.operations is None
    assert "operations of step 1 differ between two ranks, and a third agrees with both" in comparison.notes

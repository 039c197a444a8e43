"""The first difference of two sequences of operations of the same data."""

import random
from string import Formatter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp.debug._cross_check import verdict as of_cross_check
from legacy_ddp.debug._operations import meaning as of_operations
from legacy_ddp.debug._operations.align import Block, blocks, first_difference
from tests.helpers.operations import model, operation, rewritten, value

STEP = model()
POSITIONS = st.integers(0, len(STEP) - 1)


@given(POSITIONS)
def test_an_output_with_other_bits_is_the_culprit_at_its_place(position: int) -> None:
    wrong = STEP[position].outputs[0].digest or ""

    found = first_difference(STEP, rewritten(STEP, position, wrong, "wrong"))

    assert found is not None
    assert (found.kind, found.start_a, found.start_b, found.differing) == ("output", position, position, (0,))
    assert found.differing_values == ((value(wrong), value("wrong")),)


@pytest.mark.thorough
def test_a_hundred_thousand_operations() -> None:
    drawn = random.Random(0)
    long = [operation("mul", [f"v{i}"], [f"v{i + 1}"], module=f"{drawn.randrange(300)}") for i in range(100_000)]
    shorter = [item for index, item in enumerate(long) if index % 1000 != 999 or index > 90_000]

    found = first_difference(long, rewritten(long, 99_000, "v99001", "wrong"))
    gone = first_difference(long, shorter)

    assert found is not None
    assert (found.kind, found.start_a) == ("output", 99_000)
    assert gone is not None
    assert (gone.kind, gone.start_a, gone.has_effect) == ("sequence", 999, False)


@given(st.integers(1, 8), st.data())
def test_the_extra_one_of_several_products_of_a_module_is_told_by_its_values(count: int, data: st.DataObject) -> None:
    """The keys of all products are equal; the extra product was once blamed on the product behind it."""
    products = [operation("mm", ["x", f"w{index}"], [f"y{index}"]) for index in range(count)]
    at, more = data.draw(st.integers(0, count)), data.draw(st.integers(1, 3))
    extra = [operation("mm", ["x", f"extra{index}"], [f"z{index}"]) for index in range(more)]
    start, end = [operation("relu", ["w"], ["x"])], [operation("sum", ["y0"], ["loss"])]
    longer, shorter = [*start, *products[:at], *extra, *products[at:], *end], [*start, *products, *end]

    for found in (first_difference(longer, shorter), first_difference(shorter, longer)):
        assert found is not None
        assert (found.kind, found.start_a, found.start_b, found.has_effect) == ("sequence", at + 1, at + 1, False)
    assert found.b == tuple(extra)


KEYS = st.lists(st.sampled_from("abcd"), max_size=30)


@given(KEYS, KEYS)
def test_blocks_cover_both_sequences_in_order_and_pair_items_with_equal_keys(a: list[str], b: list[str]) -> None:
    ends, was_common = (0, 0), None
    for block in blocks(a, b):
        assert block.is_common != was_common
        was_common = block.is_common
        assert (block.start_a, block.start_b) == ends
        ends = (block.end_a, block.end_b)
        assert block.end_a > block.start_a or block.end_b > block.start_b
        if block.is_common:
            assert a[block.start_a : block.end_a] == b[block.start_b : block.end_b]
    assert ends == (len(a), len(b))


def _only_in(a: list[Any], b: list[Any]) -> list[int]:
    """The positions of the items of ``a`` alone."""
    return [index for block in blocks(a, b) if not block.is_common for index in range(block.start_a, block.end_a)]


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=40), st.data())
def test_items_taken_out_are_told_one_by_one(keys: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, len(keys) - 1)))
    rest = [key for index, key in enumerate(keys) if index not in gone]

    assert ({*_only_in(keys, rest)}, _only_in(rest, keys)) == (gone, [])


PATTERN = list("abcde") * 40
MANY = [f"{index % 100}" for index in range(2_000)]


@pytest.mark.parametrize(
    "a, b, differing",
    [
        (PATTERN, [*PATTERN[:102], "x", "y", *PATTERN[102:]], [(102, 102, 102, 104)]),
        ("abcdefgh", "abcdxfgh", [(4, 5, 4, 5)]),
        ("amnz", "aqqmqnz", [(1, 1, 1, 3), (2, 2, 4, 5)]),
        (
            MANY,
            [*MANY[:1000], *(f"extra {index % 50}" for index in range(10_000)), *MANY[1000:]],
            [(1000, 1000, 1000, 11_000)],
        ),
    ],
    ids=["an insertion into a pattern", "another key", "two near insertions", "ten thousand keys"],
)
def test_what_differs_is_as_short_as_it_can_be(a: list[str], b: list[str], differing: list[tuple[int, ...]]) -> None:
    found = [block for block in blocks([*a], [*b]) if not block.is_common]

    assert found == [Block(*ends, is_common=False) for ends in differing]


@pytest.mark.thorough
def test_a_hundred_thousand_keys_with_a_difference_in_every_tenth() -> None:
    a = [f"{index % 1000}" for index in range(100_000)]
    b = [key for index, key in enumerate(a) if index % 10 != 3]

    assert _only_in(a, b) == [index for index in range(100_000) if index % 10 == 3]


# Of explanations, also of a cross-check.
TABLES = {
    **{kind: (of_operations._Case, rows) for kind, rows in of_operations._ROWS.items()},
    "cross-check": (of_cross_check._Case, of_cross_check._CAUSES),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_in_a_text_is_known_to_its_case_and_only_the_last_row_applies_to_all_cases(table: str) -> None:
    """A type checker does not read the texts, and a row may explain a rare case."""
    case, rows = TABLES[table]
    texts = [text for row in rows for text in (row.meaning, row.next_step)]
    names = {name.split(".")[1].partition("[")[0] for text in texts for _, name, *_ in Formatter().parse(text) if name}

    assert names <= {*dir(case), *case.__annotations__}
    assert [row.applies is of_operations.always for row in rows] == [*[False] * (len(rows) - 1), True]

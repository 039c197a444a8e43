"""Alignment of two sequences of keys."""

from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp.debug._operations.align import Block, blocks

KEYS = st.lists(st.sampled_from("abcd"), max_size=30)


@given(KEYS, KEYS)
def test_blocks_cover_both_sequences_in_order(a: list[str], b: list[str]) -> None:
    ends = (0, 0)
    for block in blocks(a, b):
        assert (block.start_a, block.start_b) == ends
        ends = (block.end_a, block.end_b)
    assert ends == (len(a), len(b))


@given(KEYS, KEYS)
def test_paired_items_have_equal_keys_and_no_block_is_empty(a: list[str], b: list[str]) -> None:
    for block in blocks(a, b):
        assert block.end_a > block.start_a or block.end_b > block.start_b
        if block.is_common:
            assert a[block.start_a : block.end_a] == b[block.start_b : block.end_b]


@given(KEYS)
def test_equal_sequences_are_one_common_block(keys: list[str]) -> None:
    assert [*blocks(keys, keys)] == ([Block(0, len(keys), 0, len(keys), is_common=True)] if keys else [])


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=40), st.data())
def test_items_taken_out_are_told_one_by_one(keys: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, len(keys) - 1)))
    rest = [key for index, key in enumerate(keys) if index not in gone]

    only_a = [
        index for block in blocks(keys, rest) if not block.is_common for index in range(block.start_a, block.end_a)
    ]
    only_b = [
        index for block in blocks(rest, keys) if not block.is_common for index in range(block.start_b, block.end_b)
    ]

    assert {*only_a} == {*only_b} == gone


def test_a_repeated_pattern_meets_again_right_after_an_insertion() -> None:
    pattern = list("abcde") * 40
    longer = [*pattern[:102], "x", "y", *pattern[102:]]

    assert [block for block in blocks(pattern, longer) if not block.is_common] == [
        Block(102, 102, 102, 104, is_common=False)
    ]


def test_another_key_at_one_place_is_a_block_of_one_item_on_both_sides() -> None:
    a = list("abcdefgh")
    b = list("abcdxfgh")

    assert [block for block in blocks(a, b) if not block.is_common] == [Block(4, 5, 4, 5, is_common=False)]


def test_common_items_between_two_near_differences_are_paired() -> None:
    a = list("amnz")
    b = list("aqqmqnz")

    assert [(block.start_a, block.start_b) for block in blocks(a, b) if block.is_common] == [(0, 0), (1, 3), (2, 5)]


def test_a_hundred_thousand_keys_with_a_difference_in_every_tenth() -> None:
    a = [f"{index % 1000}" for index in range(100_000)]
    b = [key for index, key in enumerate(a) if index % 10 != 3]

    only_a = [index for block in blocks(a, b) if not block.is_common for index in range(block.start_a, block.end_a)]

    assert only_a == [index for index in range(100_000) if index % 10 == 3]


def test_ten_thousand_items_on_one_side_alone() -> None:
    a = [f"{index % 100}" for index in range(2_000)]
    b = [*a[:1000], *(f"extra {index % 50}" for index in range(10_000)), *a[1000:]]

    assert [block for block in blocks(a, b) if not block.is_common] == [
        Block(1000, 1000, 1000, 11_000, is_common=False)
    ]

"""Parts of a rotation: every byte once, in at most 16 parts of about equal cost."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._replicas.rotation import MAX_PARTS, SMALLEST_PART, TENSOR_COST, divide

_SIZES = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 2**22)), max_size=200)


@given(_SIZES)
def test_every_byte_is_in_one_part(sizes: list[int]) -> None:
    pieces = sorted(piece for part in divide(sizes) for piece in part)

    for index, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.tensor == index]
        assert [piece.start for piece in own][:1] == [0][: len(own)]
        assert all(before.stop == after.start for before, after in pairwise(own))
        assert (own[-1].stop if own else 0) == size
        assert all(piece.start % 64 == 0 and piece.start < piece.stop for piece in own)


@given(_SIZES)
def test_parts_are_few_and_of_about_equal_cost(sizes: list[int]) -> None:
    parts = divide(sizes)
    costs = [sum(TENSOR_COST + piece.stop - piece.start for piece in part) for part in parts]

    assert 1 <= len(parts) <= MAX_PARTS
    total = sum(size + TENSOR_COST for size in sizes)
    assert max(costs) <= max(2 * SMALLEST_PART, total / MAX_PARTS) + 3 * TENSOR_COST


def test_a_thousand_small_tensors_go_to_all_parts() -> None:
    parts = divide([1024] * 1000)

    assert len(parts) == MAX_PARTS
    assert all(35 <= len(part) <= 65 for part in parts)


def test_a_large_tensor_takes_several_parts() -> None:
    assert [len(part) for part in divide([2**24])] == [1] * MAX_PARTS


def test_a_small_model_is_one_part_and_nothing_is_an_empty_part() -> None:
    assert divide([100, 200, 300]) == [[(0, 0, 100), (1, 0, 200), (2, 0, 300)]]
    assert divide([]) == divide([0, 0]) == [[]]

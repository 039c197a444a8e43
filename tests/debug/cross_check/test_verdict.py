"""The verdict about digests: expected ranks counted by hand."""

import pytest

from legacy_ddp.debug._cross_check.verdict import RING, choose_batch, differing_batches, judge

A, B, C = (1, 1), (1, 2), (1, 3)


def _ring(size: int, wrong: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Rank ``wrong`` computes every batch differently. The batch of rank r gives (r, 0)."""
    own = [(rank, rank == wrong) for rank in range(size)]
    foreign = [((rank - 1) % size, rank == wrong) for rank in range(size)]
    return own, foreign


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_wrong_rank_disagrees_about_its_batch_and_the_batch_before(size: int) -> None:
    for wrong in range(size):
        batches = differing_batches(*_ring(size, wrong))

        assert batches == sorted({wrong, (wrong - 1) % size})
        assert choose_batch(batches, size) == (wrong if size > 2 else 0)


def test_equal_digests_are_no_difference() -> None:
    assert differing_batches(*_ring(3, wrong=9)) == []


def test_a_rank_without_a_batch_is_left_out() -> None:
    assert differing_batches([A, None, C], [C, A, None]) == []
    assert differing_batches([A, None, C], [B, A, None]) == [2]


def test_one_rank_against_a_majority_computes_differently() -> None:
    verdict = judge(0, A, A, [(A, A), (A, A), (B, B)])

    assert (verdict.kind, verdict.ranks, verdict.is_attributed) == ("differs", (2,), True)
    assert (verdict.odd.rank, verdict.reference.rank) == (2, 0)


@pytest.mark.parametrize(
    "repeats, ranks",
    [
        ([(A, A), (B, B)], (0, 1)),
        ([(A, A), (B, B), (A, A), (B, B)], (0, 1, 2, 3)),
        ([(A, A), (B, B), (C, C)], (0, 1, 2)),
    ],
)
def test_without_a_majority_all_ranks_are_shown(
    repeats: list[tuple[tuple[int, ...], ...]], ranks: tuple[int, ...]
) -> None:
    verdict = judge(0, A, B, repeats)

    assert (verdict.kind, verdict.ranks, verdict.is_attributed) == ("differs", ranks, False)
    assert verdict.odd.rank != verdict.reference.rank


def test_a_rank_that_disagrees_with_itself_is_not_deterministic() -> None:
    verdict = judge(0, A, B, [(A, A), (B, C), (A, A)])

    assert (verdict.kind, verdict.ranks) == ("nondeterministic", (1,))
    assert verdict.odd.rank == verdict.reference.rank == 1
    assert verdict.odd.run != verdict.reference.run


@pytest.mark.parametrize("own, foreign, ranks", [(B, A, (1,)), (A, B, (2,)), (B, C, (1, 2))])
def test_a_result_that_does_not_return_is_that_of_the_rank_that_differs_from_all_repetitions(
    own: tuple[int, int], foreign: tuple[int, int], ranks: tuple[int, ...]
) -> None:
    verdict = judge(1, own, foreign, [(A, A)] * 3)

    assert (verdict.kind, verdict.ranks) == ("once", ranks)
    assert (verdict.odd.rank, verdict.odd.run, verdict.reference.rank) == (ranks[0], RING, ranks[0])


def test_two_ranks_and_one_event_name_the_rank() -> None:
    assert judge(0, B, A, [(A, A)] * 2).ranks == (0,)
    assert judge(1, A, B, [(A, A)] * 2).ranks == (0,)

"""The content of a step depends on seed and epoch alone, on every split over ranks."""

from contextlib import suppress
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from legacy_ddp.data import GlobalBatchSampler, aligned_splits, micro_batch_rng

Step = list[list[int]]  # micro-batches, in their order


def _samplers(ranks: int, *sizes: int, **options: Any) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(*sizes, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def _epoch(samplers: list[GlobalBatchSampler]) -> list[Step]:
    """The steps of one epoch, as all ranks together read them."""
    each = len(samplers[0].micro_batches)
    read = [list(sampler) for sampler in samplers]
    return [list(chain(*(batches[start : start + each] for batches in read))) for start in range(0, len(read[0]), each)]


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 40), st.integers(0, 99), st.booleans())
def test_every_split_reads_the_same_steps(size: int, per_step: int, more: int, seed: int, shuffle: bool) -> None:
    sizes = (size * per_step + more, size, per_step)

    read = {
        split: _epoch(_samplers(split[0], *sizes, seed=seed, shuffle=shuffle)) for split in aligned_splits(per_step)
    }

    first = read[1, per_step]
    assert all(steps == first for steps in read.values())
    assert len(first) == sizes[0] // (size * per_step)
    assert all(len(step) == per_step and all(len(batch) == size for batch in step) for step in first)
    indices = list(chain(*chain(*first)))
    assert len(set(indices)) == len(indices)
    assert set(indices) <= set(range(sizes[0]))


def test_epochs_have_other_orders_and_seeds_too() -> None:
    (sampler,) = _samplers(1, 64, 4, 4)
    (other,) = _samplers(1, 64, 4, 4, seed=1)

    epochs = [list(sampler), list(sampler), list(other)]

    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(sorted(chain(*epoch)) == list(range(64)) for epoch in epochs)
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


@given(st.integers(0, 11), st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]), st.sampled_from([(1, 8), (8, 1), (2, 4)]))
def test_a_saved_position_resumes_on_any_split(done: int, before: tuple[int, int], after: tuple[int, int]) -> None:
    whole = _samplers(1, 50, 1, 8)
    steps = [*_epoch(whole), *_epoch(whole)]
    savers = _samplers(before[0], 50, 1, 8)
    for sampler in savers:
        for _ in range(2):  # epochs
            for _, batch in zip(range(before[1] * max(0, min(6, done - 6 * sampler.epoch))), sampler, strict=False):
                assert len(batch) == 1

    resumed = _samplers(after[0], 50, 1, 8)
    for sampler in resumed:
        sampler.load_state_dict(savers[0].state_dict(global_step=done))

    assert _epoch(resumed) == steps[done : 6 if done < 6 else 12]


@pytest.mark.parametrize("taken", [0, 3, 4, 16])
def test_the_position_counts_steps_that_were_handed_out_whole(taken: int) -> None:
    (sampler,) = _samplers(1, 16, 1, 4)
    batches = iter(DataLoader(torch.arange(16), batch_sampler=sampler))  # type: ignore[arg-type]
    for _ in range(taken):
        next(batches)

    assert sampler.state_dict()["global_step"] == taken // 4


def test_a_new_iteration_goes_on_with_the_first_step_that_is_not_whole() -> None:
    (sampler,) = _samplers(1, 16, 1, 4, shuffle=False)
    batches = iter(sampler)
    for _ in range(6):
        next(batches)

    assert next(iter(sampler)) == [4]
    sampler.set_epoch(0)  # the present one: the position stays
    assert next(iter(sampler)) == [4]
    sampler.set_epoch(3)
    assert next(iter(sampler)) == [0]


@pytest.mark.parametrize("move", ["iterate", "set_epoch", "load"])
def test_an_iteration_ends_loudly_when_the_position_was_moved(move: str) -> None:
    (sampler,) = _samplers(1, 16, 1, 4)
    batches = iter(sampler)
    next(batches)
    if move == "iterate":
        next(iter(sampler))
    elif move == "set_epoch":
        sampler.set_epoch(2)
    else:
        sampler.load_state_dict(sampler.state_dict(global_step=1))

    with pytest.raises(RuntimeError, match="this iteration is out of date"):
        next(batches)


def test_the_order_is_made_on_the_cpu_whatever_the_default_device_is() -> None:
    (sampler,) = _samplers(1, 16, 1, 4)
    expected = list(_samplers(1, 16, 1, 4)[0])
    with torch.device("meta"):
        assert list(sampler) == expected


def test_the_length_is_that_of_an_epoch_on_this_rank() -> None:
    samplers = _samplers(2, 35, 2, 4)

    assert [len(sampler) for sampler in samplers] == [8, 8]
    assert [list(sampler.micro_batches) for sampler in samplers] == [[0, 1], [2, 3]]
    assert len(DataLoader(torch.arange(35), batch_sampler=samplers[0])) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((8, 1, 6), {"rank": 0, "world_size": 4}, "got 6 on 4 ranks; splits of 6"),
        ((8, 1, 6), {"rank": 0, "world_size": 2}, "1 x 6, 3 x 2, 6 x 1"),
        ((7, 2, 4), {}, "dataset_length is less than a step: got 7 samples, expected at least 8"),
        ((8, 0, 4), {}, "micro_batch_size is out of range: got 0, expected at least 1"),
        ((8, 1, 4), {"rank": 2, "world_size": 2}, "rank is out of range: got 2, expected 0 to 1"),
        ((8, 1, 4), {"seed": -1}, "seed is out of range: got -1"),
        ((8, 1, 4), {"seed": 0.5}, "seed is of the wrong type: got"),
        ((8, 1, 4), {"shuffle": 1}, "shuffle is of the wrong type: got"),
        ((8, 1, 4), {"rank": True, "world_size": 2}, "rank is of the wrong type: got"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError if "of the wrong type" in message else ValueError, match=message):
        GlobalBatchSampler(*arguments, **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": 3}, "got seed 3, expected 0 as in this sampler"),
        ({"dataset_length": 9}, "got dataset_length 9, expected 8"),
        ({"global_step": -1}, "global_step is out of range: got -1"),
        ({"epoch": 1}, "state is not usable: got keys"),
    ],
)
def test_a_state_of_other_content_is_refused(changes: dict[str, Any], message: str) -> None:
    (sampler,) = _samplers(1, 8, 1, 4)

    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **changes})


@given(st.integers(1, 64), st.integers(1, 64))
def test_splits_that_are_listed_are_those_that_a_sampler_takes(ranks: int, each: int) -> None:
    try:
        _samplers(ranks, ranks * each, 1, ranks * each)
        is_taken = True
    except ValueError:
        is_taken = False

    assert ((ranks, each) in aligned_splits(ranks * each)) == is_taken


@pytest.mark.parametrize("total, error", [(0, ValueError), (-3, ValueError), (True, TypeError), (4.0, TypeError)])
def test_splits_of_no_number_of_micro_batches_are_refused(total: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"total is .*got {total}"):
        aligned_splits(total)


# --- random numbers ---------------------------------------------------------------------------------------------------


def _mask(step: int, index: int, **options: Any) -> list[float]:
    with micro_batch_rng(step, index, **options):
        return nn.functional.dropout(torch.ones(64), 0.5).tolist()


def test_masks_depend_on_step_index_and_seed_alone() -> None:
    first = _mask(2, 5)
    torch.manual_seed(9)

    assert _mask(2, 5) == first
    assert first not in (_mask(2, 6), _mask(3, 5), _mask(2, 5, seed=1), _mask(5, 2))


def test_random_numbers_outside_go_on_as_if_nothing_had_been_also_after_an_exception() -> None:
    state = torch.get_rng_state()
    _mask(0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    with suppress(KeyError), micro_batch_rng(0, 0):
        raise KeyError(torch.rand(1))

    assert torch.equal(torch.get_rng_state(), state)

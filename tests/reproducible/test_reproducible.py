"""The order of sums with reproducible=True: one tree, for any split of a step's micro-batches over ranks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.cases import Grads, all_bits, get_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_sizes import SMALLEST_MOVED_BYTES, move_gradients_from
from tests.helpers.sums import DTYPES, Window, add_leaf, bring, take, wrap_reproducible
from tests.helpers.tiers import thorough

SHAPES = [(), (3,), (5, 2), (0,), (65,)]


# Any step, any split


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of many sizes, so that the order of additions shows; now and then 0.0 and -0.0."""
    real = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    real *= torch.pow(2.0, torch.randint(-12, 6, real.shape, generator=generator))
    real *= torch.randint(0, 5, real.shape, generator=generator) > 0
    if dtype.is_complex:
        return torch.view_as_complex(real).to(dtype)
    return real[..., 0].to(dtype)


@dataclass(frozen=True)
class Step:
    """``present[m][p]``: whether micro-batch m has a gradient of parameter p."""

    present: tuple[tuple[bool, ...], ...]
    counts: tuple[int, ...]
    in_blocks: bool


@dataclass(frozen=True)
class Training:
    """Parameters by shape and dtype, and the steps; values follow from the seed."""

    parameters: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    seed: int
    steps: tuple[Step, ...]
    set_to_none: bool
    options: dict[str, Any]

    def windows(self) -> list[Window]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            Window([self._gradients(row, generator) for row in step.present], step.counts, step.in_blocks)
            for step in self.steps
        ]

    def _gradients(self, row: Sequence[bool], generator: torch.Generator) -> Grads:
        return [_random(*kind, generator) if here else None for kind, here in zip(self.parameters, row, strict=True)]

    def expected(self) -> list[Grads]:
        """What each step leaves. What is zeroed in place is there in its first micro-batch, as zeros."""
        found: list[Grads] = []
        for window in self.windows():
            left = found[-1] if found and not self.set_to_none else [None] * len(self.parameters)
            zeroed = [None if old is None else torch.zeros_like(old) for old in left]
            found.append(
                [zeros if grad is None else grad for zeros, grad in zip(zeroed, window.expected(), strict=True)]
            )
        return found


@st.composite
def _trainings(draw: st.DrawFn, world_size: int) -> Training:
    each = draw(st.integers(1, 9) if world_size == 1 else st.sampled_from([1, 2, 4, 8]))
    kinds = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES))
    parameters = draw(st.lists(kinds, min_size=1, max_size=4).map(tuple))
    # A last micro-batch behind the blocks is one only if it has a gradient.
    row = st.tuples(*[st.sampled_from([True, True, False])] * len(parameters))
    count = each * world_size
    steps = st.builds(Step, st.tuples(*[row] * count), st.tuples(*[st.integers(1, 9)] * count), st.booleans())
    steps = steps.filter(lambda step: step.in_blocks or all(map(any, step.present)))
    options = {"buffer_size": draw(st.sampled_from([1, 3, 7, 2**28])), "gradient_as_bucket_view": draw(st.booleans())}
    all_steps = draw(st.lists(steps, min_size=1, max_size=3).map(tuple))
    return Training(parameters, draw(st.integers(0, 2**32)), all_steps, draw(st.booleans()), options)


def _train_all(trainings: Sequence[Training], rank: int, world_size: int) -> list[list[list[object]]]:
    results = []
    for training in trainings:
        parameters = [torch.ones(shape, dtype=dtype) for shape, dtype in training.parameters]
        wrapped = wrap_reproducible(parameters, **training.options)
        found = []
        for window in training.windows():
            wrapped.zero_grad(set_to_none=training.set_to_none)
            found.append(all_bits(take(wrapped, window, rank, world_size)))
        results.append(found)
    return results


_PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # starting ranks takes longer than all the rest: no shrinking


@pytest.mark.parametrize("world_size, examples", [thorough(1, 25), (3, 12)])
def test_any_split_equals_the_tree_in_one_process_bit_for_bit(transport: str, world_size: int, examples: int) -> None:
    @settings(max_examples=examples, phases=_PHASES)
    @given(st.lists(_trainings(world_size), min_size=1, max_size=5))
    def check(trainings: list[Training]) -> None:
        results = run_ranks(partial(_train_all, trainings, world_size=world_size), world_size)
        for training, *of_ranks in zip(trainings, *results, strict=True):
            for number, (expected, *of_rank) in enumerate(zip(training.expected(), *of_ranks, strict=True)):
                for rank, bits in enumerate(of_rank):
                    assert bits == all_bits(expected), f"rank {rank}, step {number} of {training}"

    check()


# What a micro-batch is, and gradients that somebody keeps, scales or clears between micro-batches

Model = LegacyDistributedDataParallel


def _add(model: Model, value: float) -> None:
    bring(model.module, [torch.full((3,), value), torch.full((1,), value)])


def _call(model: Model, *, micro_batches: int | None = None) -> None:
    row = model.all_reduce(sample_size=1).rows[0]
    assert micro_batches in (None, row.micro_batches)


def _nested(model: Model) -> None:
    with model.no_sync():
        add_leaf(model, 1)
        _add(model, 2)
    _call(model, micro_batches=2)


def _an_empty_block(model: Model) -> None:
    add_leaf(model, 3)
    with model.no_sync():
        pass
    _call(model)


def _without_blocks(model: Model) -> None:
    _add(model, 1)
    _add(model, 2)
    _call(model)


def _local_step(model: Model) -> None:
    with model.no_sync():
        _add(model, 1)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    add_leaf(model, 2)
    _call(model)


def _edited_in_place(model: Model) -> None:
    add_leaf(model, 1)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 2
        else:
            parameter.grad = torch.full_like(parameter, 2.0)
    _call(model)


def _written_to(model: Model) -> None:
    with model.no_sync():
        _add(model, 1)
        kept = [parameter.grad for parameter in model.parameters()]
    for grad in kept:
        grad.fill_(100.0)
    add_leaf(model, 2)
    for grad in kept:
        grad.zero_()
    _call(model)


def _clipped(model: Model) -> None:
    add_leaf(model, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(2)
    add_leaf(model, 2)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # it is too late for that, and no micro-batch more
    _call(model, micro_batches=2)


def _cleared_inside(model: Model) -> None:
    """Only that block's gradients are meant: it takes them apart and begins anew."""
    add_leaf(model, 1)
    with model.no_sync():
        _add(model, 50)
        model.zero_grad()
        _add(model, 2)
    _call(model)


def _cleared_after_an_empty_block(model: Model) -> None:
    with model.no_sync():
        pass
    model.zero_grad()
    add_leaf(model, 3)
    _call(model, micro_batches=1)


def _by_hand(model: Model) -> None:
    for value in (1.0, 2.0):
        with model.no_sync():
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 4.0)
    _call(model)


def _zero_in_the_end(model: Model) -> None:
    with model.no_sync():
        _add(model, 1)
        bring(model.module, [torch.full((3,), 2.0), None])
    bring(model.module, [None, torch.zeros(1)])
    _call(model)


def _dropped(model: Model, *, set_to_none: bool, last_in_block: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    add_leaf(model, 1)
    add_leaf(model, 2)
    optimizer.zero_grad(set_to_none=set_to_none)
    add_leaf(model, 3)
    optimizer.zero_grad(set_to_none=set_to_none)
    if last_in_block:
        add_leaf(model, 4)
    else:
        with suppress(RuntimeError):  # a list has no forward pass; but it begins
            model()
        _add(model, 4)
    _call(model, micro_batches=1)


# What a script leaves in the two parameters.
LEAVES: dict[str, tuple[Callable[[Model], None], tuple[float, float]]] = {
    **{
        script.__name__: (script, (3.0, 3.0))
        for script in (
            _nested,
            _an_empty_block,
            _without_blocks,
            _local_step,
            _edited_in_place,
            _written_to,
            _clipped,
            _cleared_inside,
            _cleared_after_an_empty_block,
        )
    },
    "gradients assigned by hand": (_by_hand, (7.0, 7.0)),
    "a last gradient that is zero": (_zero_in_the_end, (3.0, 1.0)),
    **{
        f"zero_grad({to_none=}), {in_block=}": (
            partial(_dropped, set_to_none=to_none, last_in_block=in_block),
            (4.0, 4.0),
        )
        for to_none in (True, False)
        for in_block in (True, False)
    },
}


def _play(_: int, script: Callable[[Model], None], moves: bool) -> list[Any]:
    """What a rank holds after a script. ``moves``: backward puts gradients into their slots."""
    move_gradients_from(0 if moves else SMALLEST_MOVED_BYTES)
    model = wrap_reproducible([torch.ones(3), torch.ones(1)])
    script(model)
    logged_warnings.take()  # of several backward passes in one micro-batch, which are meant here
    return [None if grad is None else grad.tolist() for grad in get_gradients(model.module)]


@pytest.mark.parametrize("moves", [False, True])
def test_every_gradient_of_the_step_counts_once(moves: bool) -> None:
    found = run_cases(_play, 1, {name: (script, moves) for name, (script, _) in LEAVES.items()}, fresh=True)

    assert found == {name: [[[first] * 3, [second]]] for name, (_, (first, second)) in LEAVES.items()}


def _kept_gradients(_: int, count: int) -> tuple[list[Any], list[Any]]:
    """What was kept from every block and what the call left."""
    move_gradients_from(0)
    wrapped = wrap_reproducible([torch.ones(3)])
    kept = []
    for _ in range(2):
        wrapped.zero_grad()
        kept.clear()
        for value in range(count):
            with wrapped.no_sync():
                bring(wrapped.module, [torch.full((3,), float(value + 1))])
                kept += [parameter.grad for parameter in wrapped.parameters()]
        wrapped.all_reduce(sample_size=1)
    return [grad.tolist() for grad in kept], [parameter.grad.tolist() for parameter in wrapped.parameters()]


def test_gradients_kept_from_blocks_keep_their_values(transport: str) -> None:
    kept = {count: [[float(value + 1)] * 3 for value in range(count)] for count in (1, 2, 4)}

    assert run_cases(_kept_gradients, 2, {str(count): (count,) for count in kept}, fresh=True) == {
        str(count): [(values, [[count * (count + 1) / 2] * 3])] * 2 for count, values in kept.items()
    }

"""``absent_gradients="zeros"``: what no rank has becomes zeros, as in the class that this library succeeds."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.cases import all_bits, bits_of, get_gradients, sparse_of
from tests.helpers.comm_hooks import mean
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, error_of

Model = LegacyDistributedDataParallel
zeros_where_absent = partial(Model, absent_gradients="zeros")

STEPS = 6
# From 64 KiB on a gradient moves to its slot during backward, and an absent one is no gap that travels all the same.
SHAPES = ((3,), (130, 130), (5, 2), (7,))


def _parameters() -> nn.ParameterList:
    return nn.ParameterList([torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for shape in SHAPES])


def _loss(parameters: Sequence[torch.Tensor], rank: int, step: int, micro_batch: int) -> torch.Tensor:
    """A loss with whole numbers as gradients, so that every order of addition gives the same bits. Some layers are
    dropped, the same ones on all ranks or each rank's own."""
    common, own = Random(step), Random(f"{rank} {step} {micro_batch}")
    loss = torch.zeros(())
    for parameter in parameters:
        factor, shift = own.randrange(1, 17), own.randrange(17)
        is_kept = common.random() < 0.6 and own.random() < 0.8
        if is_kept:
            values = (torch.arange(parameter.numel()) * factor + shift) % 17 - 8
            loss = loss + (parameter * values.view_as(parameter).float()).sum()
    return loss


def _backward(loss: torch.Tensor) -> None:
    if loss.requires_grad:  # else all layers were dropped
        loss.backward()


DECAY = "momentum and weight decay"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=0.05),
    DECAY: partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {"gradient_as_bucket_view": False},
    "small pieces": {"buffer_size": 1000},
    "detail": {"checks": "detail"},
    "reproducible": {"reproducible": True},
}
MODES = (*OPTIONS, "views", "sample_size", "skip", "hook", "cleared in place")


def _train(rank: int, mode: str, optimizer: str) -> tuple[bool, bool, int]:
    """Whether the weights have the bits of the ancestor's rule after each step, whether None would give others, and how
    many gradients became zeros."""
    size = dist.get_world_size()
    module, theirs, nones = _parameters(), _parameters(), _parameters()
    model = zeros_where_absent(module, **OPTIONS.get(mode, {}))
    if mode == "hook":
        model.register_comm_hook(None, mean)
    steppers = [OPTIMIZERS[optimizer](each.parameters()) for each in (module, theirs, nones)]
    parts, are_equal, count = 2 if mode == "reproducible" else 1, True, 0
    is_weighted = mode in ("sample_size", "reproducible")
    for step in range(STEPS):
        is_left_out = [mode == "skip" and step % size == each for each in range(size)]
        items = [each + 1 if is_weighted else int(not is_left_out[each]) for each in range(size)]
        steppers[0].zero_grad(set_to_none=mode != "cleared in place")
        for part in range(parts - 1):
            with model.no_sync():
                _backward(_loss(module, rank, step, part))
        _backward(_loss(module, rank, step, parts - 1))
        model.all_reduce(**({"sample_size": items[rank]} if is_weighted else {"skip": is_left_out[rank]}))

        sums = _sum_of_ranks(list(theirs), [each for each in range(size) if items[each]], step, parts)
        for ours, at, none, total in zip(module, theirs, nones, sums, strict=True):
            at.grad = (torch.zeros_like(at) if total is None else total) / sum(items)
            none.grad = None if total is None else at.grad.clone()
            count += total is None
            are_equal &= bits_of(ours.grad) == bits_of(at.grad)
        for each in steppers:
            each.step()
        are_equal &= all_bits([*module]) == all_bits([*theirs])
    differs = any(not torch.equal(none, at) for none, at in zip(nones, theirs, strict=True))
    return are_equal, differs, count


def _sum_of_ranks(
    parameters: Sequence[torch.Tensor], ranks: Sequence[int], step: int, parts: int
) -> list[torch.Tensor | None]:
    """The sum of the gradients of these ranks; None where none of them has one."""
    losses = torch.stack([_loss(parameters, rank, step, part) for rank in ranks for part in range(parts)])
    if not losses.requires_grad:
        return [None] * len(parameters)
    return list(torch.autograd.grad(losses.sum(), parameters, allow_unused=True))


@pytest.mark.usefixtures("transport")
def test_zeros_for_absent_gradients_give_the_weights_of_the_ancestor() -> None:
    cases = {mode: (mode, "Adam") for mode in MODES}
    cases |= {f"{mode}, {DECAY}": (mode, DECAY) for mode in ("views", "copies")}
    for name, of_ranks in run_cases(_train, 2, cases).items():
        for are_equal, differs, count in of_ranks:
            assert are_equal, name
            assert differs, name
            assert count > 3, name


class Two(nn.Module):
    """Two layers, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))


VIEWS = {"views": {}, "copies": {"gradient_as_bucket_view": False}}
NONE, ZERO = None, 0.0
MISSING = "zero_grad() is missing"


def _values(module: nn.Module) -> list[float | None]:
    """The first element of each gradient."""
    return [float(grad.flatten()[0]) if grad is not None and grad.numel() else None for grad in get_gradients(module)]


def _nobody_takes_part(rank: int, options: dict[str, Any]) -> list[Any]:
    model = zeros_where_absent(Two(), **options)
    model.module.a.sum().backward()
    skipped = model.all_reduce(skip=True).skipped, _values(model)
    model.module.a.sum().backward()
    return [*skipped, model.all_reduce(sample_size=0).skipped, _values(model)]


def _others_are_untouched(rank: int, options: dict[str, Any]) -> list[Any]:
    """Ignored and frozen parameters, an empty one, and what a rank that sits out has as its own gradient. The bytes
    are those of the first layer alone."""
    module = Two()
    module.ignored, module.frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    module.empty = nn.Parameter(torch.ones(1, 0))
    model = zeros_where_absent(module, ignore=["ignored"], **options)
    module.a.sum().backward()
    if rank:
        module.b.sum().backward()
    size_bytes = model.all_reduce(skip=rank == 1).payload_bytes
    return [_values(model), module.empty.grad is not None, size_bytes]


def _a_rank_has_left(rank: int, options: dict[str, Any]) -> list[Any]:
    model, found = zeros_where_absent(Two(), **options), []
    with model.join():
        for _ in range(2 - rank):
            model.zero_grad()
            model.module.a.sum().backward()
            model.all_reduce()
            found.append(_values(model))
    return [found[0], found[-1]]


def _no_result_is_seen_in_zeros(rank: int, options: dict[str, Any]) -> list[Any]:
    """Turns of two optimizers that clear behind their step: backward adds to the zeros of the turn before."""
    model = zeros_where_absent(Two(), **options)
    first, second = (torch.optim.SGD([each], lr=0.5) for each in (model.module.a, model.module.b))
    said: list[Said] = []
    for _ in range(2):
        for parameter, optimizer in ((model.module.a, first), (model.module.b, second)):
            (parameter.sum() * (rank + 1)).backward()
            said.append(error_of(model.all_reduce, sample_size=2))
            said.append(error_of(optimizer.step))
            optimizer.zero_grad()
    return [said == [None] * 8, model.module.a.tolist(), model.module.b.tolist()]


def _a_result_beside_zeros_is_still_seen(rank: int, options: dict[str, Any]) -> list[Any]:
    """zero_grad() is missing, and one layer is never used."""
    module = Two()
    module.c = nn.Parameter(torch.ones(1))
    model, said = zeros_where_absent(module, **options), []
    for _ in range(2):
        (module.a.sum() + module.c.sum()).backward()
        said.append(error_of(model.all_reduce, sample_size=1))
    return [said[0], said[1] is not None and "a backward was added to it (2 of 3 parameters)" in said[1][1]]


# 1 from every rank is 1 as a mean; rank 1 skips, and its own gradient of b counts for nothing.
NEIGHBOURS: dict[str, tuple[Any, list[Any]]] = {
    "nobody takes part": (_nobody_takes_part, [True, [NONE, NONE], True, [NONE, NONE]]),
    "ignored, frozen, left out": (_others_are_untouched, [[1.0, ZERO, NONE, NONE, NONE], True, 8]),
    "a rank has left": (_a_rank_has_left, [[1.0, ZERO], [1.0, ZERO]]),
    # 1 - 0.5 * (1 + 2) / 4, twice
    "turns": (_no_result_is_seen_in_zeros, [True, [0.25] * 2, [0.25] * 3]),
    MISSING: (_a_result_beside_zeros_is_still_seen, [None, True]),
}


def _neighbour(rank: int, name: str, kind: str) -> Any:
    return NEIGHBOURS[name][0](rank, VIEWS[kind])


@pytest.mark.usefixtures("transport")
def test_only_what_no_rank_has_becomes_zeros_and_no_check_takes_them_for_anything() -> None:
    cases = {f"{name}, {kind}": (name, kind) for name in NEIGHBOURS for kind in VIEWS}
    del cases[f"{MISSING}, copies"]  # a device does not tell: docs/devices.md
    found = run_cases(_neighbour, 2, cases)
    for case, (name, _) in cases.items():
        for of_rank in found[case]:
            expected = NEIGHBOURS[name][1]
            if name == "a rank has left" and of_rank is found[case][0]:
                expected = [[1.0, ZERO], [0.5, ZERO]]  # who left counts as zeros
            assert of_rank == expected, case


def _kinds_after(model: Model) -> str:
    """The kinds of the gradients that a call without any leaves."""
    model.zero_grad()
    model.all_reduce()
    kinds = {None: "none", True: "sparse", False: "dense"}
    return " ".join(kinds[None if grad is None else grad.is_sparse] for grad in get_gradients(model))


def _once_sparse(rank: int, kind: str) -> list[str]:
    """A sparse gradient of rank 0 alone; afterwards without one, after a new plan of rank 1 alone, and in a copy."""
    model = zeros_where_absent(nn.ParameterDict({"words": torch.ones(5, 2), "z": torch.ones(2)}), **VIEWS[kind])
    found = [_kinds_after(model)]
    model.zero_grad()
    if rank == 0:
        model.module["words"].grad = sparse_of([1], torch.ones(1, 2))
    model.all_reduce()
    found += ["sparse" if model.module["words"].grad.is_sparse else "dense", _kinds_after(model)]
    if rank == 1:
        model.module["words"] = nn.Parameter(model.module["words"].detach().clone())
    found.append(_kinds_after(model))
    return [*found, _kinds_after(copy.deepcopy(model))]


@pytest.mark.usefixtures("transport")
@pytest.mark.unsimulated("it has no sparse tensors")
def test_what_was_ever_sparse_stays_none_on_all_ranks() -> None:
    for found in run_cases(_once_sparse, 2, {kind: (kind,) for kind in VIEWS}).values():
        assert found == [["dense dense", "sparse", "none dense", "none dense", "dense dense"]] * 2


def _sparse_on_a_part(rank: int) -> list[str]:
    """Ranks 0 and 1 see a sparse gradient on a group without rank 2."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = zeros_where_absent(nn.ParameterDict({"words": torch.ones(5, 2), "z": torch.ones(2)}))
    model.process_group = groups[rank // 2]
    if rank < 2:
        model.module["words"].grad = sparse_of([1], torch.ones(1, 2))
    model.all_reduce()
    found = [_kinds_after(model)]
    model.process_group = dist.group.WORLD
    return [*found, _kinds_after(model)]


@pytest.mark.unsimulated("it has no sparse tensors")
def test_what_was_sparse_on_another_group_is_equal_on_all_ranks_of_this_one() -> None:
    found = run_ranks(_sparse_on_a_part, 3)

    assert found == [["none dense", "dense dense"]] * 2 + [["dense dense", "dense dense"]]

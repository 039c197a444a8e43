"""Models of equal shapes that ranks wrap, or reduce, in another order: an error before a value is copied."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from legacy_ddp import LayoutError, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.shared_jobs import run_cases


class Student(nn.Linear):
    """A model."""


class Teacher(nn.Linear):
    """Another model, with parameters of the same names and shapes."""


def _one_by_one(act: Callable[[nn.Module], object], modules: list[nn.Module]) -> None:
    for module in modules:
        act(module)


def _wrap_in_lists(module: nn.Module) -> None:
    LegacyDistributedDataParallel(nn.Sequential(nn.ModuleDict({"net": module}), nn.Tanh()))


def _wrap_variants(module: nn.Module) -> None:
    """Compiled, beside a copy, and with a parametrization, which gives every module a class of its own."""
    compiled = torch.compile(module, backend="eager")
    own = parametrize.register_parametrization(type(module)(2, 2), "weight", nn.Identity())
    LegacyDistributedDataParallel(nn.Sequential(compiled, copy.deepcopy(module), nn.Sequential(), own))


def _wrap_and_broadcast(modules: list[nn.Module]) -> None:
    """Copies have no number on the group, as before the constructor."""
    by_class = sorted(modules, key=lambda module: type(module).__name__)
    models = {type(module): LegacyDistributedDataParallel(module, init_sync=False) for module in by_class}
    copies = [copy.deepcopy(models[type(module)]) for module in modules]
    try:
        for model in copies:
            model.broadcast_parameters()
    finally:  # what the copies hold
        for module, model in zip(modules, copies, strict=True):
            module.load_state_dict(model.module.state_dict())


_wrap_without_sync = partial(LegacyDistributedDataParallel, init_sync=False, checks="off")
_WAYS: dict[str, tuple[Callable[[list[nn.Module]], None], str]] = {
    "wrapped": (partial(_one_by_one, LegacyDistributedDataParallel), "{}"),
    "without init_sync and checks": (partial(_one_by_one, _wrap_without_sync), "{}"),
    "in lists": (partial(_one_by_one, _wrap_in_lists), "Sequential(ModuleDict({}), Tanh)"),
    "variants": (partial(_one_by_one, _wrap_variants), "Sequential({0}, Sequential(), Parametrized{0})"),
    "copies": (_wrap_and_broadcast, "{}"),
    "the function": (partial(_one_by_one, all_reduce_gradients), "{}"),
}


def _in_order(rank: int, way: str, *, swapped: bool) -> tuple[str, list[float]]:
    """The error, and what the first weight of each model is afterwards, Student first."""
    modules = [Student(2, 2), Teacher(2, 2)]
    with torch.no_grad():
        for number, module in enumerate(modules):
            module.weight.fill_(10 * rank + number)
            module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.ones(2)
    said = ""
    try:
        _WAYS[way][0](modules[::-1] if swapped and rank == 1 else modules)
    except LayoutError as error:
        said = str(error)
    LegacyDistributedDataParallel(nn.Linear(1, 1))  # the group is still usable
    return said, [module.weight[0, 0].item() for module in modules]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_another_order_on_one_rank_is_told_with_the_classes_and_nothing_is_copied_and_the_same_is_silent(
    world_size: int,
) -> None:
    ways = {way: (way,) for way in _WAYS}
    for of_ranks in run_cases(partial(_in_order, swapped=False), world_size, ways).values():
        assert [error for error, _ in of_ranks] == [""] * world_size
    found = run_cases(partial(_in_order, swapped=True), world_size, ways)
    others = "rank 0 has" if world_size == 2 else "ranks 0, 2 have"

    for way, (_, text) in _WAYS.items():
        said = f"\n  class of the module: rank 1 has {text.format('Teacher')}; {others} {text.format('Student')}\n"
        assert all(said in error and error == found[way][0][0] for error, _ in found[way]), (way, found[way])
        assert [weights for _, weights in found[way]] == [[10.0 * rank, 10.0 * rank + 1] for rank in range(world_size)]

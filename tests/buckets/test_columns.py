"""Columns of a module: the same names and tensors as torch's own walk, for every tree of modules."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legacy_ddp._buckets.plan import ParameterWalk, parameter_columns
from tests.helpers.torch_versions import uses_torch_jit


def _expected(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_parameters(remove_duplicate=False))


def _found(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(zip(*parameter_columns(module), strict=True))


def _same(module: nn.Module) -> bool:
    expected, found = _expected(module), _found(module)
    return [name for name, _ in expected] == [name for name, _ in found] and all(
        one is other for (_, one), (_, other) in zip(expected, found, strict=True)
    )


@given(st.data())
def test_random_trees(data: st.DataObject) -> None:
    """Trees with shared modules, shared parameters, and places without a module or a parameter."""
    modules: list[nn.Module] = []
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 8))):
        module = nn.Module()
        for name in data.draw(st.lists(st.sampled_from("abc"), unique=True)):
            module.register_parameter(name, data.draw(st.sampled_from([*parameters, None])))
        for name in data.draw(st.lists(st.sampled_from("xyz"), unique=True)):
            module.add_module(name, data.draw(st.sampled_from([*modules, None])))
        modules.append(module)

    assert _same(modules[-1])


class _Renamed(nn.Linear):
    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*given, **named):
            yield f"renamed.{name}", parameter


class _Hidden(nn.Linear):
    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from ()


@pytest.mark.parametrize("kind", [_Renamed, _Hidden])
@pytest.mark.parametrize("is_inside", [False, True])
def test_modules_with_a_walk_of_their_own(kind: type[nn.Module], *, is_inside: bool) -> None:
    module: nn.Module = kind(2, 2)
    assert _same(nn.Sequential(nn.Linear(2, 2), module) if is_inside else module)


def test_a_walk_of_an_instance() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].named_modules = lambda *_, **__: iter([])
    assert _same(module)
    assert len(_found(module)) == 2


@uses_torch_jit
def test_scripted_and_compiled_modules() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    assert _same(torch.compile(module))
    assert [name for name, _ in _found(torch.jit.script(module))] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameters_that_change_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert len(_found(module)) == 4

    module[1].weight = nn.Parameter(torch.zeros(2, 2))
    module[0].bias = None
    module.append(nn.Linear(2, 2, bias=False))

    assert _same(module)
    assert len(_found(module)) == 4


def _moves_a_name(net: nn.Sequential) -> None:
    """The names of all modules end to end stay the same, and the names of the parameters do not."""
    net[1].register_parameter("scale", net[0]._parameters.pop("scale"))


def _fills_the_other_place(net: nn.Sequential) -> None:
    net[2].first, net[2].second = None, net[2].first


def _replaces(net: nn.Sequential) -> None:
    net[0].scale = nn.Parameter(torch.ones(1))


def _removes(net: nn.Sequential) -> None:
    del net[0].scale


def _adds(net: nn.Sequential) -> None:
    net.append(nn.Linear(1, 1, bias=False))


def _empties(net: nn.Sequential) -> None:
    net[0].scale = None


def _renames(net: nn.Sequential) -> None:
    net._modules = {f"layer{name}": child for name, child in net._modules.items()}


def _hides(net: nn.Sequential) -> None:
    net[2].__class__ = _RenamedModule


class _RenamedModule(nn.Module):
    named_parameters = _Renamed.named_parameters


@pytest.mark.parametrize(
    "change", [_moves_a_name, _fills_the_other_place, _replaces, _removes, _adds, _empties, _renames, _hides]
)
def test_a_kept_walk_notices_every_change_of_the_tree(change: Callable[[nn.Sequential], None]) -> None:
    net = nn.Sequential(nn.Module(), nn.Module(), nn.Module())
    net[0].register_parameter("scale", nn.Parameter(torch.zeros(1)))
    net[2].add_module("first", nn.Linear(1, 1))
    net[2].add_module("second", None)
    walk = ParameterWalk()
    before = walk.columns(net)
    assert walk.columns(net).names is before.names

    change(net)

    expected = _expected(net)
    for names, tensors in (walk.columns(net), walk.columns(net)):
        assert list(names) == [name for name, _ in expected]
        assert all(one is other for one, (_, other) in zip(tensors, expected, strict=True))

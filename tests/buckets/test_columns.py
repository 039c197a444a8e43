"""Columns of a module: the same names and tensors as torch's own walk, for every tree of modules."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legacy_ddp._buckets.columns import parameter_columns
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

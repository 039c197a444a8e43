"""Plans: a call reduces the parameters that torch's own walk finds, and no call keeps a plan that does not fit."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from legacy_ddp import GradientError, LegacyDistributedDataParallel
from legacy_ddp._memory.layout import Layout, distinct, plan_layout
from legacy_ddp._settings import Settings
from tests.helpers.small_models import add_gradients, step, wrap
from tests.helpers.tiers import thorough
from tests.helpers.torch_versions import uses_torch_jit

pytestmark = pytest.mark.usefixtures("alone_in_module")

# The same names and tensors as in torch's own walk, for every tree of modules


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def _assert_reduces_all(
    model: LegacyDistributedDataParallel, others: list[nn.Parameter], ignored: Collection[nn.Parameter] = ()
) -> None:
    """A call halves the gradients of all parameters of the module but the ``ignored``, and of no other parameter."""
    found = {id(parameter) for parameter in model.module.parameters()} - {*map(id, ignored)}
    every = [*model.module.parameters(), *others]
    for parameter in every:
        parameter.grad = torch.ones_like(parameter)
    model.all_reduce(sample_size=2)
    assert all(parameter.grad.unique().item() == (0.5 if id(parameter) in found else 1.0) for parameter in every)


def _assert_same(module: nn.Module, others: list[nn.Parameter]) -> None:
    """The walk of the library finds what torch's own finds. One of several names is enough to ignore a parameter."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for names in ([], [*named][-1:], [*named]):
        model = LegacyDistributedDataParallel(module, ignore=names)
        _assert_reduces_all(model, others, [named[name] for name in names])


@given(st.data())
def test_random_trees(data: st.DataObject) -> None:
    """Trees with shared modules, shared parameters, and places without a module or a parameter."""
    modules: list[nn.Module] = []
    parameters = [_parameter() for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 8))):
        module = nn.Module()
        for name in data.draw(st.lists(st.sampled_from("abc"), unique=True)):
            module.register_parameter(name, data.draw(st.sampled_from([*parameters, None])))
        for name in data.draw(st.lists(st.sampled_from("xyz"), unique=True)):
            module.add_module(name, data.draw(st.sampled_from([*modules, None])))
        modules.append(module)

    _assert_same(modules[-1], parameters)


class _Renamed(nn.Linear):
    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*given, **named):
            yield f"renamed.{name}", parameter


class _Hidden(nn.Linear):
    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from ()


def _with_a_walk_of_an_instance() -> nn.Module:
    module = nn.Linear(2, 2)
    module.named_modules = lambda *_, **__: iter([])  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("make", [lambda: _Renamed(2, 2), lambda: _Hidden(2, 2), _with_a_walk_of_an_instance])
@pytest.mark.parametrize("is_inside", [False, True])
def test_modules_with_a_walk_of_their_own(make: Callable[[], nn.Module], *, is_inside: bool) -> None:
    module = make()
    _assert_same(nn.Sequential(nn.Linear(2, 2), module) if is_inside else module, [*module._parameters.values()])


@uses_torch_jit
@pytest.mark.parametrize("change", [thorough(torch.compile), torch.jit.script])
def test_scripted_and_compiled_modules(change: Callable[[nn.Module], nn.Module]) -> None:
    module = change(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert len([*module.parameters()]) == 4
    _assert_same(module, [])


# Changes between calls, and moments that change nothing


class _HiddenModule(nn.Module):
    named_modules = _Hidden.named_modules


def _assert_names_all(model: LegacyDistributedDataParallel) -> None:
    """The error for a gradient that cannot be reduced has the name of its parameter."""
    for name, parameter in model.module.named_parameters():
        kept, parameter.grad = parameter.grad, torch.ones_like(parameter, requires_grad=True)
        with pytest.raises(GradientError) as caught:
            model.all_reduce()
        assert caught.value.parameter == name
        parameter.grad = kept


CHANGES: dict[str, Callable[[Any], Any]] = {
    # The names of all modules end to end stay the same, and the names of the parameters do not.
    "moves a name": lambda net: net[1].register_parameter("scale", net[0]._parameters.pop("scale")),
    "fills the other place": lambda net: net[2]._modules.update(first=None, second=net[2].first),
    "empties": lambda net: setattr(net[0], "scale", None),
    "renames": lambda net: setattr(net, "_modules", {f"layer{name}": child for name, child in net._modules.items()}),
    "hides": lambda net: setattr(net[2], "__class__", _HiddenModule),
    # Another shape, with the same elements in a row.
    "turns": lambda net: setattr(net[2].first.weight, "data", net[2].first.weight.data.view(1, 2)),
    "changes class": lambda net: setattr(net[2].first.weight, "__class__", type("Own", (nn.Parameter,), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_notices_every_change_of_the_tree(change: str) -> None:
    net = nn.Sequential(nn.Module(), nn.Module(), nn.Module())
    net[0].register_parameter("scale", _parameter())
    net[2].add_module("first", nn.Linear(1, 2))
    net[2].add_module("second", None)
    model = LegacyDistributedDataParallel(net)
    before = [*net.parameters()]
    _assert_reduces_all(model, [])

    CHANGES[change](net)

    for _ in range(2):
        _assert_reduces_all(model, before)
        _assert_names_all(model)
        # The text is that of a plan which is made now.
        assert repr(model) == repr(LegacyDistributedDataParallel(net))


MOMENTS: dict[str, Callable[[], Any]] = {
    "as it was": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_at_another_moment_and_with_other_values_the_plan_and_its_memory_are_the_same(name: str) -> None:
    model = wrap()
    weight = model.module.weight
    step(model, 1.0)
    place = weight.grad.data_ptr()
    with torch.no_grad():
        weight.mul_(2)
    weight.data = torch.zeros(1, 2)

    for _ in range(2):
        model.zero_grad(set_to_none=False)
        add_gradients(model, 3.0)
        with MOMENTS[name]():
            model.all_reduce()
        assert weight.grad.data_ptr() == place


# Devices of ranks


def test_devices_are_numbered_by_order_and_not_by_index() -> None:
    def layout(first: int) -> Layout:
        with FakeTensorMode():  # torch's own stand-in for tensors on devices that this machine lacks
            devices = [f"cuda:{first}", f"cuda:{first + 1}", f"cuda:{first}"]
            tensors = [torch.zeros(2, device=device, requires_grad=True) for device in devices]
        return plan_layout(distinct([(f"p{i}", tensor) for i, tensor in enumerate(tensors)]), Settings())

    assert layout(0).fingerprint == layout(4).fingerprint
    assert [len(bucket.slots) for bucket in layout(4).buckets] == [2, 1]
    assert "on cuda#1" in layout(4).inventory["parameter 'p1'"]

"""Plans: columns of parameters, layouts, and the signature that tells whether a plan still fits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter
from torch.utils import swap_tensors

from legacy_ddp._memory import plan as signature_module
from legacy_ddp._memory.layout import (
    Bucket,
    Layout,
    Slot,
    cut_runs,
    distinct,
    plan_layout,
)
from legacy_ddp._memory.plan import (
    ParameterWalk,
    Signature,
    columns,
    parameter_columns,
)
from legacy_ddp._settings import Settings
from tests.helpers.torch_versions import needs_grad_dtype, uses_torch_jit

# Columns of a module: the same names and tensors as torch's own walk, for every tree of modules


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


# Layouts: every gradient has the same place on every rank with the same names


def _plan(*named: tuple[str, torch.Tensor]) -> Layout:
    return plan_layout(distinct(named), Settings())


def _parameter(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trainable)


def _bucket(*numels: int) -> Bucket:
    offsets = [sum(numels[:index]) for index in range(len(numels))]
    slots = [Slot(f"p{i}", torch.Size([n]), (1,), o, n) for i, (n, o) in enumerate(zip(numels, offsets, strict=True))]
    return Bucket(torch.device("cpu"), torch.float32, tuple(slots), sum(numels))


def test_slots_follow_each_other_in_name_order() -> None:
    (bucket,) = _plan(("b", _parameter(2, 3)), ("a", _parameter(4)), ("c", _parameter())).buckets

    assert [(slot.name, slot.offset, slot.numel) for slot in bucket.slots] == [("a", 0, 4), ("b", 4, 6), ("c", 10, 1)]
    assert bucket.numel == 11


def test_the_order_of_registration_does_not_matter() -> None:
    named = [("b", _parameter(2)), ("a", _parameter(2, dtype=torch.float64)), ("c", _parameter(2, trainable=False))]

    assert _plan(*named).fingerprint == _plan(*reversed(named)).fingerprint


def test_every_dtype_has_a_bucket_of_its_own() -> None:
    layout = _plan(("a", _parameter(2, dtype=torch.bfloat16)), ("b", _parameter(2)), ("c", _parameter(1)))

    assert [(bucket.dtype, bucket.numel) for bucket in layout.buckets] == [(torch.bfloat16, 2), (torch.float32, 3)]


def test_a_tied_parameter_has_one_slot_under_its_smallest_name() -> None:
    tied = _parameter(2)
    layout = _plan(("z.weight", tied), ("a.weight", tied))

    assert [slot.name for slot in layout.slots] == ["a.weight"]
    assert "shared with z.weight" in layout.inventory["parameter 'a.weight'"]


@pytest.mark.parametrize(
    "change",
    [
        ("p", _parameter(3)),
        ("p", _parameter(2, dtype=torch.float64)),
        ("p", _parameter(2, trainable=False)),
        ("q", _parameter(2)),
    ],
)
def test_any_difference_shows_in_the_fingerprint(change: tuple[str, torch.Tensor]) -> None:
    assert _plan(change).fingerprint != _plan(("p", _parameter(2))).fingerprint


def test_settings_that_ranks_must_share_show_in_the_fingerprint() -> None:
    parameters = distinct([("p", _parameter(2))])
    prints = {
        plan_layout(parameters, settings).fingerprint
        for settings in (Settings(), Settings(buffer_size=5), Settings(reduce_dtype=torch.bfloat16))
    }
    assert len(prints) == 3


def test_devices_are_numbered_by_order_and_not_by_index() -> None:
    def layout(first: int) -> Layout:
        with FakeTensorMode():  # torch's own stand-in for tensors on devices that this machine lacks
            devices = [f"cuda:{first}", f"cuda:{first + 1}", f"cuda:{first}"]
            tensors = [torch.zeros(2, device=device, requires_grad=True) for device in devices]
        return _plan(*((f"p{i}", tensor) for i, tensor in enumerate(tensors)))

    assert layout(0).fingerprint == layout(4).fingerprint
    assert [len(bucket.slots) for bucket in layout(4).buckets] == [2, 1]
    assert "on cuda#1" in layout(4).inventory["parameter 'p1'"]


@pytest.mark.parametrize("names", [{"a"}, {"b"}, {"a", "b"}])
def test_ignoring_one_name_of_a_tied_parameter_ignores_it(names: set[str]) -> None:
    tied = _parameter(2)

    assert [item.name for item in distinct([("a", tied), ("b", tied), ("c", _parameter(1))], names)] == ["c"]


@pytest.mark.parametrize(
    "tensor, words",
    [
        (nn.parameter.UninitializedParameter(), "is not initialised yet"),
        (nn.Parameter(torch.zeros(2, device="meta")), "is on the meta device"),
        (nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn)), "dtype torch.float8_e4m3fn"),
        (torch.zeros(2, requires_grad=True) * 2, "is computed from other tensors"),
    ],
)
def test_a_parameter_without_a_place_is_named(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        _plan(("layer.weight", tensor))
    assert "parameter 'layer.weight'" in str(caught.value)


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    assert _plan(("p", _parameter(2, dtype=torch.uint8, trainable=False))).buckets == ()


@pytest.mark.parametrize(
    "present, max_gap, runs",
    [
        ([1, 1, 1, 1], 0, [(0, 10)]),
        ([1, 0, 1, 1], 0, [(0, 1), (3, 10)]),
        ([1, 0, 1, 1], 2, [(0, 10)]),
        ([1, 0, 0, 1], 4, [(0, 1), (6, 10)]),
        ([1, 0, 0, 1], 5, [(0, 10)]),
        ([0, 1, 0, 0], 9, [(1, 3)]),
        ([0, 0, 0, 0], 9, []),
    ],
)
def test_runs_join_present_slots_over_small_gaps(present: list[int], max_gap: int, runs: list[tuple[int, int]]) -> None:
    assert _bucket(1, 2, 3, 4).runs([bool(p) for p in present], max_gap=max_gap) == runs


def test_an_empty_slot_starts_no_run() -> None:
    assert _bucket(2, 0, 2).runs([False, True, False]) == []


def test_long_runs_are_cut() -> None:
    assert cut_runs([(0, 5), (7, 9)], max_numel=2) == [(0, 2), (2, 4), (4, 5), (7, 9)]


# Signatures: every change of the parameters that a plan depends on is noticed, and no other change

Named = list[tuple[str, torch.Tensor]]


def _named() -> Named:
    tied = nn.Parameter(torch.ones(3))
    return [("a", nn.Parameter(torch.ones(2, 2))), ("b", tied), ("c", tied), ("d", nn.Parameter(torch.ones(4, 1)))]


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


class _Subclass(nn.Parameter):
    pass


def _change_class(tensor: torch.Tensor) -> None:
    tensor.__class__ = _Subclass


CHANGES: dict[str, Callable[[Named], object]] = {
    "another name": lambda named: named.__setitem__(0, ("e", named[0][1])),
    "another tensor": lambda named: named.__setitem__(0, ("a", nn.Parameter(torch.ones(2, 2)))),
    "one more": lambda named: named.append(("e", nn.Parameter(torch.ones(1)))),
    "one less": lambda named: named.pop(),
    "another order": lambda named: named.reverse(),
    "untied": lambda named: named.__setitem__(2, ("c", nn.Parameter(torch.ones(3)))),
    "tied": lambda named: named.__setitem__(0, ("a", named[1][1])),
    "frozen": lambda named: named[0][1].requires_grad_(False),
    "dtype": lambda named: _set_data(named[0][1], torch.ones(2, 2).double()),
    "device": lambda named: swap_tensors(named[0][1], nn.Parameter(torch.ones(2, 2, device="meta"))),
    "shape": lambda named: _set_data(named[0][1], named[0][1].data.view(4)),
    "shape, same elements in a row": lambda named: _set_data(named[3][1], named[3][1].data.view(1, 4)),
    "strides": lambda named: _set_data(named[0][1], named[0][1].data.t()),
    "gradient's dtype": lambda named: setattr(named[0][1], "grad_dtype", torch.float64),
    "class": lambda named: _change_class(named[0][1]),
    "lazy": lambda named: named.__setitem__(0, ("a", UninitializedParameter())),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_grad_dtype) if name == "gradient's dtype" else name for name in CHANGES]
)
def test_change_is_noticed(name: str) -> None:
    named = _named()
    signature = Signature(*columns(named))

    CHANGES[name](named)

    assert not signature.matches(*columns(named))


MOMENTS: dict[str, Callable[[], object]] = {
    "as it was": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_same_parameters_at_another_moment_are_the_same(name: str) -> None:
    named = _named()
    signature = Signature(*columns(named))

    with MOMENTS[name]():  # type: ignore[attr-defined]
        assert signature.matches(*columns(named))
        assert signature.matches(*columns(named))
        assert not signature.matches(*columns(_named()))
    assert signature.matches(*columns(named))


def test_values_gradients_and_versions_do_not_matter() -> None:
    named = _named()
    signature = Signature(*columns(named))

    with torch.no_grad():
        named[0][1].mul_(2)
    named[0][1].sum().backward()
    named[1][1].data = torch.zeros(3)

    assert signature.matches(*columns(named))


def test_lazy_parameter_that_gets_its_shape_is_a_change_and_one_that_does_not_hides_none() -> None:
    lazy = UninitializedParameter()
    named = [*_named(), ("lazy", lazy)]
    signature = Signature(*columns(named))
    assert signature.matches(*columns(named))

    lazy.materialize((2,))
    assert not signature.matches(*columns(named))

    named = [*_named(), ("lazy", UninitializedParameter())]
    signature = Signature(*columns(named))
    named[0][1].requires_grad_(False)
    assert not signature.matches(*columns(named))


def test_no_parameters_at_all() -> None:
    signature = Signature([], [])

    assert signature.matches([], [])
    assert not signature.matches(*columns(_named()))


def test_tied_parameters_are_compared_as_quickly_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    named = _named()
    signature = Signature(*columns(named))
    monkeypatch.setattr(signature_module, "_facts", lambda _: pytest.fail("asked each parameter for everything"))

    assert signature.matches(*columns(named))

"""check_replicas() finds one wrong bit in any kind of replica state, and nothing in equal state."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import ReplicaReport, check_replicas
from tests.helpers.replica_scenes import elements_of, flip_lowest, holding, names_of, reports

HERE = "tests.debug.test_check_replicas"
LONG = "a_layer_with_a_name_of_forty_characters_"


def _look(
    deviates: bool, rank: int, make: Callable[[], Any], change: Callable[[Any], object], **arguments: Any
) -> ReplicaReport:
    """At the module that ``make`` gives; ``change`` is what a rank does to it that deviates."""
    model = make()
    if deviates:
        change(model)
    return check_replicas(model, **arguments)


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(6).view(2, 3).to(dtype)


_FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
_INTEGRAL = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
TENSORS: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    **{str(dtype): (partial(_numbers, dtype), (1, 2)) for dtype in (*_FLOATING, *_INTEGRAL)},
    "one number": (lambda: torch.tensor(2.0), ()),
    "transposed": (lambda: torch.arange(6.0).view(3, 2).t(), (1, 2)),
    "channels last": (lambda: torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last), (1, 2, 0, 1)),
    "every other": (lambda: torch.arange(12.0)[::2], (4,)),
    "odd number of bytes": (lambda: torch.ones(7, dtype=torch.float16), (6,)),
    "NaNs": (lambda: torch.full((3,), float("nan")), (1,)),
    "a long one": (lambda: torch.zeros(100_003), (99_999,)),
}
BITS = {
    name: partial(_look, make=lambda make=make: holding(it=make()), change=lambda m, at=place: flip_lowest(m.it, at))
    for name, (make, place) in TENSORS.items()
}


@pytest.mark.parametrize("name", TENSORS)
def test_one_bit_is_found_at_its_place(name: str) -> None:
    seen = reports(f"{HERE}:BITS", 3, 0)[name]

    (element,) = elements_of(seen)
    assert names_of(seen) == (element.thing,)
    assert element.thing in ("parameter 'it'", "buffer 'it'")
    assert (element.rank, element.count, element.index) == (0, 1, TENSORS[name][1])
    assert (element.kind, element.bit) == ("one bit", 0)
    assert seen.ranks == (0,)
    alike = reports(f"{HERE}:BITS", 3, 0, 1, 2)[name]
    assert (alike.identical, alike.ranks, alike.phase, names_of(alike)) == (True, (), "", ())
    assert "replicas are identical" in str(alike)


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def _net_with_gradients() -> nn.Sequential:
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def _with_gradient(gradient: torch.Tensor) -> nn.Module:
    model = holding(it=torch.ones(gradient.shape))
    model.it.grad = gradient
    return model


def _tied() -> nn.Module:
    model = holding(a=torch.ones(2))
    model.b = model.a
    return model


def _thousand() -> nn.Module:
    return holding(**{f"p{index:03d}": torch.full((2,), float(index)) for index in range(1000)})


def _change_statistics(model: Any) -> None:
    model[1].running_mean[0] = model[1].running_var[0] = 7.0


def _sparse(value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[1, 3]], torch.full((2, 2), value), (5, 2), check_invariants=True)


# Name -> the module, what deviates in it, what is named
DIFFERENCES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], list[str]]] = {
    "frozen": (lambda: net().requires_grad_(False), lambda model: model[2].bias.fill_(2.0), ["parameter '2.bias'"]),
    "tied": (_tied, lambda model: flip_lowest(model.b, (1,)), ["parameter 'a'"]),
    "long name": (
        lambda: holding(**{LONG: torch.ones(3, 4, 5)}),
        lambda model: flip_lowest(model.get_parameter(LONG), (2, 3, 4)),
        [f"parameter '{LONG}'"],
    ),
    "unused": (_net_with_gradients, lambda model: setattr(model[0].bias, "grad", None), ["gradient of '0.bias'"]),
    "gradient": (_net_with_gradients, lambda m: flip_lowest(m[2].weight.grad, (0, 1)), ["gradient of '2.weight'"]),
    "expanded gradient": (
        lambda: _with_gradient(torch.ones(1, 1).expand(3, 2)),
        lambda model: setattr(model.it, "grad", torch.full((1, 1), 2.0).expand(3, 2)),
        ["gradient of 'it'"],
    ),
    "sparse gradient": (
        lambda: _with_gradient(_sparse(1.0)),
        lambda model: setattr(model.it, "grad", _sparse(2.0)),
        ["gradient of 'it'"],
    ),
    "sparse here, dense there": (
        lambda: _with_gradient(torch.eye(2)),
        lambda model: setattr(model.it, "grad", torch.eye(2).to_sparse()),
        ["gradient of 'it'"],
    ),
    "integer buffer": (net, lambda model: model[1].num_batches_tracked.add_(1), ["buffer '1.num_batches_tracked'"]),
    "both buffers": (net, _change_statistics, ["buffer '1.running_mean'", "buffer '1.running_var'"]),
    "missing": (net, lambda model: setattr(model[2], "bias", None), ["parameter '2.bias'", "gradient of '2.bias'"]),
    "cast": (net, lambda model: model[2].double(), ["parameter '2.bias'", "parameter '2.weight'"]),
    "one in a thousand": (_thousand, lambda model: flip_lowest(model.p617, (1,)), ["parameter 'p617'"]),
}
ONE_DEVIATES = {name: partial(_look, make=make, change=change) for name, (make, change, _) in DIFFERENCES.items()}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named(name: str) -> None:
    *_, names = DIFFERENCES[name]
    phase = {"parameter": "unknown", "gradient": "gradients", "buffer": "buffers"}[names[0].partition(" ")[0]]
    seen = reports(f"{HERE}:ONE_DEVIATES", 3, 1)[name]

    assert (list(names_of(seen)), seen.phase, seen.ranks) == (names, phase, (1,)), str(seen)
    assert reports(f"{HERE}:ONE_DEVIATES", 3, 0, 1, 2)[name].identical


def _asks_to_ignore() -> nn.Sequential:
    model = net()
    model._ddp_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]  # type: ignore[assignment]
    return model


def _change_ignored(model: Any) -> None:
    flip_lowest(model[0].weight, (0, 0))
    model[1].running_mean[0] = 7.0


def _matrix() -> torch.Tensor:
    return torch.arange(6.0).view(3, 2).t()


FREEDOMS = {
    "strides": partial(
        _look,
        make=lambda: holding(it=_matrix().contiguous()),
        change=lambda model: model.register_parameter("it", nn.Parameter(_matrix())),
    ),
    "no elements": partial(_look, make=lambda: holding(it=torch.ones(0, 3), other=torch.ones(2)), change=id),
    "no tensors": partial(_look, make=nn.Identity, change=id),
    "order": partial(
        _look,
        make=lambda: holding(a=torch.ones(2), b=torch.zeros(2)),
        change=lambda model: model._parameters.update(a=model._parameters.pop("a")),
    ),
    "asked to ignore": partial(_look, make=_asks_to_ignore, change=_change_ignored),
    "local buffers": partial(_look, make=net, change=_change_statistics, local_buffers=["1.running_mean", "*_var"]),
    "mode": partial(_look, make=net, change=nn.Module.eval),
    "random numbers": partial(_look, make=net, change=lambda _: torch.manual_seed(99)),
}


@pytest.mark.parametrize("name", FREEDOMS)
def test_what_a_rank_may_hold_alone_is_no_difference(name: str) -> None:
    seen = reports(f"{HERE}:FREEDOMS", 3, 0)[name]

    assert (seen.identical, names_of(seen), seen.ranks) == (True, (), ())


def _all_kinds_differ(deviates: bool, rank: int, what: tuple[str, ...]) -> ReplicaReport:
    model = _net_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if deviates else 0.25)
    if deviates:
        for parameter in model.parameters():
            parameter.grad *= 2
        flip_lowest(model[0].weight, (0, 0))
        model[1].running_mean[0] = 7.0
    return check_replicas(model, optimizer, what)


# Of _net: 2 + 2 + 2 parameters, running_mean, running_var and num_batches_tracked; SGD has 9 settings a group, and each
# parameter is in a group.
_COUNTS = {"parameters": 6, "buffers": 3, "gradients": 6, "optimizer": 9 + 6}
_DIFFERING = {"parameters": 1, "buffers": 1, "gradients": 6, "optimizer": 1}
WHATS = [("parameters",), ("buffers",), ("gradients",), ("optimizer",), ("parameters", "optimizer"), tuple(_COUNTS)]
KINDS = {" and ".join(what): partial(_all_kinds_differ, what=what) for what in WHATS}


@pytest.mark.parametrize("what", WHATS)
def test_only_what_was_asked_for_is_compared(what: tuple[str, ...]) -> None:
    seen = reports(f"{HERE}:KINDS", 3, 2)[" and ".join(what)]

    assert seen.compared == {kind: count if kind in what else 0 for kind, count in _COUNTS.items()}
    assert len(names_of(seen)) == sum(_DIFFERING[kind] for kind in what)
    assert ("1 of 15 optimizer entries" in " ".join(str(seen).split())) == ("optimizer" in what)
    assert seen.ranks == (2,)
    assert seen.generators == ()


@pytest.mark.usefixtures("alone")
def test_a_parameter_without_a_gradient_is_not_counted_as_a_gradient() -> None:
    model = net()
    model[0].weight.grad = torch.ones_like(model[0].weight)

    report = check_replicas(model)

    assert report.compared["gradients"] == 1
    text = " ".join(str(report).split())
    assert text.endswith("replicas are identical: 1 rank, 6 parameters, 3 buffers, 1 gradient")  # nothing of generators
    assert report.notes == ()


@pytest.mark.usefixtures("alone")
def test_what_is_ignored_or_frozen_is_a_note() -> None:
    module = net()
    module[0].weight.grad = torch.ones_like(module[0].weight)
    module[0].weight.requires_grad_(False)
    model = LegacyDistributedDataParallel(module, ignore=["1.running_mean"])

    ignored, frozen = (
        "not compared: what ignore= names (1 of them)",
        "gradients not compared: those of frozen parameters (1 of them)",
    )
    assert check_replicas(model).notes == (ignored, frozen)
    assert check_replicas(module, what=["parameters"]).notes == ()


def _seeded(deviates: bool, rank: int, source: str) -> ReplicaReport:
    import numpy as np

    np.random.seed(1)
    torch.manual_seed(1)
    random.seed(1)
    if deviates:
        {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}[source](2 + rank)
    return check_replicas(holding(it=torch.ones(2)), what=["rng"])


SEEDED = {source: partial(_seeded, source=source) for source in ("torch", "python", "numpy")}


@pytest.mark.parametrize("source", SEEDED)
@pytest.mark.parametrize(
    "deviating, groups, words",
    [
        ((), ((0, 1, 2),), "random generators are equal on ranks 0-2"),
        ((1,), ((0, 2), (1,)), "random generators are equal on ranks 0, 2"),
        ((1, 2), ((0,), (1,), (2,)), "random generators differ on all ranks"),
    ],
)
def test_random_generators_are_reported_and_never_a_difference(
    source: str, deviating: tuple[int, ...], groups: tuple[tuple[int, ...], ...], words: str
) -> None:
    seen = reports(f"{HERE}:SEEDED", 3, *deviating)[source]

    assert (seen.identical, seen.generators) == (True, groups)
    assert words in " ".join(str(seen).split())

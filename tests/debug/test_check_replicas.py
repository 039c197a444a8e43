"""check_replicas() finds one wrong bit in any kind of replica state, and nothing in equal state."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import ReplicaReport, check_replicas
from tests.helpers.replica_scenes import flip_lowest, holding, observations
from tests.helpers.tiers import thorough

EVERYONE = {2: (0, 1), 3: (0, 1, 2)}
HERE = "tests.debug.test_check_replicas"
LONG = "a_layer_with_a_name_of_forty_characters_"


# One bit, of one element, of one tensor


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


def _with_a_bit(deviates: bool, rank: int, name: str) -> ReplicaReport:
    make, place = TENSORS[name]
    tensor = make()
    if deviates:
        flip_lowest(tensor, place)
    return check_replicas(holding(it=tensor))


BITS = {name: partial(_with_a_bit, name=name) for name in TENSORS}


@pytest.mark.parametrize("world_size, who", [thorough(2, 1), (3, 0)])
@pytest.mark.parametrize("name", TENSORS)
def test_one_bit_is_found_at_its_place(name: str, world_size: int, who: int) -> None:
    seen = observations(f"{HERE}:BITS", world_size, who)[name]

    (element,) = seen.elements
    assert seen.names == (element.thing,)
    assert element.thing in ("parameter 'it'", "buffer 'it'")
    assert (element.rank, element.count, element.index) == (who, 1, TENSORS[name][1])
    assert (element.kind, element.bit) == ("one bit", 0)
    assert seen.ranks == ((who,) if world_size > 2 else ())


@pytest.mark.parametrize("world_size", [thorough(2), 3])
@pytest.mark.parametrize("name", TENSORS)
def test_the_same_bit_on_all_ranks_is_identical(name: str, world_size: int) -> None:
    seen = observations(f"{HERE}:BITS", world_size, *EVERYONE[world_size])[name]

    assert (seen.identical, seen.ranks, seen.phase, seen.names) == (True, (), "", ())
    assert "replicas are identical" in seen.text


# One rank deviates: what differs, by its name


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def _fill_gradients(model: nn.Module, value: float = 1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def _frozen(deviates: bool, rank: int) -> ReplicaReport:
    model = _net().requires_grad_(False)
    model[2].bias.fill_(2.0 if deviates else 1.0)
    return check_replicas(model)


def _tied(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(a=torch.ones(2))
    model.b = model.a
    if deviates:
        flip_lowest(model.b, (1,))
    return check_replicas(model)


def _long_name(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(**{LONG: torch.ones(3, 4, 5)})
    if deviates:
        flip_lowest(model.get_parameter(LONG), (2, 3, 4))
    return check_replicas(model)


def _unused(deviates: bool, rank: int) -> ReplicaReport:
    model = _net()
    _fill_gradients(model)
    if deviates:
        model[0].bias.grad = None
    return check_replicas(model)


def _gradient(deviates: bool, rank: int) -> ReplicaReport:
    model = _net()
    _fill_gradients(model)
    if deviates:
        flip_lowest(model[2].weight.grad, (0, 1))
    return check_replicas(model)


def _expanded_gradient(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(3, 2))
    model.it.grad = torch.full((1, 1), 2.0 if deviates else 1.0).expand(3, 2)
    return check_replicas(model)


def _sparse_gradient(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(5, 2))
    value = 2.0 if deviates else 1.0
    model.it.grad = torch.sparse_coo_tensor([[1, 3]], torch.full((2, 2), value), (5, 2), check_invariants=True)
    return check_replicas(model)


def _sparse_here_dense_there(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(2, 2))
    dense = torch.eye(2)
    model.it.grad = dense.to_sparse() if deviates else dense
    return check_replicas(model)


def _integer_buffer(deviates: bool, rank: int) -> ReplicaReport:
    model = _net()
    model[1].num_batches_tracked += 1 if deviates else 2
    return check_replicas(model)


def _buffers_of_two_kinds(deviates: bool, rank: int, **arguments: object) -> ReplicaReport:
    model = _net()
    if deviates:
        model[1].running_mean[0] = 7.0
        model[1].running_var[0] = 7.0
    return check_replicas(model, **arguments)  # type: ignore[arg-type]


def _missing_parameter(deviates: bool, rank: int) -> ReplicaReport:
    model = _net()
    if deviates:
        model[2].bias = None
    return check_replicas(model)


def _cast_parameter(deviates: bool, rank: int) -> ReplicaReport:
    model = _net()
    if deviates:
        model[2].double()
    return check_replicas(model)


def _thousand(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(**{f"p{index:03d}": torch.full((2,), float(index)) for index in range(1000)})
    if deviates:
        flip_lowest(model.p617, (1,))
    return check_replicas(model)


# Name -> the look, what it must name, its phase
DIFFERENCES = {
    "frozen": (_frozen, ["parameter '2.bias'"], "unknown"),
    "tied": (_tied, ["parameter 'a'"], "unknown"),
    "long name": (_long_name, [f"parameter '{LONG}'"], "unknown"),
    "unused": (_unused, ["gradient of '0.bias'"], "gradients"),
    "gradient": (_gradient, ["gradient of '2.weight'"], "gradients"),
    "expanded gradient": (_expanded_gradient, ["gradient of 'it'"], "gradients"),
    "sparse gradient": (_sparse_gradient, ["gradient of 'it'"], "gradients"),
    "sparse here, dense there": (_sparse_here_dense_there, ["gradient of 'it'"], "gradients"),
    "integer buffer": (_integer_buffer, ["buffer '1.num_batches_tracked'"], "buffers"),
    "both buffers": (_buffers_of_two_kinds, ["buffer '1.running_mean'", "buffer '1.running_var'"], "buffers"),
    "one local buffer": (
        partial(_buffers_of_two_kinds, local_buffers=["1.running_mean"]),
        ["buffer '1.running_var'"],
        "buffers",
    ),
    "missing": (_missing_parameter, ["parameter '2.bias'", "gradient of '2.bias'"], "unknown"),
    "cast": (_cast_parameter, ["parameter '2.bias'", "parameter '2.weight'"], "unknown"),
    "one in a thousand": (_thousand, ["parameter 'p617'"], "unknown"),
}
ONE_DEVIATES = {name: look for name, (look, _, _) in DIFFERENCES.items()}


@pytest.mark.parametrize("world_size, who", [(2, 0), (3, 1)])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named(name: str, world_size: int, who: int) -> None:
    _, names, phase = DIFFERENCES[name]
    seen = observations(f"{HERE}:ONE_DEVIATES", world_size, who)[name]

    assert (list(seen.names), seen.phase) == (names, phase), seen.text
    assert seen.ranks == ((who,) if world_size > 2 else ())
    assert "a count cannot tell" in seen.text or world_size > 2


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_all_ranks_hold_alike_is_identical(name: str) -> None:
    assert observations(f"{HERE}:ONE_DEVIATES", 2, 0, 1)[name].identical


# What a rank may hold alone


def _other_strides(deviates: bool, rank: int) -> ReplicaReport:
    values = torch.arange(6.0)
    return check_replicas(holding(it=values.view(3, 2).t() if deviates else values.view(3, 2).t().contiguous()))


def _empty(deviates: bool, rank: int) -> ReplicaReport:
    return check_replicas(holding(it=torch.ones(0, 3), other=torch.ones(2)))


def _nothing(deviates: bool, rank: int) -> ReplicaReport:
    return check_replicas(nn.Identity())


def _other_order(deviates: bool, rank: int) -> ReplicaReport:
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    return check_replicas(holding(**dict(sorted(tensors.items(), reverse=deviates))))


def _asked_to_ignore(deviates: bool, rank: int) -> ReplicaReport:
    model = _net()
    model._ddp_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]  # type: ignore[assignment]
    if deviates:
        flip_lowest(model[0].weight, (0, 0))
        model[1].running_mean[0] = 7.0
    return check_replicas(model)


def _other_mode(deviates: bool, rank: int) -> ReplicaReport:
    return check_replicas(_net().train(not deviates))


def _unspoken(deviates: bool, rank: int) -> ReplicaReport:
    random.seed(rank)
    torch.manual_seed(rank)
    return check_replicas(holding(it=torch.ones(2)))


FREEDOMS = {
    "strides": _other_strides,
    "no elements": _empty,
    "no tensors": _nothing,
    "order": _other_order,
    "asked to ignore": _asked_to_ignore,
    "local buffers": partial(_buffers_of_two_kinds, local_buffers=["*.running_*"]),
    "mode": _other_mode,
    "random numbers": _unspoken,
}


@pytest.mark.parametrize("world_size, who", [thorough(2, 1), (3, 0)])
@pytest.mark.parametrize("name", FREEDOMS)
def test_what_a_rank_may_hold_alone_is_no_difference(name: str, world_size: int, who: int) -> None:
    seen = observations(f"{HERE}:FREEDOMS", world_size, who)[name]

    assert (seen.identical, seen.names, seen.ranks) == (True, (), ())


# Kinds, each alone


def _all_kinds_differ(deviates: bool, rank: int, what: tuple[str, ...]) -> ReplicaReport:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if deviates else 0.25)
    _fill_gradients(model, 2.0 if deviates else 1.0)
    if deviates:
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
    seen = observations(f"{HERE}:KINDS", 3, 2)[" and ".join(what)]

    assert seen.compared == {kind: count if kind in what else 0 for kind, count in _COUNTS.items()}
    assert len(seen.names) == sum(_DIFFERING[kind] for kind in what)
    assert ("1 of 15 optimizer entries" in " ".join(seen.text.split())) == ("optimizer" in what)
    assert seen.ranks == (2,)
    assert seen.generators == ()


@pytest.mark.usefixtures("alone")
def test_a_parameter_without_a_gradient_is_not_counted_as_a_gradient() -> None:
    model = _net()
    model[0].weight.grad = torch.ones_like(model[0].weight)

    report = check_replicas(model)

    assert report.compared["gradients"] == 1
    text = " ".join(str(report).split())
    assert text.endswith("replicas are identical: 1 rank, 6 parameters, 3 buffers, 1 gradient")  # nothing of generators
    assert report.notes == ()


@pytest.mark.usefixtures("alone")
def test_what_is_ignored_or_frozen_is_a_note() -> None:
    module = _net()
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
    seen = observations(f"{HERE}:SEEDED", 3, *deviating)[source]

    assert (seen.identical, seen.generators) == (True, groups)
    assert words in " ".join(seen.text.split())

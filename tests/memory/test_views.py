"""Gradients as views of one flat tensor: no view ever shows numbers of another gradient."""

import copy
import io
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, PeerError
from tests.helpers import devices
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, once, run_cases
from tests.helpers.small_sizes import move_gradients_from

A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
B = 10 * A
ONES = torch.ones(2, 2)
SMALLEST_MOVED = (0, 2**40)  # bytes: every gradient moves to its slot during backward, or none


class _Net(nn.Module):
    """Two square parameters of ones, and one that only some tests use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2, 2, dtype=dtype)) for _ in range(3))


def _wrap(module: nn.Module, *, as_view: bool = True) -> LegacyDistributedDataParallel:
    checks = Checks(uneven="allow")
    return LegacyDistributedDataParallel(module, gradient_as_bucket_view=as_view, checks=checks)


def _after_one_call(rank: int, *, as_view: bool = True) -> tuple[LegacyDistributedDataParallel, _Net]:
    """A wrapper on two ranks whose last call left A and B (and None)."""
    net = _Net()
    wrapped = _wrap(net, as_view=as_view)
    net.a.grad, net.b.grad = 2 * rank * A, 2 * rank * B
    wrapped.all_reduce()
    return wrapped, net


def _backward(net: _Net, rank: int) -> None:
    """Add 2, on average, to the gradient of a and 20 to that of b."""
    (net.a * (1 + 2 * rank) + net.b * (10 + 20 * rank)).sum().backward()


def _values(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


# Whatever was done to .grad by hand: (on which ranks, what, expected a, expected b)

Surgery = Callable[[Any, int], object]


def _swap(net: _Net, rank: int) -> None:
    net.a.grad, net.b.grad = net.b.grad, net.a.grad


def _share_new_object(net: _Net, rank: int) -> None:
    net.a.grad = net.b.grad = 3 * A


def _overlap(net: _Net, rank: int) -> None:
    memory = torch.arange(6.0)
    net.a.grad, net.b.grad = memory[:4].view(2, 2), memory[2:].view(2, 2)


def _hand_on(net: _Net, rank: int) -> None:
    net.a.grad, net.b.grad = None, net.a.grad


def _make_inference(net: _Net, rank: int) -> None:
    with torch.inference_mode():
        net.a.grad = 3 * A


# name: what is done; then a and b expected if both ranks do it. Done by rank 0 alone, the mean with A and B.
SURGERIES: dict[str, tuple[Surgery, torch.Tensor | None, torch.Tensor]] = {
    "swapped": (_swap, B, A),
    "transposed": (lambda net, _: setattr(net.a, "grad", net.a.grad.t()), A.t(), B),
    "data replaced": (lambda net, rank: setattr(net.a.grad, "data", 3 * A * (rank + 1)), 4.5 * A, B),
    "storage replaced": (
        lambda net, rank: net.a.grad.set_((3 * A * (rank + 1)).untyped_storage(), 0, (2, 2), (2, 1)),
        4.5 * A,
        B,
    ),
    "one object for two": (lambda net, _: setattr(net.a, "grad", net.b.grad), B, B),
    "one new object for two": (_share_new_object, 3 * A, 3 * A),
    "overlapping slices": (_overlap, torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([[2.0, 3.0], [4.0, 5.0]])),
    "expanded": (
        lambda net, _: setattr(net.a, "grad", net.a.grad[0].expand(2, 2)),
        torch.tensor([[1.0, 2.0], [1.0, 2.0]]),
        B,
    ),
    "handed on": (_hand_on, None, A),
    "detached": (lambda net, _: setattr(net.a, "grad", net.a.grad.detach()), A, B),
    # The same memory, read with the other sign.
    "negated": (lambda net, _: setattr(net.a, "grad", torch._neg_view(net.a.grad).data), -A, B),
    "the weights themselves": (lambda net, _: setattr(net.a, "grad", net.a.detach()), ONES, B),
    "inference tensor": (_make_inference, 3 * A, B),
}


def _operate(rank: int, name: str) -> list[tuple[list[Any], list[Any], list[Any]]]:
    results = []
    for smallest, as_view in product(SMALLEST_MOVED, (True, False)):
        move_gradients_from(smallest)
        for everywhere in (True, False):
            wrapped, net = _after_one_call(rank, as_view=as_view)
            if everywhere or rank == 0:
                SURGERIES[name][0](net, rank)
            net.c.sum().backward()  # without any, ranks whose gradients are as they were are told apart as repeating
            wrapped.all_reduce()
            first = _values(net.a.grad, net.b.grad)
            wrapped.zero_grad(set_to_none=False)
            with warnings.catch_warnings():
                if not as_view:  # torch's: a gradient keeps the strides that it was given
                    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
                _backward(net, rank)
            wrapped.all_reduce()
            results.append((first, _values(net.a.grad, net.b.grad), _values(net.a, net.b)))
    return results


@once
def _operated() -> dict[str, list[list[tuple[list[Any], list[Any], list[Any]]]]]:
    return run_cases(_operate, 2, {name: (name,) for name in SURGERIES}, fresh=True)


@pytest.mark.parametrize("name", SURGERIES)
def test_gradients_are_averaged_whatever_memory_they_were_given(name: str) -> None:
    _, a, b = SURGERIES[name]
    own = 3 * A if "replaced" in name else a  # what rank 0 has where ranks would differ
    lone_a = (A + (torch.zeros(2, 2) if own is None else own)) / 2
    for of_rank in _operated()[name]:
        for everywhere, (first, second, weights) in zip([True, False] * 4, of_rank, strict=True):
            assert first == _values(*((a, b) if everywhere else (lone_a, (b + B) / 2)))
            assert second == _values(2 * ONES, 20 * ONES)
            assert weights == _values(ONES, ONES)


@on_ranks(2, [_values(A - 1j * B, A + 0j * B)] * 2)
def test_conjugated_gradient_is_not_taken_for_the_one_in_its_place(rank: int) -> list[Any]:
    net = _Net(torch.complex64)
    wrapped = _wrap(net)
    net.a.grad = 2 * rank * (A + 1j * B)
    wrapped.all_reduce()
    net.a.grad = net.a.grad.conj().data  # the same memory, read with the other sign of the imaginary part
    wrapped.all_reduce()
    both = net.a.grad.resolve_conj().clone()
    if rank == 0:
        net.a.grad = net.a.grad.conj().data
    net.c.sum().real.backward()
    wrapped.all_reduce()
    return _values(both, net.a.grad)


# What a user kept

KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gradient": lambda grad: grad,
    "row": lambda grad: grad[1],
    "flat view": lambda grad: grad.view(-1),
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    **({} if devices.is_real() else {"numpy array": lambda grad: grad.numpy()}),
    "storage": lambda grad: grad.untyped_storage(),
    "reinterpreted": lambda grad: grad.view(torch.int32),
}


def _keep(rank: int, name: str) -> list[tuple[bool, list[Any]]]:
    results = []
    for smallest, set_to_none in product(SMALLEST_MOVED, (True, False)):
        move_gradients_from(smallest)
        for skip in (False, True):
            wrapped, net = _after_one_call(rank)
            kept = KEEPERS[name](net.a.grad)
            before = copy.deepcopy(kept.clone() if name == "storage" else kept)
            if set_to_none:
                wrapped.zero_grad()
            else:
                net.a.grad, net.b.grad = torch.zeros(2, 2), torch.zeros(2, 2)
            _backward(net, rank)
            wrapped.all_reduce(skip=skip and rank == 0)
            same = kept.tolist() == before.tolist()
            results.append((same, _values(net.a.grad, net.b.grad)))
    return results


def test_what_was_kept_of_a_gradient_is_not_overwritten_by_the_next_call() -> None:
    both, rank_1 = [(2 * ONES).tolist(), (20 * ONES).tolist()], [(3 * ONES).tolist(), (30 * ONES).tolist()]
    seen = run_cases(_keep, 2, {name: (name,) for name in KEEPERS}, fresh=True)

    assert seen == dict.fromkeys(KEEPERS, [[(True, both), (True, rank_1)] * 4] * 2)


@on_ranks(2, [_values(A, 2 * ONES, B + 20)] * 2)
def test_gradient_kept_beside_one_in_use_is_not_overwritten(rank: int) -> list[Any]:
    wrapped, net = _after_one_call(rank)
    kept = net.a.grad
    net.a.grad = None  # b's stays a view of the flat tensor that kept lives in
    _backward(net, rank)
    wrapped.all_reduce()
    return _values(kept, net.a.grad, net.b.grad)


# What is done to the old gradient; then its memory is kept through a view of it.
REPLACE: dict[str, Callable[[nn.Module], object]] = {
    ".grad.data = ...": lambda net: [setattr(p.grad, "data", torch.full_like(p, 7.0)) for p in net.parameters()],
    "half() and float()": lambda net: net.half().float(),
    "_apply(clone)": lambda net: net._apply(torch.clone),
}


def _step(model: LegacyDistributedDataParallel, value: float, *, set_to_none: bool = True) -> None:
    model.zero_grad(set_to_none=set_to_none)
    model(torch.full((1, 200), value)).sum().backward()
    model.all_reduce()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("keep", [name for name in ("detached", "row", "numpy array") if name in KEEPERS])
@pytest.mark.parametrize("replace", REPLACE)
def test_a_kept_view_keeps_its_values_after_its_gradient_got_other_memory(
    replace: str, keep: str, *, set_to_none: bool
) -> None:
    net = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 2))  # one gradient moves during backward, the others do not
    model = LegacyDistributedDataParallel(net)
    _step(model, 1.0)
    kept = [KEEPERS[keep](parameter.grad) for parameter in (net[0].weight, net[1].weight)]
    values = [torch.as_tensor(view).clone() for view in kept]

    REPLACE[replace](net)
    for step in range(3):
        _step(model, 2.0 + step, set_to_none=set_to_none)
        assert all(torch.equal(torch.as_tensor(view), value) for view, value in zip(kept, values, strict=True))

    expected = torch.autograd.grad(net(torch.full((1, 200), 4.0)).sum(), list(net.parameters()))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), expected, strict=True))


@pytest.mark.usefixtures("alone")
def test_a_loop_variable_left_over_makes_calls_take_turns_in_two_flat_tensors() -> None:
    net = nn.Linear(200, 100)
    model = LegacyDistributedDataParallel(net)
    left_over, values, places = torch.zeros(()), torch.zeros(()), []
    for step in range(6):
        _step(model, 1.0 + step)
        assert torch.equal(left_over, values)  # of the step before
        for parameter in net.parameters():
            left_over = parameter.grad
        values = left_over.clone()
        places.append([parameter.grad.data_ptr() for parameter in net.parameters()])

    assert places == [places[0], places[1]] * 3
    assert places[0] != places[1]


@pytest.mark.usefixtures("alone")
def test_the_second_flat_tensor_goes_when_no_gradient_is_kept_any_more() -> None:
    net = nn.Linear(200, 100)
    model = LegacyDistributedDataParallel(net)
    _step(model, 1.0)
    kept = net.weight.grad
    _step(model, 2.0)
    del kept
    _step(model, 3.0)

    (buffer,) = model._plan().buffers
    assert buffer.spare is None


# The module changes under the views


_CONVERTED = [
    (torch.float32, (12, 1, 6, 3)),
    (torch.float64, (12, 1, 6, 3)),
    (torch.float64, (12, 4, 2, 1)),
    (torch.float32, (12, 4, 2, 1)),
]


@on_ranks(2, [[(True, *facts, True) for facts in _CONVERTED]] * 2)
def test_gradients_survive_a_conversion_of_the_wrapped_module(rank: int) -> list[tuple[Any, ...]]:
    module = nn.Conv2d(3, 2, 2, bias=False)
    wrapped = _wrap(module)
    weight, plain = module.weight, torch.arange(24.0).reshape(2, 3, 2, 2)
    weight.grad = 2 * rank * plain
    wrapped.all_reduce()
    results = []
    for change in (
        lambda: module.to(memory_format=torch.channels_last),
        lambda: module.double(),
        lambda: module.to(memory_format=torch.contiguous_format),
        lambda: module.float(),
    ):
        change()
        weight.grad.mul_(2 * rank)
        wrapped.all_reduce()
        grad = weight.grad
        same_memory = grad.data_ptr() == grad.untyped_storage().data_ptr()
        results.append((torch.equal(grad, plain.to(grad.dtype)), grad.dtype, grad.stride(), same_memory))
    return results


@on_ranks(2, [(True, _values(A, A + 2, B))] * 2)
def test_gradient_that_create_graph_took_out_of_the_flat_tensor_is_packed_again(rank: int) -> tuple[bool, list[Any]]:
    wrapped, net = _after_one_call(rank)
    view = net.a.grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that create_graph makes a reference cycle
        (net.a**2).sum().backward(create_graph=True)  # adds 2, out of place
    left = net.a.grad is not view
    net.a.grad = net.a.grad.detach() * 2 * rank
    wrapped.all_reduce()
    return left, _values(view, net.a.grad, net.b.grad)


def _share_parameter(rank: int) -> list[Any]:
    move_gradients_from(0)
    shared, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    one, two = _wrap(nn.ParameterList([shared])), _wrap(nn.ParameterList([other, shared]))
    seen: list[Any] = []
    for step in range(3):
        (shared * (1 + 2 * rank) + other * (10 + 20 * rank)).sum().backward()
        (one if step % 2 else two).all_reduce()
        seen += _values(shared.grad, other.grad)
        if step == 1:
            two.all_reduce()
            seen += _values(shared.grad, other.grad)
    return seen


def test_two_wrappers_that_share_a_parameter_do_not_spoil_each_others_gradients() -> None:
    # What only `two` averages is local after step 1: 20 + 10 on rank 0, 20 + 30 on rank 1.
    local = [20 * ONES + 10, 20 * ONES + 30]
    for rank, seen in enumerate(run_ranks(_share_parameter, 2, fresh=True)):
        expected = [2 * ONES, 20 * ONES, 4 * ONES, local[rank], 4 * ONES, 40 * ONES, 6 * ONES, 60 * ONES]
        assert seen == _values(*expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"reproducible": True}])
@pytest.mark.parametrize("first_inside", [False, True])
def test_a_backward_and_a_call_inside_inference_mode_work_as_in_plain_torch(
    options: dict[str, Any], *, first_inside: bool
) -> None:
    """Torch allows it: gradients are then inference tensors, which a later backward could not add to."""
    net = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 1))  # the first weight moves during backward
    model = LegacyDistributedDataParallel(net, **options)
    for step, inside in enumerate([first_inside, not first_inside, True, False]):
        batch = torch.full((1, 200), 1.0 + step)
        loss = model(batch).sum()
        with torch.inference_mode(inside):
            loss.backward()
        with torch.inference_mode(step in (1, 2)):
            record = model.all_reduce(sample_size=1)
        expected = torch.autograd.grad(net(batch).sum(), list(net.parameters()))
        assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), expected, strict=True))
        assert not any(parameter.grad.is_inference() for parameter in net.parameters())
        assert record.rows[0].micro_batches == 1
        model.zero_grad(set_to_none=step % 2 == 0)


# What views are good for

BIG = 1 << 20


@on_ranks(2, [([True] * 4, True)] * 2)
def test_views_are_reused_call_after_call_without_a_new_flat_tensor(rank: int) -> tuple[list[bool], bool]:
    net = nn.ParameterList([nn.Parameter(torch.zeros(BIG)), nn.Parameter(torch.zeros(3, 2).t())])
    wrapped = _wrap(net)

    def step(*, set_to_none: bool = False) -> list[int]:
        wrapped.zero_grad(set_to_none=set_to_none)
        (net[0].sum() + net[1].sum()).backward()
        wrapped.all_reduce()
        return [p.grad.data_ptr() for p in net]

    def largest_allocation(call: Callable[[], object]) -> int:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
            call()
        return max(event.self_cpu_memory_usage for event in profile.key_averages())

    before = step()
    same = [step() == before for _ in range(3)]
    same.append(step(set_to_none=True) == before)
    return same, largest_allocation(wrapped.all_reduce) < 4 * BIG / 100


@pytest.mark.usefixtures("alone")
def test_a_saved_gradient_takes_the_room_of_its_own_elements() -> None:
    wrapped = _wrap(nn.ParameterList([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(BIG))]))
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrapped.all_reduce()
    sizes = []
    for parameter in wrapped.parameters():
        file = io.BytesIO()
        torch.save(parameter.grad, file)
        sizes.append(len(file.getvalue()))

    assert sizes[0] < 10_000
    assert 4 * BIG <= sizes[1] < 4 * BIG + 10_000


# An error changes nothing


@on_ranks(2, [[(name, True, True) for name in SURGERIES for _ in range(2)]] * 2)
def test_agreed_error_leaves_every_gradient_untouched_whatever_memory_it_is_in(
    rank: int,
) -> list[tuple[str, bool, bool]]:
    results = []
    for name, (surgery, _, _) in SURGERIES.items():
        for as_view in (True, False):
            wrapped, net = _after_one_call(rank, as_view=as_view)
            _backward(net, rank)
            surgery(net, rank)
            net.c.grad = torch.ones(2, 2, requires_grad=True) * 2 if rank else torch.full((2, 2), 5.0)
            objects, before = [p.grad for p in net.parameters()], _values(*(p.grad for p in net.parameters()))
            with pytest.raises(PeerError, match="'c' requires grad"):
                wrapped.all_reduce()
            same_objects = all(p.grad is grad for p, grad in zip(net.parameters(), objects, strict=True))
            results.append((name, same_objects, before == _values(*(p.grad for p in net.parameters()))))
    return results


# A thread of gloo keeps a sent tensor for up to 30 ms after the wait; one call in five then took fresh memory.
@on_ranks(2, [1, 1])
def test_the_transport_s_own_hold_on_the_memory_does_not_cost_a_fresh_flat_tensor(rank: int) -> int:
    model = LegacyDistributedDataParallel(nn.Linear(1000, 1, bias=False), checks="off")
    weight = model.module.weight
    weight.grad = torch.ones_like(weight)
    addresses = set()
    for _ in range(300):
        model.all_reduce()
        addresses.add(weight.grad.data_ptr())
    return len(addresses)

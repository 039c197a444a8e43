"""Moves of large gradients to their slots during backward: memory becomes free, and no kept tensor changes."""

import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_sizes import SMALLEST_MOVED_BYTES, before_each_flat_tensor
from tests.helpers.torch_versions import HAS_GRAD_DTYPE

LARGE = (SMALLEST_MOVED_BYTES // 4 // 64, 64)


class _Net(nn.Module):
    """A parameter that is just large enough to move, one that is just too small, and one nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(LARGE))
        self.small = nn.Parameter(torch.ones(LARGE[0] - 1, LARGE[1]))
        self.unused = nn.Parameter(torch.ones(LARGE))

    def forward(self, factor: float) -> torch.Tensor:
        return self.large.sum() * factor + self.small.sum() * factor


def _wrap(**options: Any) -> LegacyDistributedDataParallel:
    """A wrapper after one call, which made room for gradients; none is held."""
    wrapped = LegacyDistributedDataParallel(_Net(), checks="off", **options)
    wrapped(1.0).backward()
    wrapped.all_reduce()
    wrapped.zero_grad()
    return wrapped


def _values(net: Any) -> tuple[Any, Any, Any]:
    """What fills the gradients of the large, the small and the unused parameter."""
    return tuple(None if p.grad is None else p.grad.unique().tolist() for p in (net.large, net.small, net.unused))


def _memory(tensor: torch.Tensor | None) -> int:
    return tensor.untyped_storage().data_ptr()


def _moved(parameter: torch.Tensor) -> bool:
    """Whether its gradient lies in memory that torch cannot resize: a slot is in the middle of some."""
    return not parameter.grad.untyped_storage().resizable()


def _adjacent(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the second gradient begins where the first ends, as slots do."""
    return one.grad.data_ptr() + one.grad.nbytes == other.grad.data_ptr()


@pytest.mark.cpu("a device copies all gradients in the call")
@on_ranks(2, [(True, True, True, ([11.5], [11.5], None))] * 2)
def test_large_gradients_are_in_the_flat_tensor_before_the_call_and_small_ones_after_it(
    rank: int,
) -> tuple[bool, bool, bool, Any]:
    wrapped = _wrap()
    net: Any = wrapped.module
    wrapped(1.0 + rank).backward()
    flat = _memory(net.large.grad)
    wrapped(10.0).backward()
    stays, apart = _memory(net.large.grad) == flat, not _adjacent(net.large, net.small)
    assert _values(net) == ([11.0 + rank], [11.0 + rank], None)
    wrapped.all_reduce()
    return stays, apart, _memory(net.large.grad) == flat and _adjacent(net.large, net.small), _values(net)


@pytest.mark.cpu("a device copies all gradients in the call")
@on_ranks(1, [[True, True, False, False]])
def test_the_first_step_too_holds_its_gradients_once_if_they_are_views(rank: int) -> list[bool]:
    """Whether gradients moved before the call: in the first step, and in the second; with views, and without."""
    moved = []
    for as_view in (True, False):
        wrapped = LegacyDistributedDataParallel(_Net(), checks="off", gradient_as_bucket_view=as_view)
        net: Any = wrapped.module
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(1.0).backward()
            moved.append(_moved(net.large))
            wrapped.all_reduce()
    return moved


# What is done with a gradient: whether all is as it has to be

Facts = tuple[bool, ...]


class _Subclass(torch.Tensor):
    pass


def _keep_another_one(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    (net.large.sum() + net.unused.sum()).backward()
    kept = net.unused.grad[0]
    net.large.grad = None
    net.unused.grad = None
    net.large.sum().backward()
    return bool((kept == 1).all()), bool((net.large.grad == 1).all())


def _see_it_in_a_hook(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    seen: list[torch.Tensor] = []
    handle = net.large.register_hook(seen.append)
    wrapped(3.0).backward()
    wrapped(5.0).backward()
    handle.remove()
    return tuple(bool((grad == value).all()) for grad, value in zip(seen, (3, 5), strict=True))


def _differentiable(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that create_graph makes a reference cycle
        (net.large**3).sum().backward(create_graph=True)
    (second,) = torch.autograd.grad(net.large.grad.sum(), net.large)
    net.large.grad = None
    return (bool((second == 6).all()),)


def _reshaped(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    wrapped(3.0).backward()
    net.large.grad.data = net.large.grad.data.view(-1)
    wrapped.zero_grad()
    wrapped(5.0).backward()
    return (bool((net.large.grad == torch.full(LARGE, 5.0)).all()),)


def _other_dtype(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    net.large.grad_dtype = torch.float64
    net.large.register_hook(torch.Tensor.double)
    wrapped(5.0).backward()
    return net.large.grad.dtype == torch.float64, bool((net.large.grad == 5).all())


def _keep_row_while_another_slot_is_left(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    (net.large.sum() * 3 + net.unused.sum() * 3).backward()
    net.unused.grad.data = torch.zeros(LARGE)  # one holder less of the flat tensor's memory,
    kept = net.large.grad[1]  # one more
    wrapped.zero_grad()
    wrapped(5.0).backward()
    return (bool((kept == 3).all()),)


def _shared_memory(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    net.large.grad = torch.zeros(LARGE).share_memory_()
    wrapped(5.0).backward()
    return (net.large.grad.is_shared(),)


def _subclass(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    net.large.grad = torch.zeros(LARGE).as_subclass(_Subclass)
    wrapped(5.0).backward()
    return (type(net.large.grad) is _Subclass,)


def _changed_class(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    wrapped(3.0).backward()
    net.large.grad.__class__ = _Subclass
    wrapped.zero_grad()
    wrapped(5.0).backward()
    return (type(net.large.grad) is torch.Tensor,)


def _in_place_with_grad(wrapped: LegacyDistributedDataParallel, net: Any) -> Facts:
    wrapped(3.0).backward()
    net.large.grad.detach_()
    net.large.grad.add_(0.0 * net.large)
    required = net.large.grad.requires_grad
    net.large.grad = None
    return (required,)


DEEDS = [
    _keep_another_one,
    _see_it_in_a_hook,
    _differentiable,
    _reshaped,
    *([_other_dtype] if HAS_GRAD_DTYPE else []),
    _keep_row_while_another_slot_is_left,
    _shared_memory,
    _subclass,
    _changed_class,
    _in_place_with_grad,
]


@on_ranks(1, [[]])
def test_no_backward_writes_to_memory_held_elsewhere(rank: int) -> list[str]:
    """After each deed, and in the step behind it."""
    wrong = []
    for deed in DEEDS:
        wrapped = _wrap()
        net: Any = wrapped.module
        facts = deed(wrapped, net)
        wrapped.zero_grad()
        wrapped(7.0).backward()
        if not all(facts) or not (net.large.grad == 7).all():
            wrong.append(deed.__name__)
    return wrong


def _two_threads(rank: int) -> tuple[int, int]:
    """Of 40 first backward passes in two threads: how many end in a wrong mean, and how many flat tensors are made."""
    sys.setswitchinterval(1e-6)
    wrong, made = 0, list[int]()
    with before_each_flat_tensor(lambda: made.append(1)):
        for _ in range(40):
            net = nn.ParameterList([nn.Parameter(torch.zeros(LARGE)), nn.Parameter(torch.zeros(LARGE))])
            wrapped = LegacyDistributedDataParallel(net, checks="off")
            threads = [threading.Thread(target=(p.sum() * (1 + 2 * rank)).backward) for p in net]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wrapped.all_reduce()
            wrong += any(parameter.grad is None or bool((parameter.grad != 2).any()) for parameter in net)
    return wrong, len(made)


def test_backward_in_two_threads_makes_one_flat_tensor() -> None:
    assert run_ranks(_two_threads, 2) == [(0, 40)] * 2


@on_ranks(2, [[([2.0], [2.0], None), [1.0]]] * 2)
def test_a_call_that_found_no_room_leaves_the_next_one_right(rank: int) -> list[Any]:
    wrapped = _wrap()
    net: Any = wrapped.module
    wrapped(1.0).backward()
    kept = net.small.grad  # so that the next call wants fresh memory
    wrapped.all_reduce()
    kept = net.small.grad[0]
    wrapped.zero_grad()
    wrapped(1.0 + 2 * rank).backward()
    with before_each_flat_tensor(_fail), pytest.raises(MemoryError, match="no room"):
        wrapped.all_reduce()
    wrapped.all_reduce()
    return [_values(net), kept.unique().tolist()]


def _fail() -> None:
    raise MemoryError("no room")


@on_ranks(2, [([2.0], [2.0], None)] * 2)
def test_no_room_in_backward_is_left_to_the_call(rank: int) -> tuple[Any, ...]:
    wrapped = LegacyDistributedDataParallel(_Net(), checks="off")
    with before_each_flat_tensor(_fail):
        wrapped(1.0 + 2 * rank).backward()
    wrapped.all_reduce()
    return _values(wrapped.module)


@on_ranks(2, [[([2.0], [2.0], None)] * 3] * 2)
def test_gradients_that_were_moved_to_shared_memory_are_averaged_as_before(rank: int) -> list[Any]:
    wrapped = _wrap()
    net: Any = wrapped.module
    values = []
    wrapped(1.0).backward()
    wrapped.all_reduce()
    net.share_memory()  # moves what gradients lie in, too
    for step in range(3):
        wrapped.zero_grad(set_to_none=step % 2 == 0)
        wrapped(1.0 + 2 * rank).backward()
        wrapped.all_reduce()
        values.append(_values(net))
    return values


@on_ranks(2, [[[[1, 1], [1, 1]], [2.0]]] * 2)
def test_a_second_wrapper_does_not_count_batches_that_were_dropped(rank: int) -> list[Any]:
    """Rank 0 drops two batches; every wrapper should see one micro-batch on each rank all the same."""
    net: Any = _Net()
    checks = Checks(uneven="raise")
    one, two = (LegacyDistributedDataParallel(net, checks=checks) for _ in range(2))
    for _ in range(3 if rank == 0 else 1):
        net.zero_grad()
        net(1.0 + 2 * rank).backward()
    records = [one.all_reduce(), two.all_reduce()]
    rows = [[row.micro_batches for row in record.rows] for record in records]
    return [rows, net.large.grad.unique().tolist()]


@on_ranks(2, [[2.0]] * 2)
def test_a_backward_that_only_pretends_leaves_nothing_behind(rank: int) -> list[Any]:
    wrapped = LegacyDistributedDataParallel(_Net(), checks="off")
    net: Any = wrapped.module
    with FakeTensorMode(allow_non_fake_inputs=True):
        net(3.0).backward()
    wrapped.zero_grad()
    wrapped(1.0 + 2 * rank).backward()
    wrapped.all_reduce()
    return list(net.large.grad.unique().tolist())


@pytest.mark.gpu
def test_a_module_may_move_to_a_device_between_wrapping_and_backward() -> None:
    assert run_ranks(_move_to_device, 2) == [[2.0]] * 2


def _move_to_device(rank: int) -> list[Any]:
    wrapped = LegacyDistributedDataParallel(_Net(), checks="off").cuda()
    net: Any = wrapped.module
    wrapped(1.0 + 2 * rank).backward()
    wrapped.all_reduce()
    return list(net.large.grad.unique().tolist())

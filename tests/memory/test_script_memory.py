"""Gradients in memory of the script: the results are written there, and nowhere else."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from legacy_ddp import LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import KINDS

Model = LegacyDistributedDataParallel
Call = Callable[..., Any]
STEPS = 3


class _Net(nn.Module):
    """Two parameters for every backward, and one that only some use. ``numel``: of the first."""

    def __init__(self, numel: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(numel // 2, 2, dtype=dtype))
        self.b = nn.Parameter(torch.ones(3, dtype=dtype))
        self.c = nn.Parameter(torch.ones(2, 1, dtype=dtype))

    def forward(self, value: float, *, uses_c: bool = False) -> torch.Tensor:
        """The gradient of each element will be ``value``, that of b three times as much."""
        loss = value * (self.a.sum() + 3 * self.b.sum() + (self.c.sum() if uses_c else 0))
        return loss.real if loss.is_complex() else loss


class Memory(NamedTuple):
    """The memory of a script: ``clear`` it, and ``read`` its elements, those of each parameter in turn."""

    clear: Callable[[], object]
    read: Callable[[], torch.Tensor]


def _parts(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Make each ``.grad`` a part of ``flat``, shape (elements,)."""
    parts, start = [], 0
    for parameter in parameters:
        parts.append(flat[start : start + parameter.numel()].view_as(parameter))
        parameter.grad = parts[-1]
        start += parameter.numel()
    return parts


def _zeros(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.zeros(sum(map(torch.numel, parameters)), dtype=parameters[0].dtype)


def _flat(parameters: Sequence[nn.Parameter]) -> Memory:
    flat = _zeros(parameters)
    _parts(flat, parameters)
    return Memory(flat.zero_, flat.clone)


def _parts_alone(parameters: Sequence[nn.Parameter]) -> Memory:
    """The script drops the flat tensor, and keeps its parts."""
    parts = _parts(_zeros(parameters), parameters)
    return Memory(lambda: torch._foreach_zero_(parts), lambda: torch.cat([part.flatten() for part in parts]))


def _bytes(parameters: Sequence[nn.Parameter]) -> Memory:
    """Parts of a tensor of bytes, with room behind them."""
    memory = _zeros(parameters).view(torch.uint8)
    room = torch.cat([memory, memory])
    flat = room[: memory.numel()].view(parameters[0].dtype)
    _parts(flat, parameters)
    return Memory(room.zero_, flat.clone)


def _numpy(parameters: Sequence[nn.Parameter]) -> Memory:
    array = np.zeros(len(_zeros(parameters)), dtype=np.float32)
    _parts(torch.from_numpy(array), parameters)
    return Memory(lambda: array.fill(0), lambda: torch.from_numpy(array).clone())


def _arrays(parameters: Sequence[nn.Parameter]) -> Memory:
    """Torch makes a storage for each part of the array."""
    array, start = np.zeros(len(_zeros(parameters)), dtype=np.float32), 0
    for parameter in parameters:
        part = array[start : start + parameter.numel()].reshape(parameter.shape)
        parameter.grad = torch.from_numpy(part)
        start += parameter.numel()
    return Memory(lambda: array.fill(0), lambda: torch.from_numpy(array).clone())


MEMORIES: dict[str, Callable[[Sequence[nn.Parameter]], Memory]] = {
    "flat": _flat,
    "parts alone": _parts_alone,
    "bytes": _bytes,
}
ON_CPU = {"numpy": _numpy, "arrays": _arrays}


def _hooked(net: nn.Module) -> Call:
    model = Model(net)
    model.register_comm_hook(None, allreduce_hook)
    return model.all_reduce


CALLS: dict[str, Callable[[nn.Module], Call]] = {
    **{kind: lambda net, options=options: Model(net, **options).all_reduce for kind, options in KINDS.items()},
    "hook": _hooked,
    "function": lambda net: partial(all_reduce_gradients, net),
}
# Before the first call of the function nothing tells parts that the script holds from gradients that backward has made.
UNKNOWN = {("function", "parts alone")}


def _expected(numel: int, mean: float, mean_c: float) -> list[float]:
    return [mean] * numel + [3 * mean] * 3 + [mean_c] * 2


def _train(rank: int, call: str, memory: str, *, dtype: torch.dtype, numel: int, size: int | None) -> list[str]:
    """What is wrong. In step s rank r brings s + r to a, thrice that to b, and in even steps rank 0 alone to c."""
    net = _Net(numel, dtype)
    reduce = CALLS[call](net)
    parameters = list(net.parameters())
    own = {**MEMORIES, **ON_CPU}[memory](parameters)
    places = [parameter.grad.data_ptr() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    wrong = []
    for step in range(1, STEPS + 1):
        own.clear()
        uses_c = rank == 0 and step % 2 == 0
        net(step + rank, uses_c=uses_c).backward()
        count = 1 if size is None else size
        reduce(**({} if size is None and call != "reproducible" else {"sample_size": count}))
        expected = _expected(numel, (step + 0.5) / count, (0.5 * step if step % 2 == 0 else 0.0) / count)
        if own.read().real.tolist() != expected:
            wrong.append(f"{call}, {memory}, {dtype}, step {step}: {own.read().tolist()[-5:]}, not {expected[-5:]}")
        wrong += [
            f"{call}, {memory}: moved"
            for p, place in zip(parameters, places, strict=True)
            if p.grad is None or p.grad.data_ptr() != place
        ]
        optimizer.step()
    return wrong


def _train_in_all(rank: int) -> list[str]:
    memories = MEMORIES if torch.get_default_device().type != "cpu" else {**MEMORIES, **ON_CPU}
    wrong = []
    for call in CALLS:
        for memory in memories:
            for size in (None, 2):
                if (call, memory) not in UNKNOWN:
                    wrong += _train(rank, call, memory, dtype=torch.float32, numel=4, size=size)
        # A gradient of this size would move during backward.
        wrong += _train(rank, call, "flat", dtype=torch.float32, numel=2**15, size=None)
    for dtype in (torch.float16, torch.bfloat16, torch.complex64):
        wrong += _train(rank, "info", "flat", dtype=dtype, numel=4, size=2)
    return wrong


@pytest.mark.usefixtures("transport")
def test_results_are_written_to_the_memory_of_the_script_in_every_step() -> None:
    assert run_ranks(_train_in_all, 2) == [[], []]


def _scene() -> tuple[_Net, Model, torch.Tensor]:
    net = _Net()
    model = Model(net, checks="off")
    flat = _zeros(list(net.parameters()))
    _parts(flat, list(net.parameters()))
    return net, model, flat


@on_ranks(2, [[_expected(4, 1.0, 0.0), [1.0] * 4, [3.0] * 3, _expected(4, 2.0, 0.0)]] * 2)
def test_a_rank_that_takes_no_part_gets_the_result_in_its_memory(rank: int) -> list[Any]:
    net, model, flat = _scene()
    net(1.0).backward()
    model.all_reduce(skip=rank == 0)
    first = [flat.tolist(), net.a.grad.flatten().tolist(), net.b.grad.tolist()]
    flat.zero_()
    net(2.0).backward()
    model.all_reduce()
    return [*first, flat.tolist()]


@on_ranks(2, [[True, _expected(4, 1.0, 0.0)], [False, [0.0] * 4 + [3.0] * 3 + [0.0] * 2]])
def test_a_rank_without_the_gradient_gets_a_view_and_the_other_its_memory(rank: int) -> list[Any]:
    net, model, flat = _scene()
    if rank == 1:
        net.a.grad = None
        (net.b.sum() * 3).backward()
    else:
        net(2.0).backward()
        net.b.grad.div_(2.0)
    model.all_reduce()
    return [net.a.grad.data_ptr() == flat.data_ptr(), flat.tolist()]


@on_ranks(2, [[[1.0] * 4, [2.0] * 4, True]] * 2)
def test_two_dtypes_share_the_bytes_of_one_tensor(rank: int) -> list[Any]:
    wide, half = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    model = Model(nn.ParameterList([wide, half]), checks="off")
    memory = torch.zeros(24, dtype=torch.uint8)
    wide.grad, half.grad = memory[8:].view(torch.float32), memory[:8].view(torch.bfloat16)
    (wide.sum() * 2 * rank + half.sum() * 4 * rank).backward()
    model.all_reduce()
    is_there = half.grad.data_ptr() == memory.data_ptr() and wide.grad.data_ptr() == memory.data_ptr() + 8
    return [memory[8:].view(torch.float32).tolist(), memory[:8].view(torch.bfloat16).tolist(), is_there]


_MEANS = [[3.0, 3.0, 3.0, 13.0], [31.0, 30.0, 30.0], [2.0, 2.0], [1.0] * 3]


@on_ranks(2, [[_MEANS, _MEANS]] * 2)
def test_memory_that_overlaps_is_written_to_for_one_gradient_and_never_for_weights(rank: int) -> list[Any]:
    """On rank 0 two gradients overlap, and a third overlaps with its weight. On rank 1 nothing does."""
    found = []
    for as_view in (True, False):
        net = _Net()
        model = Model(net, gradient_as_bucket_view=as_view)
        memory, weights = torch.zeros(6 if rank == 0 else 7), torch.ones(3)
        net.a.grad, net.b.grad = memory[:4].view(2, 2), memory[-3:]
        net.c.data = weights[:2].view(2, 1)
        net.c.grad = weights[1:].view(2, 1) if rank == 0 else torch.full((2, 1), 3.0)
        ((2 + 2 * rank) * (net.a.sum() + 10 * net.b.sum())).backward()
        model.all_reduce()
        found.append([each.grad.flatten().tolist() for each in net.parameters()] + [weights.tolist()])
    return found


@on_ranks(2, [[[True, False], [_expected(4, 2.0, 0.0)] * 2]] * 2)
def test_memory_that_the_script_has_dropped_is_left(rank: int) -> list[Any]:
    net, model, flat = _scene()
    places, values, start = [], [], flat.data_ptr()
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        net(1.0 + 2 * rank).backward()
        model.all_reduce()
        places.append(net.a.grad.data_ptr() == start)
        values.append([value for each in net.parameters() for value in each.grad.flatten().tolist()])
        for each in net.parameters():
            each.grad = each.grad.clone() if places == [True] else each.grad
        flat = torch.zeros(0)
    return [places, values]


@on_ranks(2, [[[2.0, 2.0, 2.0, 2.0], 1.0]] * 2)
def test_a_gradient_kept_from_backward_is_not_overwritten(rank: int) -> list[Any]:
    """Also a part of a larger tensor that backward has made."""
    one, two, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    model = Model(nn.ParameterList([one, two, unused]))
    (torch.cat([one, two]) * torch.full((4,), 1.0 + 2 * rank)).square().sum().mul(0.5 / (1 + 2 * rank)).backward()
    kept = one.grad
    before = kept.clone()
    model.all_reduce()
    return [[*one.grad.tolist(), *two.grad.tolist()], float(torch.equal(kept, before))]


@on_ranks(2, [[True] * 6] * 2)
def test_parts_with_other_strides_get_the_result_in_place(rank: int) -> list[Any]:
    """A convolution in channels_last, with its gradient as a permuted part, or as a contiguous part."""
    found = []
    for as_view in (True, False):
        weight = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
        model = Model(nn.ParameterList([weight]), gradient_as_bucket_view=as_view)
        flat = torch.zeros(30)
        weight.grad = flat[:24].view(2, 2, 2, 3).permute(0, 3, 1, 2)
        values = torch.arange(24.0).view(2, 3, 2, 2)
        (weight * values * 2 * rank).sum().backward()
        model.all_reduce()
        there = torch.equal(flat[:24].view(2, 2, 2, 3).permute(0, 3, 1, 2), values)
        found += [there, flat[24:].tolist() == [0.0] * 6, torch.equal(weight.grad, values)]
    return found


@on_ranks(2, [[[3.0, 3.0], [3.0, 3.0], True]] * 2)
def test_micro_batches_and_local_steps_leave_the_gradients_in_the_memory(rank: int) -> list[Any]:
    net, model, flat = _scene()
    for _ in range(2):
        flat.zero_()
        with model.no_sync():
            net(1.0 + 2 * rank).backward()
        net(1.0).backward()
        model.all_reduce()
    return [flat[:2].tolist(), net.a.grad[0].tolist(), net.b.grad.data_ptr() == flat[4:].data_ptr()]


@on_ranks(2, [[_expected(4, 2.0, 2.0)] * 3] * 2)
def test_gradients_assigned_by_hand_as_parts_of_one_tensor_are_reduced_there(rank: int) -> list[Any]:
    """No backward runs, and in the last step backward runs before they are assigned."""
    net, model, flat = _scene()
    found = []
    for step in range(3):
        if step == 2:
            model.zero_grad()
            net(7.0, uses_c=True).backward()
            _parts(flat, list(net.parameters()))
        flat.copy_(torch.tensor(_expected(4, 1.0 + 2 * rank, 1.0 + 2 * rank)))
        model.all_reduce()
        found.append(flat.tolist() if step < 2 else [v for p in net.parameters() for v in p.grad.flatten().tolist()])
    return found

"""A short program for each error and warning that three ranks can raise; docs/errors.md shows their texts."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder


def _wrap(**settings: Any) -> LegacyDistributedDataParallel:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return LegacyDistributedDataParallel(module, **settings)


def _step(model: LegacyDistributedDataParallel, **arguments: int | None) -> None:
    model(torch.ones(3, 2)).sum().backward()
    model.all_reduce(**arguments)


def _layout(rank: int) -> None:
    model = _wrap()
    model.module[1].bias.requires_grad_(rank != 1)
    _step(model)


def _desync(rank: int) -> None:
    _step(_wrap(), sample_size=None if rank == 1 else 3)


def _peer(rank: int) -> None:
    _step(_wrap(), sample_size=-1 if rank == 1 else 3)


def _divergence(rank: int) -> None:
    model = _wrap(checks="detail")
    _step(model)
    if rank == 1:
        model.module[1].weight.data[0, 1] += 0.5
    _step(model)


def _nonfinite(rank: int) -> None:
    model = _wrap(checks=Checks(nonfinite="raise"))
    model.module(torch.ones(3, 2)).sum().backward()
    if rank == 1:
        model.module[1].bias.grad.fill_(float("nan"))
    model.all_reduce()


def _unscaled(checks: Checks) -> None:
    model = _wrap(checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):  # a scaler is known from its first step on
        scaler.scale(model(torch.ones(3, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        model.all_reduce()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _edited(rank: int) -> None:
    _unscaled(Checks(edited="raise"))


def _edited_warned(rank: int) -> None:
    _unscaled(Checks())


def _too_short(_: Any, bucket: Any) -> torch.Tensor:
    part: torch.Tensor = bucket.buffer()[1:]
    return part


def _comm_hook(rank: int) -> None:
    model = _wrap()
    model.register_comm_hook(None, _too_short)
    _step(model)


def _gradient(rank: int) -> None:
    model = _wrap()
    model.module[1].bias.grad = torch.ones(1, requires_grad=True)
    model.all_reduce()


def _unsynchronized(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def _trace(rank: int) -> None:
    model = _wrap()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with Recorder(model, folder):
                _step(model)


def _transport(rank: int) -> None:
    _wrap(transport="shared")


ERRORS: dict[str, Callable[[int], None]] = {
    "LayoutError": _layout,
    "DesyncError": _desync,
    "PeerError": _peer,
    "ReplicaDivergenceError": _divergence,
    "NonFiniteGradientError": _nonfinite,
    "EditedGradientError": _edited,
    "CommHookError": _comm_hook,
    "GradientError": _gradient,
    "UnsynchronizedStepError": _unsynchronized,
    "TraceError": _trace,
    "TypeError and ValueError": _transport,
}


def _differ(rank: int) -> None:
    model = _wrap()
    if rank == 1:
        model.module[1].weight.data[0, 1] += 0.5
    for _ in range(4):
        _step(model)


def _buffers(rank: int) -> None:
    model = _wrap()
    if rank == 1:
        model.module[1].register_buffer("routing", torch.ones(1))
    _step(model)


def _nonfinite_warned(rank: int) -> None:
    model = _wrap()
    model.module(torch.ones(3, 2)).sum().backward()
    if rank == 1:
        model.module[1].bias.grad.fill_(float("nan"))
    model.all_reduce()


def _uneven(rank: int) -> None:
    model = _wrap()
    for _ in range(rank + 1):
        model(torch.ones(3, 2)).sum().backward()
    model.all_reduce()


def _same_data(rank: int) -> None:
    model = _wrap()
    for _ in range(10):
        _step(model)


def _uncleared(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(3, 2) + rank).sum().backward()
        model.all_reduce()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def _cleared(rank: int) -> None:
    model = _wrap()
    for _ in range(5):
        model(torch.ones(3, 2) + rank).sum().backward()
        if rank == 1:
            model.zero_grad()
        model.all_reduce()
        model.zero_grad()


def _of_a_copy(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    for _ in range(17):
        model(torch.ones(3, 2) + rank).sum().backward()
        model.all_reduce()
        optimizer.step()
        model.zero_grad()


def _local_steps(rank: int) -> None:
    model = _wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(21):
        with model.no_sync():
            _step(model)
            optimizer.step()
            model.zero_grad()


def _forgotten(rank: int) -> None:
    model = _wrap()
    for _ in range(20):
        model(torch.ones(3, 2) + rank).sum().backward()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.001)


def _statistics(rank: int) -> None:
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.BatchNorm1d(2)))
    model(torch.ones(3, 2) + rank).sum().backward()
    model.all_reduce()
    model.eval()(torch.ones(3, 2))


def _merged(rank: int) -> None:
    model = _wrap(reproducible=True)
    with model.no_sync():
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
    model(torch.ones(3, 2)).sum().backward()
    model.all_reduce(sample_size=9)


WARNINGS: dict[str, Callable[[int], None]] = {
    "Replicas differ": _differ,
    "Buffers of some ranks": _buffers,
    "Gradients are not finite": _nonfinite_warned,
    "Gradients were changed before the call": _edited_warned,
    "Uneven work": _uneven,
    "The same data": _same_data,
    "Gradients that were not cleared": _uncleared,
    "Gradients that were cleared before the call": _cleared,
    "Parameters that no step changes": _of_a_copy,
    "Every step inside no_sync()": _local_steps,
    "A forgotten call": _forgotten,
    "Statistics of each rank": _statistics,
    "Merged micro-batches": _merged,
}

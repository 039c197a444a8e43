"""Do optimizers, clipping and averages of weights see under all_reduce() what they see under torch DDP?"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.helpers.besides_ddp import (
    Difference,
    Side,
    State,
    batches,
    compare,
    distributed_optimizers,
    loss_of,
    net,
    train,
    weights,
)


def _stepped(side: Side, rank: int, make: Callable[..., torch.optim.Optimizer]) -> State:
    model = side.wrap(net())
    return train(side, rank, model, make(model.parameters(), lr=0.02))


def _zero_redundancy(parameters: Any, lr: float) -> Any:
    return distributed_optimizers().ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=lr)


def _clipped(side: Side, rank: int) -> State:
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for batch in batches(rank):
        side.backward(model, loss_of(model, batch))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return {**weights(model), "norms": torch.stack(norms)}


def _scaled(side: Side, rank: int) -> State:
    """A GradScaler; rank 1 overflows in step 3, which all ranks leave out."""
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step, batch in enumerate(batches(rank)):
        before = [p.detach().clone() for p in model.parameters()]
        side.backward(model, scaler.scale(loss_of(model, batch) * (torch.inf if step == 3 and rank else 1.0)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if side.calls:
            is_left_out = all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
            assert is_left_out == (step == 3)
        optimizer.zero_grad()
    assert not side.calls or scales == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0]
    return weights(model)


def _line_search(side: Side, rank: int) -> State:
    """LBFGS asks for loss and gradients several times a step; all ranks must ask equally often."""
    model = side.wrap(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    for batch in batches(rank):

        def closure(batch: torch.Tensor = batch) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            side.backward(model, loss)
            mean = loss.detach().clone()
            if side.calls:
                torch.distributed.all_reduce(mean)
            return float(mean)

        optimizer.step(closure)
    return weights(model)


def _sparse_adam(side: Side, rank: int) -> State:
    embedding = nn.EmbeddingBag(12, 3, mode="sum", sparse=True)
    model = side.wrap(embedding)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for batch in batches(rank):
        side.backward(model, model((batch * 10).abs().long() % 12).square().mean())
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def _averaged(side: Side, rank: int, *, ema: bool) -> State:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model = side.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8) if ema else None)
    for batch in batches(rank):
        side.backward(model, loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(module)
    update_bn(batches(rank), average)
    return {name: tensor.float() for name, tensor in average.state_dict().items()}


def _model_averaging(side: Side, rank: int) -> State:
    """Steps of each rank's own, and every third one a mean of the weights."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    averager = PeriodicModelAverager(period=3)
    for batch in batches(rank):
        with model.no_sync():
            side.backward(model, loss_of(model, batch))
            optimizer.step()
            if side.calls:
                averager.average_parameters(model.parameters())  # before zero_grad(): it skips what has no gradient
        optimizer.zero_grad()
    return weights(model)


def _post_local_sgd(side: Side, rank: int) -> State:
    """The same, after two steps with gradients of all ranks, by torch's optimizer around the optimizer."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = side.wrap(net())
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = distributed_optimizers().PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), averager)
    for step, batch in enumerate(batches(rank, 5)):
        with nullcontext() if step < 2 else model.no_sync():
            side.backward(model, loss_of(model, batch))
            optimizer.step() if side.calls else optimizer.optim.step()
        optimizer.zero_grad()
    return weights(model)


LOOPS = {
    "foreach": partial(_stepped, make=partial(torch.optim.AdamW, foreach=True)),
    "fused": partial(_stepped, make=partial(torch.optim.AdamW, fused=True)),
    "ZeroRedundancyOptimizer": partial(_stepped, make=_zero_redundancy),
    "clip_grad_norm_": _clipped,
    "GradScaler": _scaled,
    "LBFGS": _line_search,
    "SparseAdam": _sparse_adam,
    "EMA": partial(_averaged, ema=True),
    "SWA": partial(_averaged, ema=False),
    "PeriodicModelAverager": _model_averaging,
    "PostLocalSGDOptimizer": _post_local_sgd,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Difference]]:
    return compare(LOOPS)


@pytest.mark.parametrize("name", LOOPS)
def test_optimizers_and_averages_end_with_the_bits_of_torch_ddp(found: dict[str, list[Difference]], name: str) -> None:
    for difference in found[name]:
        assert difference.has_bits_of_ddp
        assert difference.without_the_call > 0

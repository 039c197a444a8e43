"""Healthy trainings of many kinds, each on data of the rank's own: no check has anything to say about them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.besides_ddp import distributed_optimizers
from tests.helpers.clean_edits import SIZE, Loop, draw, make_net, net_with_norm, run_backward, train
from tests.helpers.small_models import Words


def _plain(
    rank: int,
    checks: Checks,
    steps: int,
    module: Callable[[], nn.Module] = make_net,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> None:
    model = LegacyDistributedDataParallel(module(), checks=checks, **options)
    train(model, optimizer(model.parameters(), lr=1e-3), rank, steps)


def _reparametrised() -> nn.Module:
    net = make_net()
    parametrizations.weight_norm(net[2])
    parametrizations.spectral_norm(net[3])
    return net


class _Statistic(nn.Module):
    """Keeps an average of its input in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x


def _averages(rank: int, checks: Checks, steps: int) -> None:
    """Rank 0 evaluates an average of the weights, swapped in, and runs a forward in training mode before the step."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def look(step: int) -> None:
        if step % 5 == 4 and rank == 0:
            model(draw(rank))

    def evaluate_average(step: int) -> None:
        average.update_parameters(model.module)
        if step % 5 == 4 and rank == 0:
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(average.module.state_dict())
            _evaluate(model, rank)
            model.module.load_state_dict(kept)

    train(model, torch.optim.AdamW(model.parameters()), rank, steps, reduced=look, stepped=evaluate_average)


def _evaluate(model: nn.Module, rank: int) -> None:
    model.eval()
    with torch.no_grad():
        model(draw(rank))
    model.train()


def _local_sgd(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    for step in range(steps):
        with model.no_sync():
            for _ in range(1 + (rank + step) % 3):
                for _ in range(1 + rank):
                    run_backward(model, rank)
                optimizer.step()
                optimizer.zero_grad()
        if step % 2:
            run_backward(model, rank)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
        model.all_reduce()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad()


def _thaw(rank: int, checks: Checks, steps: int) -> None:
    """Frozen layers beside small trained ones; later all are trained."""
    model = LegacyDistributedDataParallel(make_net().requires_grad_(False), checks=checks)
    model.module[3].requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, steps // 2)
    model.module.requires_grad_(True)
    train(model, optimizer, rank, steps // 2)


def _rank_0_looks(rank: int, checks: Checks, steps: int) -> None:
    """Rank 0 evaluates, saves, and reads the optimizer's state, which makes a step with zero gradients."""
    model = LegacyDistributedDataParallel(net_with_norm(), checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def look(step: int) -> None:
        if step % 5 == 4 and rank == 0:
            _evaluate(model, rank)
            copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    if rank == 0 and checks.level == "info":
        get_optimizer_state_dict(model.module, optimizer)
    train(model, optimizer, rank, steps, stepped=look)


def _gan(rank: int, checks: Checks, steps: int) -> None:
    generator = LegacyDistributedDataParallel(make_net(), checks=checks)
    critic = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), checks=checks)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
    torch.manual_seed(100 + rank)
    for step in range(steps):
        for model, optimizer in [(critic, optimizers[1]), (generator, optimizers[0])][: 1 + (step % 2)]:
            for each in optimizers:
                each.zero_grad()
            (critic(generator(draw(rank))).mean() * (1 if model is critic else -1)).backward()
            model.all_reduce()
            optimizer.step()


def _lbfgs(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    torch.manual_seed(100 + rank)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + rank)).square().mean()
        loss.backward()
        model.all_reduce()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean)

    for _ in range(steps // 3):
        optimizer.step(closure)


def _several_optimizers(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.01)
    second = torch.optim.Adam(model.module[3].parameters())

    def step_second(step: int) -> None:
        if step % 2:
            second.step()
        second.zero_grad()

    train(model, first, rank, steps, reduced=step_second)


def _sharded(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    zero = distributed_optimizers().ZeroRedundancyOptimizer
    train(model, zero(model.parameters(), torch.optim.AdamW, lr=1e-3), rank, steps)


def _uneven(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(_Statistic()), checks=checks)

    def call(step: int) -> None:
        batches = (rank + step) % 3
        for _ in range(batches):
            run_backward(model, rank)
        model.all_reduce(sample_size=6 * batches)

    train(model, torch.optim.AdamW(model.parameters()), rank, steps, backward=lambda *_: None, call=call)


def _joins(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        with model.join():
            train(model, optimizer, rank, steps // 4 + 7 * rank)


def _reproducible(rank: int, checks: Checks, steps: int) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks, reproducible=True)

    def call(_: int) -> None:
        with model.no_sync():
            run_backward(model, rank)
        run_backward(model, rank)
        model.all_reduce(sample_size=12)

    train(model, torch.optim.AdamW(model.parameters()), rank, steps, backward=lambda *_: None, call=call)


def _function_form(rank: int, checks: Checks, steps: int) -> None:
    net = make_net()
    train(net, torch.optim.AdamW(net.parameters()), rank, steps, call=lambda _: all_reduce_gradients(net))


def _skips_agreed_nan(rank: int, checks: Checks, steps: int) -> None:
    """All ranks agree on a bad loss before the call, and drop the step."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + rank)
    for step in range(steps):
        loss = model(draw(rank)).square().mean() * (float("nan") if step % 13 == 5 and rank == 1 else 1.0)
        is_bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(is_bad)
        if is_bad:
            continue
        loss.backward()
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()


def _sharpness_aware(rank: int, checks: Checks, steps: int) -> None:
    """Every rank perturbs its weights by its own gradient for the second backward (m-SAM)."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        data = draw(rank)
        model(data).square().mean().backward()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        norm = float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05 / (norm + 1e-12))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        model.all_reduce()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    "dropout and statistics": partial(_plain, module=net_with_norm),
    "weight norm and spectral norm": partial(_plain, module=_reparametrised),
    "a statistic of its own": partial(_plain, module=lambda: make_net(_Statistic())),
    "sparse": partial(_plain, module=Words, optimizer=torch.optim.SGD),
    "ignores": partial(_plain, ignore=["2.weight", "2.bias"]),  # experts of each rank's own
    **{
        function.__name__.strip("_").replace("_", " "): function
        for function in (
            _averages,
            _local_sgd,
            _thaw,
            _rank_0_looks,
            _gan,
            _lbfgs,
            _several_optimizers,
            _sharded,
            _uneven,
            _joins,
            _reproducible,
            _function_form,
            _skips_agreed_nan,
            _sharpness_aware,
        )
    },
}

"""Parts of healthy trainings: a model, data of the rank's own, a loop."""

from collections.abc import Callable

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel

Loop = Callable[[int, Checks, int], object]  # rank, checks, steps
SIZE = 64


def make_net(*extra: nn.Module) -> nn.Sequential:
    """A perceptron, equal on every rank; one of its weights is large enough to move to its slot during backward."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, SIZE), nn.Tanh(), *extra, nn.Linear(SIZE, 8 * SIZE), nn.Linear(8 * SIZE, 1))


def draw(rank: int) -> torch.Tensor:
    """A batch."""
    return torch.randn(6, 4) + rank


def run_backward(model: nn.Module, rank: int, scale: float = 1.0) -> None:
    (model(draw(rank)).square().mean() * scale).backward()


def train(
    model: LegacyDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int,
    *,
    reduced: Callable[[int], object] = lambda _: None,
    stepped: Callable[[int], object] = lambda _: None,
    backward: Callable[[nn.Module, int], object] = run_backward,
) -> None:
    """Train; ``reduced`` runs after the call of each step, ``stepped`` after the step."""
    torch.manual_seed(100 + rank)
    for step in range(steps):
        backward(model, rank)
        model.all_reduce()
        reduced(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        stepped(step)

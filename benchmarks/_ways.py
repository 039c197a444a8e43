"""Compared ways of training: wrappers, and plain models with a synchronisation after their last backward."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from _workloads import WRAPPERS, Workload, step
from torch import nn

from legacy_ddp import SyncRecord

REFERENCE, OFF, INFO, LOCAL = "torch DDP", "ours, off", "ours, info", "local compute alone"
STATIC, VIEWS, BARE = "torch DDP, static graph", "torch DDP, bucket views", "local compute + bare all_reduce"
EACH, CONTROL = "one collective per parameter", "torch DDP again"
SEED = 1


@dataclass(frozen=True)
class Way:
    """``after`` builds the synchronisation after the last backward, for a plain model."""

    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    after: Callable[[nn.Module], Callable[[], object]] = lambda _: lambda: None
    synchronizes: bool = True


@dataclass(frozen=True)
class Training:
    """A model and its way of training; ``step`` takes the micro-batches of a step."""

    optimizer: torch.optim.Optimizer
    step: Callable[[Sequence[torch.Tensor]], SyncRecord | None]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.optimizer.param_groups[0]["params"]]


def average_each(model: nn.Module) -> None:
    """Collective: average every gradient separately. Sparse gradients stay sparse; gradients of no rank stay None."""
    size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(size)


def flat_like(model: nn.Module) -> torch.Tensor:
    """A tensor with the bytes of all gradients; zeros, as repeated sums must stay finite."""
    # Written here: zeros() would leave finding memory to the first one who writes.
    return torch.empty(sum(parameter.numel() for parameter in model.parameters())).zero_()


# The first is what the others are compared with.
WAYS: Mapping[str, Way] = MappingProxyType(
    {
        **{name: Way(wrap) for name, wrap in WRAPPERS.items()},
        EACH: Way(after=lambda model: partial(average_each, model)),
        BARE: Way(after=lambda model: partial(dist.all_reduce, flat_like(model)), synchronizes=False),
        LOCAL: Way(synchronizes=False),
        CONTROL: Way(WRAPPERS[REFERENCE]),
    }
)

LEFT_OUT: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "tiny": (EACH,),
        "embedding": (STATIC, BARE, LOCAL),
        "sparse embedding": (VIEWS, BARE),
    }
)


def ways_for(model_name: str) -> dict[str, Way]:
    """The ways of training for a model."""
    return {name: way for name, way in WAYS.items() if name not in LEFT_OUT.get(model_name, ())}


def begin(way: Way, workload: Workload, *, set_to_none: bool, rate: float = 1e-6) -> Training:
    """Collective: a new model with equal weights for all ways and ranks, after one step of one micro-batch.

    The static graph of torch DDP needs the step: it fails on a first backward inside no_sync().
    """
    torch.manual_seed(SEED)
    plain = workload.build()
    model = way.wrap(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trained = partial(step, model, optimizer, workload.loss, set_to_none=set_to_none, synchronize=way.after(plain))
    training = Training(optimizer, trained)
    training.step(workload.batches(1))
    return training


def own_batches(workload: Workload, update_freq: int, *, number: int = 0) -> Sequence[torch.Tensor]:
    """The micro-batches of a step, different for each rank and each ``number``."""
    torch.manual_seed(SEED + 1 + dist.get_rank() + number * dist.get_world_size())
    return workload.batches(update_freq)

"""The largest difference between a loop under torch DDP and the same loop under the wrapper.

A loop is written once, for a :class:`Side`: what it wraps and how it does backward. It runs three times from the same
seed: under torch DDP, under the wrapper, and under the wrapper without the call. The third says that the first two
could differ: a loop in which communication changes nothing would prove nothing.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.cases import bits_of
from tests.helpers.ranks import run_ranks

State = Mapping[str, torch.Tensor]
STEPS = 6


@dataclass(frozen=True)
class Side:
    """``ours``: the wrapper; otherwise torch DDP. ``calls``: whether ranks meet at all."""

    ours: bool
    calls: bool = True

    def wrap(
        self, module: nn.Module, process_group: dist.ProcessGroup | DeviceMesh | None = None, **options: Any
    ) -> nn.Module:
        """``options``: of torch DDP, or of the wrapper; each may need some that the other does not have."""
        if not self.ours:
            group = process_group.get_group() if isinstance(process_group, DeviceMesh) else process_group
            return DistributedDataParallel(module, process_group=group, **options)
        checks: Any = "info" if self.calls else "off"
        return LegacyDistributedDataParallel(module, process_group=process_group, checks=checks, **options)

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward()
        self.meet(model)

    def meet(self, model: nn.Module) -> None:
        """What a loop that was written for torch DDP has to add."""
        if isinstance(model, LegacyDistributedDataParallel) and self.calls:
            model.all_reduce()


Loop = Callable[[Side, int], State]


@dataclass(frozen=True)
class Difference:
    """Whether all bits are those of torch DDP; the largest between elements of the same name: from torch DDP, and with
    and without the call."""

    has_bits_of_ddp: bool
    from_ddp: float
    without_the_call: float


def compare(
    loops: Mapping[str, Loop], world_size: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, list[Difference]]:
    """For each loop what every rank found, from one start of the ranks; ``dtype`` is that of weights and data."""
    found = run_ranks(partial(_compare, loops, dtype), world_size, timeout_seconds=120)
    return {name: [of_rank[name] for of_rank in found] for name in loops}


def _compare(loops: Mapping[str, Loop], dtype: torch.dtype, rank: int) -> dict[str, Difference]:
    torch.set_default_dtype(dtype)
    found = {}
    for name, loop in loops.items():
        try:
            ddp, ours, alone = (_run(loop, rank, side) for side in (Side(False), Side(True), Side(True, calls=False)))
            found[name] = Difference(_bits(ours) == _bits(ddp), _largest(ours, ddp), _largest(ours, alone))
        except Exception as error:
            error.add_note(f"in loop {name!r}")
            raise
    return found


def _run(loop: Loop, rank: int, side: Side) -> State:
    torch.manual_seed(0)
    return {name: tensor.detach().clone() for name, tensor in loop(side, rank).items()}


def _bits(state: State) -> dict[str, object]:
    return {name: bits_of(tensor) for name, tensor in state.items()}


def _largest(ours: State, theirs: State) -> float:
    assert ours.keys() == theirs.keys()
    differences = [(ours[name] - theirs[name]).abs().max() for name in ours if ours[name].numel()]
    assert all(difference.isfinite() for difference in differences)
    return max(map(float, differences))


def weights(module: nn.Module) -> State:
    return dict(module.named_parameters())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(rank: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Data of this rank's own."""
    generator = torch.Generator().manual_seed(100 + rank)
    return list(torch.randn(steps, 8, 6, generator=generator))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).tanh() - batch[:, :1]).square().mean()


def train(side: Side, rank: int, model: nn.Module, optimizer: Optimizer) -> State:
    """The plain loop."""
    for batch in batches(rank):
        side.backward(model, loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def distributed_optimizers() -> Any:
    """``torch.distributed.optim``, which compiles optimizers of its own with the deprecated ``torch.jit.script``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        import torch.distributed.optim
    return torch.distributed.optim

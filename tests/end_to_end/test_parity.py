"""Does training with all_reduce() give what torch DDP gives?"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.besides_ddp import Difference, Side, State, compare, distributed_optimizers

STEPS = 20


class _Mlp(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.hidden = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9))
        self.last = nn.Linear(9, 3)
        self.reentrant = reentrant

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first = self.first(batch).tanh()
        if self.reentrant is None:
            return self.last(self.hidden(first))
        return self.last(checkpoint(self.hidden, first, use_reentrant=self.reentrant))


class _Branches(nn.Module):
    """Uses no branch, one of three, or all of them; the fourth is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        which = int(batch[0, 0].abs() * 10) % 5
        used = range(3) if which == 4 else [which] if which < 3 else []
        trunk = self.trunk(batch)
        return trunk.sum(1, keepdim=True) + sum(self.branches[index](trunk) for index in used)


def _batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).tanh() - batch[:, :1]).square().mean()


def _loss_of_two_forwards(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return _loss(model, batch) + model(-batch).sum(1).logsumexp(0)


def _loss_in_bf16(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _loss(model, batch).float()


_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
_ADAMW = partial(torch.optim.AdamW, lr=0.02)


def _zero_redundancy(parameters: Any) -> torch.optim.Optimizer:
    return distributed_optimizers().ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.02)


@dataclass(frozen=True)
class _Case:
    """One way to train; ``ddp`` are the options that torch DDP needs for it."""

    build: Callable[[], nn.Module] = _Mlp
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = _loss
    optimizer: Callable[..., torch.optim.Optimizer] = _SGD
    micro_batches: int = 1
    set_to_none: bool = True
    ddp: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


_CASES = {
    "adamw-foreach": _Case(optimizer=partial(_ADAMW, foreach=True)),
    "adamw-fused": _Case(optimizer=partial(_ADAMW, fused=True)),
    "accumulation-adamw": _Case(micro_batches=3, optimizer=_ADAMW),
    "accumulation-zeroed-in-place": _Case(micro_batches=2, set_to_none=False),
    "gradients-of-their-own": _Case(micro_batches=2, ours={"gradient_as_bucket_view": False}),
    "small-buffer": _Case(ours={"buffer_size": 7}),
    "autocast-bf16": _Case(loss=_loss_in_bf16),
    "checkpoint": _Case(build=partial(_Mlp, reentrant=False)),
    "checkpoint-reentrant": _Case(build=partial(_Mlp, reentrant=True), ddp={"static_graph": True}),
    "two-forwards": _Case(loss=_loss_of_two_forwards, ddp={"static_graph": True}),
    "unused-accumulation": _Case(build=_Branches, micro_batches=2, ddp={"find_unused_parameters": True}),
    "batchnorm": _Case(build=_batchnorm),
    "zero-redundancy": _Case(optimizer=_zero_redundancy),
}


def _state(module: nn.Module) -> State:
    state = dict(module.state_dict())
    for name, p in module.named_parameters():
        state[f"{name}.grad"] = torch.zeros(()) if p.grad is None else p.grad
        state[f"{name}.grad is there"] = torch.tensor(float(p.grad is not None))
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _train(case: _Case, side: Side, rank: int) -> State:
    """State after the first and after the last step, gradients included."""
    module = case.build()
    model = side.wrap(module, **(case.ours if side.ours else case.ddp))
    optimizer = case.optimizer(module.parameters())
    torch.manual_seed(100 + rank)
    states: State = {}
    for step in range(STEPS):
        for index in range(case.micro_batches):
            if isinstance(model, LegacyDistributedDataParallel) and not index:
                model.broadcast_buffers()
            is_last = index == case.micro_batches - 1
            context: AbstractContextManager[None] = nullcontext() if is_last else model.no_sync()
            with context:
                side.backward(model, case.loss(model, torch.randn(8, 6)))
        optimizer.step()
        if step in (0, STEPS - 1):
            states |= {f"{name} in step {step}": tensor for name, tensor in _state(module).items()}
        optimizer.zero_grad(case.set_to_none)
    return states


@pytest.fixture(scope="module")
def found() -> dict[str, list[Difference]]:
    return compare({name: partial(_train, case) for name, case in _CASES.items()})


@pytest.mark.parametrize("name", _CASES)
def test_twenty_steps_at_two_ranks_give_the_bits_of_torch_ddp(found: dict[str, list[Difference]], name: str) -> None:
    """Halving is exact, before the sum as after it, and a sum of two has one rounding: no bit may differ."""
    for difference in found[name]:
        assert difference.has_bits_of_ddp
        assert difference.without_the_call > 0

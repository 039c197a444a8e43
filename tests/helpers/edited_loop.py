"""A training in which a rank may change its gradients before or after the call, and the warnings and errors of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers import logged_warnings

STEPS = 20
Told = list[tuple[int, str]]  # the number of the call, and the text


def make_net() -> nn.Sequential:
    """With a weight that moves to its slot during backward, and parameters that do not."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 512), nn.Linear(512, 1))


@dataclass
class Loop:
    """A training with default checks, on data of the rank's own."""

    rank: int
    checks: Any = "info"
    options: dict[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] = make_net
    learning_rate: float = 0.01
    keeps_views: bool = False

    def __post_init__(self) -> None:
        self.model = LegacyDistributedDataParallel(self.net(), checks=self.checks, **self.options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        torch.manual_seed(100 + self.rank)

    @property
    def grads(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def data(self) -> torch.Tensor:
        return torch.randn(6, 4) + self.rank

    def backward(self) -> None:
        self.scaler.scale(self.model(self.data()).square().mean()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.keeps_views)

    def run(self, before: Callable[["Loop"], object], after: Callable[["Loop"], object] = lambda _: None) -> Told:
        """Train; ``before`` and ``after`` the call of every step. Ends with the first error."""
        told: Told = []
        for call in range(1, STEPS + 1):
            self.backward()
            before(self)
            try:
                self.model.all_reduce()
            except LegacyDDPError as error:
                return [*told, (call, f"{type(error).__name__} {error.ranks} {error}")]
            told += [(call, text) for text in logged_warnings.take()]
            after(self)
            self.step()
        return told


def do_nothing(_: Loop) -> None:
    """No change."""


def clip_norm(loop: Loop) -> None:
    """A clip that binds in every step."""
    clip_grad_norm_(loop.model.parameters(), 1e-3)

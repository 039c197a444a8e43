"""Trainings with default settings, and the warnings that they give on a rank."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import devices, logged_warnings, transports

PARTS = 16  # of the digests of the net below


def told_late() -> int:
    """How many calls after that of a digest a difference may be told. A device tells it two calls later, or up to ten:
    see docs/devices.md."""
    kind = transports.device()
    return {devices.CPU: 0, devices.SIMULATED: 2}.get(kind, 10)


def told_within() -> int:
    """The calls in which a difference is told: a rotation, and those by which the device is late."""
    return PARTS + told_late()


def wide_net() -> nn.Sequential:
    """Two layers, statistics and a constant buffer; equal on every rank, and large enough for 16 parts."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.BatchNorm1d(1024), nn.Linear(1024, 64))
    net.register_buffer("table", torch.ones(64))
    return net


@dataclass
class Run:
    """A training on one rank. ``data``: made for every step, different on every rank."""

    rank: int
    module: nn.Sequential = field(default_factory=wide_net)
    model: LegacyDistributedDataParallel = None  # type: ignore[assignment]  # once wrapped
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]  # once wrapped
    arguments: dict[str, Any] = field(default_factory=dict)

    def wrap(self) -> None:
        self.model = LegacyDistributedDataParallel(self.module, **self.arguments)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(self.rank)

    def backward(self) -> None:
        self.model(torch.randn(8, 64)).square().mean().backward()


class Warned(NamedTuple):
    """The first warning on a rank, and in which call. ``count``: the number of warnings."""

    count: int = 0
    call: int = 0
    text: str = ""

    @property
    def unwrapped(self) -> str:
        """The text as one line."""
        return " ".join(self.text.split())


Action = Callable[[Run], object]


def train(run: Run, steps: int, actions: Mapping[tuple[str, int], Action]) -> Warned:
    """Train; ``actions`` by moment and step. Moments: "wrapped" (step 0), then "backward", "reduced", "stepped".

    That no optimizer holds a replaced parameter is told by another check, which compares no ranks.
    """
    logged_warnings.take()
    found: list[tuple[int, str]] = []

    def at(moment: str, step: int) -> None:
        if action := actions.get((moment, step)):
            action(run)

    run.wrap()
    at("wrapped", 0)
    for step in range(1, steps + 1):
        run.backward()
        at("backward", step)
        run.model.all_reduce()
        found += [(step, text) for text in logged_warnings.take() if "no optimizer holds them" not in text]
        at("reduced", step)
        run.optimizer.step()
        at("stepped", step)
        run.optimizer.zero_grad()
    return Warned(len(found), *found[0]) if found else Warned()


# Faults: what a rank does alone


def initialise(run: Run) -> None:
    nn.init.normal_(run.module[3].weight, generator=torch.Generator().manual_seed(run.rank))


def add_noise(run: Run) -> None:
    with torch.no_grad():
        run.module[3].weight[5, 7] += 1e-3


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.module.parameters(), 1e-4)


def change_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def load_optimizer(run: Run) -> None:
    saved = run.optimizer.state_dict()
    state = {key: {**kept, "exp_avg": torch.zeros_like(kept["exp_avg"])} for key, kept in saved["state"].items()}
    run.optimizer.load_state_dict({**saved, "state": state})


def lose_optimizer_state(run: Run) -> None:
    """A resume of this rank without ``optimizer.load_state_dict()``."""
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3)


def replace_parameter(run: Run) -> None:
    run.module[3].bias = nn.Parameter(run.module[3].bias.detach().clone())


def poke_buffer(run: Run) -> None:
    run.module.get_buffer("table")[3] = 0.5


def names_in(text: str) -> set[str]:
    """The parameters and buffers that a report shows."""
    return set(re.findall(r"(?:parameter|buffer) '([^']+)'", text))

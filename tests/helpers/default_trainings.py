"""Trainings with default settings, and the warnings that they give on a rank."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, SyncRecord
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
    """A training on one rank, on data of its own."""

    rank: int
    module: nn.Sequential = field(default_factory=wide_net)
    model: LegacyDistributedDataParallel = None  # type: ignore[assignment]  # once wrapped
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]  # once wrapped
    arguments: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    records: list[SyncRecord] = field(default_factory=list)

    def wrap(self) -> None:
        self.model = LegacyDistributedDataParallel(self.module, **self.arguments)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(self.rank)

    def backward(self) -> None:
        self.model(torch.randn(8, 64)).square().mean().backward()


Told = list[tuple[int, str]]  # the steps whose call warns or raises, and the texts
Action = Callable[[Run], object]
EACH = -1  # step


def train(run: Run, steps: int, actions: Mapping[tuple[str, int], Action]) -> Told:
    """Train up to step ``steps``, or to an error. The text of an error begins with its type.

    ``actions``: by moment and step. Moments: "wrapped" (step 0), then "backward", "reduced", "stepped".
    That no optimizer holds a replaced parameter is told by another check, which compares no ranks.
    """
    logged_warnings.take()
    told: Told = []

    def at(moment: str) -> None:
        for step in (run.step, EACH):
            if action := actions.get((moment, step)):
                with torch.no_grad():
                    action(run)

    if run.model is None:
        run.wrap()
        at("wrapped")
    while run.step < steps:
        run.step += 1
        run.backward()
        at("backward")
        try:
            run.records.append(run.model.all_reduce())
        except LegacyDDPError as error:
            return [*told, (run.step, f"{type(error).__name__}: {error}")]
        found = logged_warnings.take()
        told += [(run.step, text) for text in found if "no optimizer holds them" not in text]
        at("reduced")
        run.optimizer.step()
        at("stepped")
        run.optimizer.zero_grad()
    return told


def unwrapped(text: str) -> str:
    """``text`` as one line."""
    return " ".join(text.split())


# Faults: what a rank does alone


def initialise(run: Run) -> None:
    nn.init.normal_(run.module[3].weight, generator=torch.Generator().manual_seed(run.rank))


def add_noise(run: Run) -> None:
    run.module[3].weight.data[5, 7] += 1e-3


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

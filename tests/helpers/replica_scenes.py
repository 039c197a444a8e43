"""Scenarios: short trainings in which some ranks deviate, and the outcome on every rank."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from legacy_ddp.debug import ReplicaReport
from tests.helpers.cases import all_bits, get_gradients
from tests.helpers.outcomes import attempt, next_call_is_right
from tests.helpers.ranks import run_ranks


class Element(NamedTuple):
    """The difference of a rank's tensor from the tensor of the largest group."""

    thing: str
    rank: int
    count: int
    index: tuple[int, ...]
    kind: str
    bit: int | None


def elements_of(report: ReplicaReport) -> tuple[Element, ...]:
    return tuple(
        Element(difference.name, rank, item.count, item.first_index, item.kind, item.bit)
        for difference in report.differences
        for rank, item in sorted(difference.elements.items())
    )


def names_of(report: ReplicaReport) -> tuple[str, ...]:
    return tuple(difference.name for difference in report.differences)


T = TypeVar("T")


class SharedOutcomes(Generic[T]):
    """The outcomes of all ranks, by name; checks that they are equal and have at most 80 columns."""

    def __init__(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        self._of_ranks = of_ranks

    def __getitem__(self, name: str) -> T:
        first, *others = (of_rank[name] for of_rank in self._of_ranks)
        for other in others:
            assert str(other) == str(first)
            assert other == first
        assert all(len(line) <= 80 for line in str(first).splitlines()), first
        return first


def _table(name: str) -> Any:
    """``name``: "module:NAME". The functions in a table may be lambdas, which cannot be pickled."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


# The calls of a training

LAST_STEP = 3  # one more call follows it


def training_net(seed: int = 1) -> nn.Sequential:
    """Two layers of equal shape (0, 2), statistics (1) and a frozen layer (3); no randomness in the forward pass.

    A buffer ``table`` that no rank changes, and which has no part in the forward pass.
    """
    torch.manual_seed(seed)
    frozen = nn.Linear(4, 2, bias=False).requires_grad_(False)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), frozen)
    net.register_buffer("table", torch.ones(4))
    return net


@dataclass
class Scene:
    """The training of a single rank, which an action may change. ``steps``: the number of steps after the next call."""

    rank: int
    module: nn.Sequential
    model: LegacyDistributedDataParallel = None  # type: ignore[assignment]  # from "wrapped" on
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    data: torch.Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 12).view(3, 4))
    steps: int = 1


Action = Callable[[Scene], object]


class Act(NamedTuple):
    """``group``: the number of the group of ranks that acts.

    Moments in their order: "built" (before there is a wrapper) and "wrapped", both of step 0; then in each step
    "forwarded", "backward", "reduced", "between" (the steps, if there are several) and "stepped".
    """

    moment: str
    step: int
    action: Action
    group: int = 0


class Scenario(NamedTuple):
    """``options``: of the wrapper."""

    acts: Sequence[Act]
    options: Mapping[str, Any] = {}


class CallOutcome(NamedTuple):
    """The error on a rank, and whether it did harm. ``error`` is empty if no error was raised."""

    error: str = ""
    ranks: tuple[int, ...] = ()
    call: int | None = None
    phase: str | None = None
    parameter: str | None = None
    text: str = ""
    report: Any = None
    untouched: bool = True
    recovered: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def unwrapped(self) -> str:
        """The text as one line."""
        return " ".join(self.text.split())


def check_harmless(outcome: CallOutcome) -> None:
    """Check that the error did no harm, and that its text calls no rank right."""
    assert outcome.untouched
    assert outcome.recovered
    assert not re.search(r"\b(right|correct|wrong)\b", outcome.text), outcome.text


@cache
def run_scenarios(table: str, world_size: int, *groups: tuple[int, ...]) -> SharedOutcomes[CallOutcome]:
    """Run every scenario in ``table``, "module:NAME", on its own wrapper, in one job of the ranks."""
    return SharedOutcomes(run_ranks(partial(_run_all, table, groups), world_size, timeout_seconds=240))


def _run_all(table: str, groups: Sequence[tuple[int, ...]], rank: int) -> dict[str, CallOutcome]:
    return {name: _run(one, groups, rank) for name, one in _table(table).items()}


def _run(scenario: Scenario, groups: Sequence[tuple[int, ...]], rank: int) -> CallOutcome:
    scene = Scene(rank, training_net())

    @torch.no_grad()
    def at(moment: str, step: int) -> None:
        for act in scenario.acts:
            if (act.moment, act.step) == (moment, step) and rank in groups[act.group]:
                act.action(scene)

    at("built", 0)
    options = {"checks": Checks("detail", nonfinite="ignore"), **scenario.options}
    scene.model = LegacyDistributedDataParallel(scene.module, **options)
    trainable = [parameter for parameter in scene.module.parameters() if parameter.requires_grad]
    scene.optimizer = torch.optim.SGD(trainable, lr=0.125, momentum=0.5, weight_decay=0.25)
    at("wrapped", 0)
    for step in range(1, LAST_STEP + 2):
        output = scene.model(scene.data)
        at("forwarded", step)
        (output.square().sum() * (1.0 + rank)).backward()  # other gradients on every rank, of the same forward
        at("backward", step)
        if error := _error_of_call(scene.model):
            scene.model.broadcast_parameters()  # as the error says
            scene.model.broadcast_buffers()
            return error._replace(recovered=next_call_is_right(scene.model, rank))
        at("reduced", step)
        for index in range(scene.steps):
            if index:
                at("between", step)
            scene.optimizer.step()
        scene.optimizer.zero_grad()
        scene.steps = 1
        at("stepped", step)
    return CallOutcome(recovered=next_call_is_right(scene.model, rank))


def _error_of_call(model: LegacyDistributedDataParallel) -> CallOutcome | None:
    before = all_bits(get_gradients(model))
    error = attempt(model.all_reduce)
    if error is None:
        return None
    assert isinstance(error, ReplicaDivergenceError), error
    report = error.report
    assert (report.ranks, report.phase) == (error.ranks, error.phase)
    assert (report.minority, report.implicated) == (error.minority, error.implicated)
    assert str(report) in str(error)
    assert not report.identical
    return CallOutcome(
        type(error).__name__,
        error.ranks,
        error.call,
        error.phase,
        error.parameter,
        str(error),
        report,
        untouched=before == all_bits(get_gradients(model)),
    )


def flip(tensor: torch.Tensor, place: tuple[int, ...], bit: int) -> None:
    """Change a bit of an fp32 tensor as broken memory does, without a new version of the tensor."""
    tensor.data.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)


# check_replicas()

Check = Callable[[bool, int], ReplicaReport]  # whether this rank deviates, and its number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def reports(table: str, world_size: int, *deviating: int) -> SharedOutcomes[ReplicaReport]:
    """Those of all ranks for each check in ``table``, "module:NAME"."""
    return SharedOutcomes(run_ranks(partial(_check_all, table, deviating), world_size))


def _check_all(table: str, deviating: Sequence[int], rank: int) -> dict[str, ReplicaReport]:
    checks: Mapping[str, Check] = _table(table)
    return {name: check(rank in deviating, rank) for name, check in checks.items()}


def flip_lowest(tensor: torch.Tensor, place: tuple[int, ...]) -> None:
    """Flip the lowest bit of an element (of the real part of a complex number); a bool is negated."""
    part = torch.view_as_real(tensor.detach())[..., 0] if tensor.is_complex() else tensor.detach()
    part.view(_INTEGERS[part.dtype.itemsize])[place] ^= 1


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with floating point tensors as parameters and other tensors as buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module

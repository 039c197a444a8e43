"""A short training in which some ranks do what replicas must not do, and what every rank sees of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from legacy_ddp.debug import ReplicaReport
from tests.helpers.cases import all_bits, get_gradients
from tests.helpers.outcomes import attempt, next_call_is_right
from tests.helpers.ranks import run_ranks

LAST_STEP = 3  # one more call follows it


def training_net(seed: int = 1) -> nn.Sequential:
    """Two layers of one shape, statistics, and a frozen layer: 0, 1, 2, 3, in a net without randomness of its own."""
    torch.manual_seed(seed)
    frozen = nn.Linear(4, 2, bias=False).requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), frozen)


@dataclass
class Scene:
    """One rank's part in a training; a deed changes what it likes. ``steps``: how many the next call is followed by."""

    rank: int
    module: nn.Sequential
    model: LegacyDistributedDataParallel = None  # type: ignore[assignment]  # from "wrapped" on
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    data: torch.Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 12).view(3, 4))
    steps: int = 1


Deed = Callable[[Scene], object]


@dataclass(frozen=True)
class Story:
    """``deeds``: moment, step and what ranks in the group of that number (``doers[number]``) do there.

    Moments in their order: "built" (before there is a wrapper) and "wrapped", both of step 0; then in each step
    "forwarded", "backward", "reduced", "between" (the steps, if there are several) and "stepped".
    """

    deeds: Sequence[tuple[str, int, Deed, int]]
    options: dict[str, Any] = field(default_factory=dict)


class Element(NamedTuple):
    """How one rank's tensor differs from that of most."""

    thing: str
    rank: int
    count: int
    index: tuple[int, ...]
    kind: str
    bit: int | None


class Sight(NamedTuple):
    """What a rank saw: the error, and whether it harmed anything. ``error`` is empty if nothing was raised."""

    error: str = ""
    ranks: tuple[int, ...] = ()
    minority: tuple[int, ...] = ()
    implicated: tuple[int, ...] = ()
    call: int | None = None
    phase: str | None = None
    parameter: str | None = None
    text: str = ""
    names: tuple[str, ...] = ()
    elements: tuple[Element, ...] = ()
    untouched: bool = True
    recovered: bool = False

    @property
    def unwrapped(self) -> str:
        """The text as one line."""
        return " ".join(self.text.split())


def story(*deeds: tuple[str, int, Deed], options: dict[str, Any] | None = None) -> Story:
    """All deeds are done by the same ranks."""
    return Story([(*deed, 0) for deed in deeds], options or {})


def elements_of(report: ReplicaReport) -> tuple[Element, ...]:
    found = []
    for difference in report.differences:
        for rank, item in sorted(difference.elements.items()):
            bit = re.search(r"\bbit (\d+)", item.words) if item.kind == "one bit" else None
            place = (item.count, item.first_index, item.kind, bit and int(bit[1]))
            found.append(Element(difference.name, rank, *place))
    return tuple(found)


def check_whole(sight: Sight) -> None:
    """The error harmed nothing, and calls nobody right."""
    assert sight.untouched
    assert sight.recovered
    assert not re.search(r"\b(right|correct|wrong)\b", sight.text), sight.text


class _Said(Protocol):
    @property
    def text(self) -> str: ...


T = TypeVar("T", bound=_Said)


class Sights(Generic[T]):
    """What all ranks saw, by name: one sight, for they must see the same, on a page of 80 columns."""

    def __init__(self, of_ranks: Sequence[Mapping[str, T]]) -> None:
        self._of_ranks = of_ranks

    def __getitem__(self, name: str) -> T:
        first, *others = (of_rank[name] for of_rank in self._of_ranks)
        for other in others:
            assert other.text == first.text
            assert other == first
        assert all(len(line) <= 80 for line in first.text.splitlines()), first.text
        return first


def played(stories: Mapping[str, Story], world_size: int, *doers: tuple[int, ...]) -> Sights[Sight]:
    """Every story on its own wrapper, one after the other, on the same ranks: a process start for all of them."""
    return Sights(run_ranks(partial(_play_all, stories, doers), world_size, timeout_seconds=240))


def _play_all(stories: Mapping[str, Story], doers: Sequence[tuple[int, ...]], rank: int) -> dict[str, Sight]:
    return {name: _play(one, doers, rank) for name, one in stories.items()}


def _play(one: Story, doers: Sequence[tuple[int, ...]], rank: int) -> Sight:
    scene = Scene(rank, training_net())

    def at(moment: str, step: int) -> None:
        for when, which, do, group in one.deeds:
            if (when, which) == (moment, step) and rank in doers[group]:
                do(scene)

    at("built", 0)
    scene.model = LegacyDistributedDataParallel(scene.module, **{"checks": "detail", **one.options})
    trainable = [parameter for parameter in scene.module.parameters() if parameter.requires_grad]
    scene.optimizer = torch.optim.SGD(trainable, lr=0.125, momentum=0.5, weight_decay=0.25)
    at("wrapped", 0)
    for step in range(1, LAST_STEP + 2):
        output = scene.model(scene.data)
        at("forwarded", step)
        (output.square().sum() * (1.0 + rank)).backward()  # other gradients on every rank, of the same forward
        at("backward", step)
        if error := _error_of_call(scene.model):
            return error._replace(recovered=_recovers(scene))
        at("reduced", step)
        for index in range(scene.steps):
            if index:
                at("between", step)
            scene.optimizer.step()
        scene.optimizer.zero_grad()
        scene.steps = 1
        at("stepped", step)
    return Sight(recovered=next_call_is_right(scene.model, rank))


def _error_of_call(model: LegacyDistributedDataParallel) -> Sight | None:
    before = all_bits(get_gradients(model))
    error = attempt(model.all_reduce)
    if error is None:
        return None
    assert isinstance(error, ReplicaDivergenceError), error
    report = error.report
    names = tuple(item.name for item in report.differences)
    facts = (
        error.ranks,
        error.minority,
        error.implicated,
        error.call,
        error.phase,
        error.parameter,
        str(error),
        names,
        elements_of(report),
    )
    assert (report.ranks, report.phase) == (error.ranks, error.phase)
    assert (report.minority, report.implicated) == (error.minority, error.implicated)
    assert str(report) in str(error)
    assert not report.identical
    return Sight(type(error).__name__, *facts, before == all_bits(get_gradients(model)))


def _recovers(scene: Scene) -> bool:
    """Whether training goes on after the way out that the error names."""
    scene.model.broadcast_parameters()
    scene.model.broadcast_buffers()
    return next_call_is_right(scene.model, scene.rank)


LOCAL_STATISTICS = Checks(level="detail", local_buffers=("*.running_mean", "*.running_var"))


@cache
def bit_mask(bit: int) -> torch.Tensor:
    return torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)  # bit 31 wraps to the sign


def flip(tensor: torch.Tensor, place: tuple[int, ...], bit: int) -> None:
    """Change one bit of an fp32 tensor as broken memory does: nobody is told, no version is counted."""
    tensor.data.view(torch.int32)[place] ^= bit_mask(bit)

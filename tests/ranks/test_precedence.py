"""The error of a call with two faults at once: the fault that the fixed order names first, equal on every rank.

The order is the promise of docs/design.md, "Header": what failed before the exchange, then what the headers show, then
what the ranks compare afterwards. Every gradient is bitwise as before the call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.outcomes import attempt, backward, bits, same, small_net
from tests.helpers.shared_jobs import run_cases


def _add_to_first_bias(module: Any) -> None:
    with torch.no_grad():
        module[0].bias[0] += 1.0


@dataclass
class Scene:
    """What a rank does between the call before and the call with faults, in this order, and that call."""

    steps: bool = True
    clears: bool = True
    before_backward: Callable[[Any], object] = lambda _: None
    loss_factors: Sequence[float] = (1.0,)
    writes_weights: bool = False
    unscales: bool = False
    operation: str = "all_reduce"
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Fault(NamedTuple):
    """``does``: on the rank at fault. ``error``: its type. ``sentence``: the first of the error; ``{}`` is the rank."""

    does: Scene
    error: str
    sentence: str


_CALL = "all_reduce() call 2"
_MORE_MICRO_BATCHES = Scene(loss_factors=(1.0, 1.0, 1.0))  # one more than a rank that has written its weights
# In the order of precedence.
_FAULTS = {
    "failed": Fault(
        Scene(arguments={"metrics": {"loss": "high"}}),
        "PeerError",
        "rank {} failed before the exchange, so nothing was exchanged and no gradient changed.",
    ),
    "other call": Fault(Scene(operation="broadcast_buffers"), "DesyncError", "ranks met in different calls:"),
    "layout": Fault(
        Scene(before_backward=lambda module: module[1].bias.requires_grad_(False)),
        "LayoutError",
        "ranks hold different parameters, buffers or settings:",
    ),
    "repeat": Fault(
        Scene(clears=False, loss_factors=()),
        "DesyncError",
        "rank {}: no backward since the last call, gradients unchanged: an extra call",
    ),
    "stepped": Fault(
        Scene(writes_weights=True, loss_factors=(1.0, 1.0)),
        "DesyncError",
        "rank {}: weights changed between its first backward and now: a skipped call",
    ),
    "steps": Fault(
        Scene(steps=False), "DesyncError", "ranks made different numbers of optimizer steps since the last call:"
    ),
    "mixed": Fault(Scene(arguments={"sample_size": 2}), "DesyncError", "plain and weighted calls met:"),
    # With reproducible=True: the same action as the next one.
    "split": Fault(
        _MORE_MICRO_BATCHES, "DesyncError", "micro-batches are not split over the ranks as reproducible=True needs it:"
    ),
    "uneven": Fault(_MORE_MICRO_BATCHES, "DesyncError", "ranks bring uneven work:"),
    "metrics": Fault(Scene(arguments={"metrics": {"lost": 1.0}}), "DesyncError", "ranks bring different metrics:"),
    "digest": Fault(
        Scene(before_backward=_add_to_first_bias), "ReplicaDivergenceError", "replicas differ in 1 of 4 parameters"
    ),
    "edited": Fault(Scene(unscales=True), "EditedGradientError", "gradients changed between backward and the call:"),
    "nonfinite": Fault(
        Scene(loss_factors=(float("nan"),)),
        "NonFiniteGradientError",
        "non-finite gradients, found before they were exchanged:",
    ),
}


_NAMES = list(_FAULTS)
# A tree needs sample_size on every rank, which refuses an extra call before the header.
_IMPOSSIBLE = {("repeat", "split"), ("mixed", "split"), ("split", "uneven")}
_PAIRS = [pair for pair in combinations(_NAMES, 2) if pair not in _IMPOSSIBLE]


class Seen(NamedTuple):
    """What a rank saw of a call. ``untouched``: every gradient is bitwise as before."""

    error: str
    sentence: str
    untouched: bool


def _play(rank: int, faults: Mapping[int, str]) -> Seen:
    """A call in which each rank in ``faults`` has a fault."""
    checks = Checks(uneven="raise", divergence="raise", edited="raise", nonfinite="raise")
    is_tree = "split" in faults.values()
    model = LegacyDistributedDataParallel(small_net(), checks=checks, reproducible=is_tree)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    usual: dict[str, Any] = {"sample_size": 1 if is_tree else None, "metrics": {"loss": 1.0}}
    backward(model, 1.0)
    model.all_reduce(**usual)
    scene = _FAULTS[faults[rank]].does if rank in faults else Scene()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    _train(model, optimizer, scaler, scene, rank)
    before = bits(model)
    arguments = {**usual, **scene.arguments} if scene.operation == "all_reduce" else {}
    error = attempt(lambda: getattr(model, scene.operation)(**arguments))
    return Seen(type(error).__name__, _first_sentence(str(error)), same(before, bits(model)))


def _train(
    model: LegacyDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    scene: Scene,
    rank: int,
) -> None:
    """From the end of the call before to the gradients of the next call."""
    if scene.unscales:
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)
        scaler.update()  # the next unscale_() belongs to a new step
    elif scene.steps:
        optimizer.step()
    if scene.clears:
        model.zero_grad()
    scene.before_backward(model.module)
    for number, factor in enumerate(scene.loss_factors, 1):
        with nullcontext() if number == len(scene.loss_factors) else model.no_sync():
            backward(model, factor * (1.0 + rank))
        if scene.writes_weights and number == 1:
            _write_weights(model)
    if scene.unscales:
        scaler.unscale_(optimizer)


@torch.no_grad()
def _write_weights(model: torch.nn.Module) -> None:
    """A write in place that changes no bit: replicas stay equal."""
    for parameter in model.parameters():
        parameter.mul_(1.0)


def _first_sentence(text: str) -> str:
    line = text.partition("\n")[0]
    sentence, stop, _ = line.partition(". ")
    return sentence + stop.strip()


def _expected(faults: Mapping[int, str]) -> Seen:
    """The error of the fault that comes first in the table."""
    rank = min(faults, key=lambda rank: _NAMES.index(faults[rank]))
    fault = _FAULTS[faults[rank]]
    sentence = fault.sentence.format(rank)
    # The ranks are not in one call: the text names none.
    is_named = "other call" not in faults.values()
    return Seen(fault.error, f"{_CALL}: {sentence}" if is_named else sentence[0].upper() + sentence[1:], untouched=True)


@pytest.mark.cpu("a device has no digests in turns")
def test_of_two_faults_on_two_ranks_the_first_of_the_fixed_order_is_raised_without_a_change_of_any_gradient() -> None:
    scenes: list[dict[int, str]] = [{1: name} for name in _NAMES] + [{1: first, 0: second} for first, second in _PAIRS]

    found = run_cases(_play, 2, {str(faults): (faults,) for faults in scenes})

    assert found == {str(faults): [_expected(faults)] * 2 for faults in scenes}

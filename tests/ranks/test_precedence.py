"""The error of a call with two faults at once: the fault that the fixed order names first, equal on every rank.

The order is the promise of docs/design.md, "Header": what failed before the exchange, then what the headers show, then
what the ranks compare afterwards. Every gradient is bitwise as before the call.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.outcomes import attempt, backward, bits, same, small_net
from tests.helpers.ranks import run_ranks


@dataclass
class Scene:
    """The part of one rank in a call with faults."""

    model: LegacyDistributedDataParallel
    optimizer: torch.optim.Optimizer
    arguments: dict[str, Any]
    operation: str = "all_reduce"
    # What the rank does between the call before and the call with faults, in this order.
    steps: bool = True
    clears: bool = True
    loss_factors: list[float] = field(default_factory=lambda: [1.0])
    before_backward: list[Callable[[Any], object]] = field(default_factory=list)
    writes_weights: bool = False
    scaler: torch.amp.GradScaler | None = None


def _brings_no_number(scene: Scene) -> None:
    scene.arguments["metrics"] = {"loss": "high"}


def _broadcasts(scene: Scene) -> None:
    scene.operation, scene.arguments = "broadcast_buffers", {}


def _freezes(scene: Scene) -> None:
    scene.before_backward.append(lambda module: module[1].bias.requires_grad_(False))


def _repeats(scene: Scene) -> None:
    scene.clears, scene.loss_factors = False, []


def _writes_weights(scene: Scene) -> None:
    scene.writes_weights, scene.loss_factors = True, [1.0, 1.0]


def _makes_no_step(scene: Scene) -> None:
    scene.steps = False


def _passes_a_sample_size(scene: Scene) -> None:
    scene.arguments["sample_size"] = 2


def _has_more_micro_batches(scene: Scene) -> None:
    scene.loss_factors = [1.0, 1.0, 1.0]  # one more than a rank that has written its weights


def _renames_a_metric(scene: Scene) -> None:
    scene.arguments["metrics"] = {"lost": 1.0}


def _moves_a_weight(scene: Scene) -> None:
    scene.before_backward.append(_add_to_first_bias)


def _add_to_first_bias(module: Any) -> None:
    with torch.no_grad():
        module[0].bias[0] += 1.0


def _unscales(scene: Scene) -> None:
    scene.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scene.scaler.scale(torch.zeros(1))


def _computes_nan(scene: Scene) -> None:
    scene.loss_factors = [float("nan")]


class Fault(NamedTuple):
    """``does``: on the rank at fault. ``error``: its type. ``sentence``: the first of the error; ``{}`` is the rank."""

    does: Callable[[Scene], object]
    error: str
    sentence: str


_CALL = "all_reduce() call 2"
# In the order of precedence.
_FAULTS = {
    "failed": Fault(
        _brings_no_number,
        "PeerError",
        "rank {} failed before the exchange, so nothing was exchanged and no gradient changed.",
    ),
    "other call": Fault(_broadcasts, "DesyncError", "ranks met in different calls:"),
    "layout": Fault(_freezes, "LayoutError", "ranks hold different parameters, buffers or settings:"),
    "repeat": Fault(
        _repeats,
        "DesyncError",
        "rank {}: no backward since the last call, gradients unchanged: an extra call",
    ),
    "stepped": Fault(
        _writes_weights,
        "DesyncError",
        "rank {}: weights changed between its first backward and now: a skipped call",
    ),
    "steps": Fault(
        _makes_no_step,
        "DesyncError",
        "ranks made different numbers of optimizer steps since the last call:",
    ),
    "mixed": Fault(_passes_a_sample_size, "DesyncError", "plain and weighted calls met:"),
    # With reproducible=True: the same action as the next one.
    "split": Fault(
        _has_more_micro_batches,
        "DesyncError",
        "micro-batches are not split over the ranks as reproducible=True needs it:",
    ),
    "uneven": Fault(_has_more_micro_batches, "DesyncError", "ranks bring uneven work:"),
    "metrics": Fault(_renames_a_metric, "DesyncError", "ranks bring different metrics:"),
    "digest": Fault(_moves_a_weight, "ReplicaDivergenceError", "replicas differ in 1 of 4 parameters"),
    "edited": Fault(_unscales, "EditedGradientError", "gradients changed between backward and the call:"),
    "nonfinite": Fault(
        _computes_nan, "NonFiniteGradientError", "non-finite gradients, found before they were exchanged:"
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
    arguments: dict[str, Any] = {"sample_size": 1 if is_tree else None, "metrics": {"loss": 1.0}}
    scene = Scene(model, torch.optim.SGD(model.parameters(), lr=0.125), arguments)
    backward(model, 1.0)
    model.all_reduce(**arguments)
    if rank in faults:
        _FAULTS[faults[rank]].does(scene)
    _train(scene, rank)
    before = bits(model)
    error = attempt(lambda: getattr(model, scene.operation)(**scene.arguments))
    return Seen(type(error).__name__, _first_sentence(str(error)), same(before, bits(model)))


def _train(scene: Scene, rank: int) -> None:
    """From the end of the call before to the gradients of the next call."""
    if scene.steps:
        scene.optimizer.step() if scene.scaler is None else scene.scaler.step(scene.optimizer)
    if scene.scaler is not None:
        scene.scaler.update()  # the next unscale_() belongs to a new step
    if scene.clears:
        scene.model.zero_grad()
    for change in scene.before_backward:
        change(scene.model.module)
    for number, factor in enumerate(scene.loss_factors, 1):
        with nullcontext() if number == len(scene.loss_factors) else scene.model.no_sync():
            backward(scene.model, factor * (1.0 + rank))
        if scene.writes_weights and number == 1:
            _write_weights(scene.model)
    if scene.scaler is not None:
        scene.scaler.unscale_(scene.optimizer)


@torch.no_grad()
def _write_weights(model: torch.nn.Module) -> None:
    """A write in place that changes no bit: replicas stay equal."""
    for parameter in model.parameters():
        parameter.mul_(1.0)


def _first_sentence(text: str) -> str:
    line = text.partition("\n")[0]
    sentence, stop, _ = line.partition(". ")
    return sentence + stop.strip()


def _play_all(rank: int, scenes: Sequence[Mapping[int, str]]) -> list[Seen]:
    seen = []
    for faults in scenes:
        seen.append(_play(rank, faults))
        gc.collect()  # a wrapper in the traceback of its error would count among those of the process
    return seen


def _expected(faults: Mapping[int, str]) -> Seen:
    """The error of the fault that comes first in the table."""
    rank = min(faults, key=lambda rank: _NAMES.index(faults[rank]))
    fault = _FAULTS[faults[rank]]
    sentence = fault.sentence.format(rank)
    # The ranks are not in one call: the text names none.
    is_named = "other call" not in faults.values()
    return Seen(fault.error, f"{_CALL}: {sentence}" if is_named else sentence[0].upper() + sentence[1:], untouched=True)


def _check(world_size: int, scenes: Sequence[Mapping[int, str]]) -> None:
    """Play all scenes one after the other, and compare every rank with the table."""
    seen = run_ranks(_play_all, world_size, scenes)
    expected = [[_expected(faults)] * world_size for faults in scenes]
    found = [[of_rank[number] for of_rank in seen] for number in range(len(scenes))]
    wrong = {
        str(faults): of_scene
        for faults, of_scene, right in zip(scenes, found, expected, strict=True)
        if of_scene != right
    }
    assert not wrong


@pytest.mark.cpu("a device has no digests in turns")
def test_a_fault_of_one_rank_is_an_error_without_a_change_of_any_gradient() -> None:
    _check(2, [{1: name} for name in _NAMES])


@pytest.mark.cpu("a device has no digests in turns")
def test_of_two_faults_on_two_ranks_the_first_of_the_fixed_order_is_raised() -> None:
    _check(2, [{1: first, 0: second} for first, second in _PAIRS])


@pytest.mark.thorough
@pytest.mark.cpu("a device has no digests in turns")
def test_of_two_faults_on_three_ranks_the_first_of_the_fixed_order_is_raised() -> None:
    # The later fault is on the rank before: the number of a rank decides nothing.
    _check(3, [{2: first, 1: second} for first, second in _PAIRS])

"""A fault of a rank is found in the next call, with rank, parameter, phase and element; what it may do is silent."""

import copy
import re
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import Checks
from tests.helpers.replica_scenes import (
    LAST_STEP,
    Act,
    Action,
    CallOutcome,
    Element,
    Scenario,
    Scene,
    check_harmless,
    elements_of,
    flip,
    names_of,
    run_scenarios,
    training_net,
)
from tests.helpers.tiers import thorough

HERE = "tests.replicas.test_replica_faults"
WEIGHT = "2.weight"

# Actions of single ranks on their replica


def _flip(name: str = WEIGHT, place: tuple[int, ...] = (1, 2), bit: int = 22) -> Action:
    return lambda scene: flip(scene.module.get_parameter(name), place, bit)


def _set(key: str, factor: float) -> Action:
    return lambda scene: scene.optimizer.param_groups[0].update({key: scene.optimizer.param_groups[0][key] * factor})


def _steps(count: int) -> Action:
    return lambda scene: vars(scene).update(steps=count)


def _load(seed: int) -> Action:
    return lambda scene: scene.module.load_state_dict(training_net(seed).state_dict())


def _flip_gradient(scene: Scene) -> None:
    flip(scene.module[2].weight.grad, (3, 0), 20)


def _poke_buffer(scene: Scene) -> None:
    scene.module.get_buffer("table")[2] += 0.5


def _leave_out(scene: Scene) -> None:
    (group,) = scene.optimizer.param_groups
    group["params"] = [parameter for parameter in group["params"] if parameter is not scene.module[2].weight]


def _replace_weight(scene: Scene) -> None:
    scene.module[2].weight = nn.Parameter(scene.module[2].weight.clone())


def _optimize_a_copy(scene: Scene) -> None:
    scene.optimizer = torch.optim.SGD(copy.deepcopy(scene.module).parameters(), lr=0.125)


def _swap_layers(scene: Scene) -> None:
    scene.module[0], scene.module[2] = scene.module[2], scene.module[0]


def _round_parameters(scene: Scene) -> None:
    for parameter in scene.module.parameters():
        parameter.copy_(parameter.bfloat16())


def _scale_gradients(scene: Scene) -> None:
    for group in scene.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.div_(1024.0)


def _clip(scene: Scene) -> None:
    nn.utils.clip_grad_norm_(scene.module.parameters(), 0.01)


_another_rate = _set("lr", 1.01)
_flip_frozen = _flip("3.weight", (1, 3))


@dataclass(frozen=True)
class Fault:
    """``has_evidence``: an invariant of the rank's own tells who it was, so that two ranks are enough.

    ``bit``: where one element differs, its index, and the bit if no arithmetic came after it.
    """

    moment: str
    step: int
    action: Action
    call: int
    phase: str
    has_evidence: bool
    parameter: str | None = WEIGHT
    words: tuple[str, ...] = ()
    place: tuple[int, ...] | None = None
    bit: int | None = None
    init_sync: bool = True


_outside = partial(
    Fault, "stepped", 1, call=2, phase="outside", has_evidence=True, words=("changed outside of a step",)
)
_flipped = partial(_outside, action=_flip(), place=(1, 2), bit=22)
_at_start = partial(Fault, "built", 0, call=1, phase="start", has_evidence=False, init_sync=False)
_used = partial(Fault, "reduced", 1, call=2, phase="gradients", has_evidence=False, parameter=None)
_in_step = partial(Fault, "reduced", 1, call=2, phase="step", has_evidence=False, parameter=None)
_next_step = partial(Fault, "stepped", 1, call=3, phase="step", has_evidence=False)
_of_frozen = {"action": _flip_frozen, "parameter": "3.weight", "place": (1, 3), "bit": 22}
_NO_MEMBER = "tensor that is not in the model, in place of a parameter"
# A loop may hold other weights between forward and step(), and give them back: such a flip counts from the step() on.
_BEFORE_STEP = partial(Fault, action=_flip(), call=3, phase="outside", has_evidence=True, place=(1, 2))

FAULTS = {
    "a bit flips after the first step": _flipped(),
    "a bit flips after a step": Fault("stepped", 2, _flip(), 3, "outside", has_evidence=True, place=(1, 2), bit=22),
    "a bit flips after the last step": Fault(
        "stepped", LAST_STEP, _flip(), LAST_STEP + 1, "outside", has_evidence=True, place=(1, 2), bit=22
    ),
    "a bit flips between forward and backward": _BEFORE_STEP("forwarded", 2),
    "a bit flips before the call": _BEFORE_STEP("backward", 2),
    "a bit flips between call and step": _BEFORE_STEP("reduced", 2),
    "the lowest bit flips": _outside(action=_flip(bit=0), place=(1, 2), bit=0),
    "a sign flips": _outside(action=_flip(place=(0, 0), bit=31), place=(0, 0), bit=31),
    "a frozen weight flips": _outside(**_of_frozen),
    "a frozen weight flips before the first call": _at_start(**_of_frozen),
    "a bit flips before the first call": Fault(
        "wrapped", 0, _flip(), 1, "start", has_evidence=False, place=(1, 2), bit=22, init_sync=False
    ),
    "a weight becomes NaN": _outside(action=lambda scene: scene.module[2].weight[0, 0].fill_(torch.nan), place=(0, 0)),
    "weights are rounded": _outside(action=_round_parameters, parameter=None),
    "another checkpoint is loaded": _outside(action=_load(2), parameter=None),
    "layers of one shape change places": _outside(action=_swap_layers, parameter=None),
    "another seed": _at_start(action=_load(2), parameter=None, words=("init_sync=False",)),
    "another initial weight": _at_start(action=lambda scene: scene.module[2].weight.fill_(0.5)),
    "another checkpoint is loaded before the first call": Fault(
        "wrapped", 0, _load(2), 1, "start", has_evidence=False, parameter=None
    ),
    "a step is missing": _in_step(action=_steps(0), words=("different numbers of steps",)),
    "a step too many": _in_step(action=_steps(2), words=("different numbers of steps",)),
    "another learning rate": _in_step(action=_another_rate, words=("lr", "0.12625")),
    "another weight decay": _in_step(action=_set("weight_decay", 2.0), words=("weight_decay", "0.5")),
    "momentum changes": _next_step(
        action=lambda scene: flip(scene.optimizer.state[scene.module[2].weight]["momentum_buffer"], (0, 3), 21),
        has_evidence=True,
        place=(0, 3),
        words=("momentum_buffer", "optimizer state changed outside of a step"),
    ),
    "momentum is lost": _next_step(
        action=lambda scene: scene.optimizer.state.clear(),
        has_evidence=True,
        parameter=None,
        words=(
            "had no optimizer state before the last step(), unlike the others: perhaps resumed without",
            "`momentum_buffer` differs in 6 of 6 parameters",
        ),
    ),
    "an optimizer lacks a layer": _next_step(
        action=_leave_out, words=("in optimizers: ", "without '2.weight'", "left out of a list")
    ),
    "an optimizer holds what was replaced": _next_step(
        action=_replace_weight, has_evidence=True, words=(_NO_MEMBER, "not in the model: float32 (4, 4)")
    ),
    "a weight is replaced between call and step": Fault(
        "reduced", 1, _replace_weight, 2, "outside", has_evidence=True, words=("changed outside of a step", _NO_MEMBER)
    ),
    "an optimizer holds nothing of the model": _next_step(
        action=_optimize_a_copy,
        parameter=None,
        words=("different numbers of steps", "1 of an optimizer that holds no parameter of the model"),
    ),
    "gradients are clipped": _used(action=_clip),
    "gradients are dropped": _used(action=lambda scene: scene.optimizer.zero_grad()),
    "gradients stay scaled": _used(action=_scale_gradients),
    "a gradient is edited": _used(
        action=lambda scene: scene.module[2].weight.grad[0, 0].add_(1.0), parameter=WEIGHT, place=(0, 0)
    ),
    "a bit of a gradient flips": _used(action=_flip_gradient, parameter=WEIGHT, place=(3, 0)),
    "a buffer is poked": Fault(
        "stepped",
        1,
        _poke_buffer,
        2,
        "buffers",
        has_evidence=False,
        parameter=None,
        words=("buffer 'table'", "broadcast_buffers"),
    ),
}
SCENARIOS = {
    name: Scenario([Act(fault.moment, fault.step, fault.action)], {"init_sync": fault.init_sync})
    for name, fault in FAULTS.items()
}
_outcomes = partial(run_scenarios, f"{HERE}:SCENARIOS")


@pytest.mark.parametrize("world_size, who", [(2, 0), thorough(3, 0), (3, 1)])
@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_one_rank_alone_is_told_on_all(name: str, world_size: int, who: int) -> None:
    fault, outcome = FAULTS[name], _outcomes(world_size, (who,))[name]

    assert (outcome.error, outcome.call) == ("ReplicaDivergenceError", fault.call), outcome
    assert (outcome.phase, outcome.parameter) == (fault.phase, fault.parameter), outcome.text
    assert outcome.ranks == ((who,) if world_size > 2 or fault.has_evidence else ()), outcome.text
    assert all(word in outcome.unwrapped for word in fault.words), outcome.text
    assert fault.phase == "gradients" or "edited, clipped or dropped" not in outcome.unwrapped
    assert outcome.report.minority == ((who,) if world_size > 2 else ())
    assert outcome.report.implicated == ((who,) if fault.has_evidence else ())
    assert f"all_reduce() call {fault.call}" in outcome.text
    if world_size == 2:
        assert "rank 1 against rank 0" in outcome.unwrapped
        assert ("a count cannot tell" in outcome.text) == (not fault.has_evidence), outcome.text
    if fault.place is not None:
        shown = who if world_size > 2 else 1  # of two ranks the first is what the other is compared with
        (element,) = (item for item in elements_of(outcome.report) if item.thing == f"parameter {fault.parameter!r}")
        assert (element.rank, element.count, element.index) == (shown, 1, fault.place)
        assert fault.bit is None or (element.kind, element.bit) == ("one bit", fault.bit)
    if world_size > 2 and fault.phase in ("gradients", "step"):  # the elements name no cause that the phase rules out
        assert not re.search("start|data|order|kernel", outcome.unwrapped.partition("why: ")[2]), outcome.text
    check_harmless(outcome)


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_all_ranks_alike_is_silent(name: str) -> None:
    assert _outcomes(3, (0, 1, 2))[name] == CallOutcome(recovered=True)


@pytest.mark.parametrize("name", FAULTS)
def test_a_majority_is_counted_and_not_called_right(name: str) -> None:
    outcome, has_evidence = _outcomes(3, (0, 1))[name], FAULTS[name].has_evidence

    assert (outcome.phase, outcome.ranks) == (FAULTS[name].phase, () if has_evidence else (2,)), outcome.text
    assert (outcome.report.minority, outcome.report.implicated) == ((2,), (0, 1) if has_evidence else ())
    assert ("count and evidence disagree" in outcome.unwrapped) == has_evidence
    assert "rank 2 against ranks 0-1 (2 of 3 ranks agree)" in outcome.unwrapped
    check_harmless(outcome)


# A fault beside what other ranks do

FIRST, SECOND, ALL = 0, 1, 2  # groups of ranks


class Beside(NamedTuple):
    """``groups``: of the ranks that the error names. ``implicated``: the groups with evidence, where not the same."""

    acts: list[Act]
    phase: str
    groups: tuple[int, ...]
    call: int = 2
    implicated: tuple[int, ...] | None = None


def _rebuild(scene: Scene) -> None:
    """Make a new optimizer with the state of the old one, as a resume does."""
    state, (group,) = scene.optimizer.state_dict(), scene.optimizer.param_groups
    scene.optimizer = torch.optim.SGD(group["params"], lr=1.0)
    scene.optimizer.load_state_dict(state)


def _broadcast_buffers(scene: Scene) -> None:
    scene.model.broadcast_buffers()


def _after_rebuilt(moment: str, action: Action, phase: str, *, has_evidence: bool = False) -> Beside:
    acts = [Act("stepped", 1, _rebuild, FIRST), Act(moment, 2, action, SECOND)]
    return Beside(acts, phase, (SECOND,), call=3, implicated=(SECOND,) if has_evidence else ())


_weight_1, _weight_2 = Act("stepped", 1, _flip()), Act("stepped", 1, _flip(), SECOND)
_bias_2 = Act("stepped", 1, _flip("0.bias", (3,), 4), SECOND)
_rate, _gradient = Act("reduced", 1, _another_rate), Act("reduced", 1, _flip_gradient)
_gradient_between = Act("between", 1, _flip_gradient)
_broadcast, _two_steps = Act("stepped", 1, _broadcast_buffers, ALL), Act("reduced", 1, _steps(2), ALL)
BESIDE = {
    "two weights": Beside([_weight_1, _bias_2], "outside", (FIRST, SECOND)),
    "rate, then weight": Beside([_rate, _weight_2], "step", (FIRST, SECOND), implicated=(SECOND,)),
    "gradient, then weight": Beside([_gradient, _bias_2], "gradients", (FIRST, SECOND), implicated=(SECOND,)),
    # Buffers have no invariant: the second is named, the first shown.
    "buffer and weight": Beside([Act("stepped", 1, _poke_buffer), _weight_2], "outside", (SECOND,)),
    "a rate, and a broadcast of buffers": Beside([_rate, _broadcast], "step", (FIRST,), implicated=()),
    "a gradient, and a broadcast of buffers": Beside([_gradient, _broadcast], "gradients", (FIRST,), implicated=()),
    "a weight before a broadcast of buffers": Beside([_weight_1, _broadcast], "outside", (FIRST,)),
    "a weight after a broadcast of buffers": Beside([_broadcast, _weight_1], "outside", (FIRST,)),
    "a gradient before the second of two steps": Beside(
        [_two_steps, _gradient_between], "gradients", (FIRST,), implicated=()
    ),
    "a gradient before the first of two steps alone": Beside(  # and back again
        [_two_steps, _gradient, _gradient_between], "gradients", (FIRST,), implicated=()
    ),
    # The first has rebuilt its optimizer, where a parameter is in none.
    "a frozen weight flips before the step": _after_rebuilt("reduced", _flip_frozen, "outside", has_evidence=True),
    "a frozen weight flips after the step": _after_rebuilt("stepped", _flip_frozen, "outside", has_evidence=True),
    "a weight flips before the step": _after_rebuilt("reduced", _flip(), "outside", has_evidence=True),
    "a weight flips after the step": _after_rebuilt("stepped", _flip(), "outside", has_evidence=True),
    "gradients are clipped": _after_rebuilt("reduced", _clip, "gradients"),
    "another rate": _after_rebuilt("reduced", _another_rate, "step"),
    "an optimizer lacks a layer": _after_rebuilt("reduced", _leave_out, "step"),
}
_LOCAL_TABLE = Checks("detail", local_buffers=("table",))
FREEDOMS = {
    "has other data and statistics of its own": Scenario(
        [Act("wrapped", 0, lambda scene: vars(scene).update(data=scene.data * 3 + 1))]
    ),
    "pokes a buffer of its own": Scenario([Act("stepped", 1, _poke_buffer)], {"checks": _LOCAL_TABLE}),
    "pokes what all ignore": Scenario([Act("stepped", 1, _flip("3.weight", (0, 0)))], {"ignore": ["3.weight"]}),
    "rebuilds after the first step": Scenario([Act("stepped", 1, _rebuild)]),
    "rebuilds between call and step": Scenario([Act("reduced", 2, _rebuild)]),
    "rebuilds again and again": Scenario([Act("reduced", step, _rebuild) for step in (1, 2, 3)]),
    "rebuilds between two steps of a call": Scenario([Act("reduced", 2, _steps(2), ALL), Act("between", 2, _rebuild)]),
}
THREE = {name: Scenario(beside.acts) for name, beside in BESIDE.items()} | FREEDOMS


@pytest.mark.parametrize("first, second", [(0, 2), thorough(1, 1)])
@pytest.mark.parametrize("name", BESIDE)
def test_a_fault_is_told_whatever_else_happens_in_its_step(name: str, first: int, second: int) -> None:
    groups, beside = ((first,), (second,), (0, 1, 2)), BESIDE[name]
    outcome = run_scenarios(f"{HERE}:THREE", 3, *groups)[name]

    assert (outcome.error, outcome.call, outcome.phase) == ("ReplicaDivergenceError", beside.call, beside.phase)
    implicated = beside.groups if beside.implicated is None else beside.implicated
    for ranks, found in ((beside.groups, outcome.ranks), (implicated, outcome.report.implicated)):
        assert found == tuple(sorted({rank for group in ranks for rank in groups[group]})), outcome.text
    if name == "buffer and weight":
        assert "buffer 'table'" in names_of(outcome.report)
    if name.endswith("then weight"):
        assert outcome.unwrapped.count(f"rank {second}: parameters changed outside of a step") == 1, outcome.text
    check_harmless(outcome)


@pytest.mark.parametrize("name", FREEDOMS)
def test_what_a_rank_may_do_alone_is_silent(name: str) -> None:
    assert run_scenarios(f"{HERE}:THREE", 3, (0,), (2,), (0, 1, 2))[name] == CallOutcome(recovered=True)


FOUR = {
    "every rank flips a bit": Scenario(
        [Act("stepped", 1, lambda scene: flip(scene.module[2].weight, (scene.rank, scene.rank), 22), ALL)]
    ),
    "every rank has a seed": Scenario(
        [Act("built", 0, lambda scene: _load(10 + scene.rank)(scene), ALL)], {"init_sync": False}
    ),
    "every rank has a rate": Scenario([Act("reduced", 1, lambda scene: _set("lr", 1 + scene.rank)(scene), ALL)]),
    "two ranks": Scenario([Act("stepped", 2, _flip()), Act("stepped", 2, _flip(place=(0, 1), bit=30), SECOND)]),
}


def _of_four(name: str) -> CallOutcome:
    return run_scenarios(f"{HERE}:FOUR", 4, (1,), (3,), (0, 1, 2, 3))[name]


@pytest.mark.parametrize("name", [name for name in FOUR if name.startswith("every")])
def test_where_no_two_ranks_agree_nobody_is_blamed(name: str) -> None:
    outcome = _of_four(name)

    assert (outcome.error, outcome.ranks) == ("ReplicaDivergenceError", ())
    assert "a count cannot tell" in outcome.text
    assert "every rank has its own" in outcome.unwrapped
    check_harmless(outcome)


def test_elements_of_several_ranks_are_each_compared_with_what_most_hold() -> None:
    assert elements_of(_of_four("two ranks").report) == (
        Element("parameter '2.weight'", 1, 1, (1, 2), "one bit", 22),
        Element("parameter '2.weight'", 3, 1, (0, 1), "one bit", 30),
    )

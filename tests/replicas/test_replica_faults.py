"""A fault of a rank is found in the next call, with rank, parameter, phase and element; what it may do is silent."""

import re
from dataclasses import dataclass
from functools import cache, partial

import pytest

from tests.helpers import replica_faults
from tests.helpers.replica_scenes import (
    LAST_STEP,
    LOCAL_TABLE,
    Action,
    CallOutcome,
    Element,
    Scenario,
    Scene,
    SharedOutcomes,
    check_harmless,
    run_scenarios,
    scenario,
    training_net,
)
from tests.helpers.tiers import thorough

WEIGHT = replica_faults.WEIGHT


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

    @property
    def scenario(self) -> Scenario:
        return scenario((self.moment, self.step, self.action), options={"init_sync": self.init_sync})


_outside = partial(Fault, phase="outside", has_evidence=True, words=("changed outside of a step",))
_flipped = partial(_outside, action=replica_faults.flip_weight, place=(1, 2), bit=22)
# A loop may hold other weights between forward and step(), and give them back: such a flip counts from the step() on.
_flipped_for_a_step = partial(_outside, action=replica_faults.flip_weight, place=(1, 2))
_at_start = partial(Fault, moment="built", step=0, call=1, phase="start", has_evidence=False, init_sync=False)
_used = partial(Fault, moment="reduced", step=1, call=2, phase="gradients", has_evidence=False, parameter=None)
_in_step = partial(Fault, moment="reduced", step=1, call=2, phase="step", has_evidence=False, parameter=None)
_next_step = partial(_in_step, moment="stepped", call=3)
_buffer = partial(Fault, phase="buffers", has_evidence=False, parameter=None)

FAULTS = {
    "a bit flips after the first step": _flipped("stepped", 1, call=2),
    "a bit flips after a step": _flipped("stepped", 2, call=3),
    "a bit flips after the last step": _flipped("stepped", LAST_STEP, call=LAST_STEP + 1),
    "a bit flips between forward and backward": _flipped_for_a_step("forwarded", 2, call=3),
    "a bit flips before the call": _flipped_for_a_step("backward", 2, call=3),
    "the lowest bit flips": _outside(
        "stepped", 1, partial(replica_faults.flip_weight, bit=0), call=2, place=(1, 2), bit=0
    ),
    "a sign flips": _outside(
        "stepped", 1, partial(replica_faults.flip_weight, place=(0, 0), bit=31), call=2, place=(0, 0), bit=31
    ),
    "a frozen weight flips": _outside(
        "stepped",
        1,
        partial(replica_faults.flip_weight, name="3.weight", place=(1, 3)),
        call=2,
        parameter="3.weight",
        place=(1, 3),
        bit=22,
    ),
    "a frozen weight flips before the first call": _at_start(
        action=partial(replica_faults.flip_weight, name="3.weight", place=(1, 3)),
        parameter="3.weight",
        place=(1, 3),
        bit=22,
    ),
    "a bit flips before the first call": _at_start(
        moment="wrapped", action=replica_faults.flip_weight, place=(1, 2), bit=22
    ),
    "a bit flips between call and step": _outside("reduced", 1, replica_faults.flip_weight, call=2, place=(1, 2)),
    "a weight becomes NaN": _outside("stepped", 1, replica_faults.fill_with_nan, call=2, place=(0, 0)),
    "weights are rounded": _outside("stepped", 1, replica_faults.round_parameters, call=2, parameter=None),
    "another checkpoint is loaded": _outside("stepped", 1, replica_faults.load_another_seed, call=2, parameter=None),
    "layers of one shape change places": _outside("stepped", 1, replica_faults.swap_layers, call=2, parameter=None),
    "another seed": _at_start(action=replica_faults.load_another_seed, parameter=None, words=("init_sync=False",)),
    "another initial weight": _at_start(action=replica_faults.another_weight),
    "another checkpoint is loaded before the first call": _at_start(
        moment="wrapped", action=replica_faults.load_another_seed, parameter=None, init_sync=True
    ),
    "a step is missing": _in_step(
        action=partial(replica_faults.other_steps, steps=0), words=("different numbers of steps",)
    ),
    "a step too many": _in_step(
        action=partial(replica_faults.other_steps, steps=2), words=("different numbers of steps",)
    ),
    "another learning rate": _in_step(
        action=partial(replica_faults.set_group, key="lr", factor=1.01), words=("lr", "0.12625")
    ),
    "another weight decay": _in_step(
        action=partial(replica_faults.set_group, key="weight_decay", factor=2.0), words=("weight_decay", "0.5")
    ),
    "momentum changes": _next_step(
        action=replica_faults.flip_momentum,
        has_evidence=True,
        parameter=WEIGHT,
        place=(0, 3),
        words=("momentum_buffer", "optimizer state changed outside of a step"),
    ),
    "momentum is lost": _next_step(
        action=replica_faults.lose_momentum,
        has_evidence=True,
        words=(
            "had no optimizer state before the last step(), unlike the others: perhaps resumed without",
            "`momentum_buffer` differs in 6 of 6 parameters",
        ),
    ),
    "an optimizer lacks a layer": _next_step(
        action=replica_faults.leave_out,
        parameter=WEIGHT,
        words=("in optimizers: ", "without '2.weight'", "left out of a list"),
    ),
    "an optimizer holds what was replaced": _next_step(
        action=replica_faults.replace_weight,
        has_evidence=True,
        parameter=WEIGHT,
        words=("tensor that is not in the model, in place of a parameter", "not in the model: float32 (4, 4)"),
    ),
    "a weight is replaced between call and step": _outside(
        "reduced",
        1,
        replica_faults.replace_weight,
        call=2,
        words=("changed outside of a step", "tensor that is not in the model, in place of a parameter"),
    ),
    "an optimizer holds nothing of the model": _next_step(
        action=replica_faults.optimize_a_copy,
        parameter=None,
        words=("different numbers of steps", "1 of an optimizer that holds no parameter of the model"),
    ),
    "gradients are clipped": _used(action=replica_faults.clip),
    "gradients are dropped": _used(action=replica_faults.drop_gradients),
    "gradients stay scaled": _used(action=replica_faults.scale_gradients),
    "a gradient is edited": _used(action=replica_faults.edit_gradient, parameter=WEIGHT, place=(0, 0)),
    "a bit of a gradient flips": _used(action=replica_faults.flip_gradient, parameter=WEIGHT, place=(3, 0)),
    "a buffer is poked": _buffer(
        "stepped", 1, replica_faults.poke_buffer, 2, words=("buffer 'table'", "broadcast_buffers")
    ),
}
SCENARIOS = {name: fault.scenario for name, fault in FAULTS.items()}


@cache
def _outcomes(world_size: int, *faulty: int) -> SharedOutcomes[CallOutcome]:
    return run_scenarios(SCENARIOS, world_size, faulty)


@pytest.mark.parametrize("world_size, who", [(2, 0), thorough(2, 1), thorough(3, 0), (3, 1), thorough(4, 2)])
@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_one_rank_alone_is_told_on_all(name: str, world_size: int, who: int) -> None:
    fault, outcome = FAULTS[name], _outcomes(world_size, who)[name]

    assert (outcome.error, outcome.call) == ("ReplicaDivergenceError", fault.call), outcome
    assert (outcome.phase, outcome.parameter) == (fault.phase, fault.parameter), outcome.text
    assert outcome.ranks == ((who,) if world_size > 2 or fault.has_evidence else ()), outcome.text
    assert all(word in outcome.unwrapped for word in fault.words), outcome.text
    assert fault.phase == "gradients" or "edited, clipped or dropped" not in outcome.unwrapped
    assert outcome.minority == ((who,) if world_size > 2 else ())
    assert outcome.implicated == ((who,) if fault.has_evidence else ())
    assert f"all_reduce() call {fault.call}" in outcome.text
    if world_size == 2:
        assert "rank 1 against rank 0" in outcome.unwrapped
        assert ("a count cannot tell" in outcome.text) == (not fault.has_evidence), outcome.text
    if fault.place is not None:
        shown = who if world_size > 2 else 1  # of two ranks the first is what the other is compared with
        (element,) = (item for item in outcome.elements if item.thing == f"parameter {fault.parameter!r}")
        assert (element.rank, element.count, element.index) == (shown, 1, fault.place)
        assert fault.bit is None or (element.kind, element.bit) == ("one bit", fault.bit)
    if world_size > 2 and fault.phase in ("gradients", "step"):  # the elements name no cause that the phase rules out
        assert not re.search("start|data|order|kernel", outcome.unwrapped.partition("why: ")[2]), outcome.text
    check_harmless(outcome)


@pytest.mark.parametrize("world_size", [thorough(2), 3])
@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_all_ranks_alike_is_silent(name: str, world_size: int) -> None:
    assert _outcomes(world_size, *range(world_size))[name] == CallOutcome(recovered=True)


@pytest.mark.parametrize("name", FAULTS)
def test_a_majority_is_counted_and_not_called_right(name: str) -> None:
    outcome, has_evidence = _outcomes(3, 0, 1)[name], FAULTS[name].has_evidence

    assert (outcome.phase, outcome.ranks) == (FAULTS[name].phase, () if has_evidence else (2,)), outcome.text
    assert (outcome.minority, outcome.implicated) == ((2,), (0, 1) if has_evidence else ())
    assert ("count and evidence disagree" in outcome.unwrapped) == has_evidence
    assert "rank 2 against ranks 0-1 (2 of 3 ranks agree)" in outcome.unwrapped
    check_harmless(outcome)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_two_ranks_of_four_have_no_majority_against_them(name: str) -> None:
    outcome = _outcomes(4, 1, 3)[name]

    assert (outcome.phase, outcome.ranks) == (FAULTS[name].phase, (1, 3) if FAULTS[name].has_evidence else ()), (
        outcome.text
    )
    assert "ranks 1, 3 against ranks 0, 2" in outcome.text
    check_harmless(outcome)


# A fault beside what other ranks do

_another_rate = partial(replica_faults.set_group, key="lr", factor=1.01)
_two_steps = partial(replica_faults.other_steps, steps=2)


def _flip_own_place(scene: Scene) -> None:
    replica_faults.flip_weight(scene, place=(scene.rank, scene.rank))


def _own_seed(scene: Scene) -> None:
    scene.module.load_state_dict(training_net(seed=10 + scene.rank).state_dict())


def _own_learning_rate(scene: Scene) -> None:
    scene.optimizer.param_groups[0]["lr"] *= 1 + scene.rank


_flip_bias = partial(replica_faults.flip_weight, name="0.bias", place=(3,), bit=4)
TWO = {
    "two weights": Scenario([("stepped", 1, replica_faults.flip_weight, 0), ("stepped", 1, _flip_bias, 1)]),
    "rate, then weight": Scenario([("reduced", 1, _another_rate, 0), ("stepped", 1, replica_faults.flip_weight, 1)]),
    "gradient, then weight": Scenario([("reduced", 1, replica_faults.flip_gradient, 0), ("stepped", 1, _flip_bias, 1)]),
    "buffer and weight": Scenario(
        [("stepped", 1, replica_faults.poke_buffer, 0), ("stepped", 1, replica_faults.flip_weight, 1)]
    ),
}
ALL_DIFFER = {
    "every rank flips a bit": scenario(("stepped", 1, _flip_own_place)),
    "every rank has a seed": scenario(("built", 0, _own_seed), options={"init_sync": False}),
    "every rank has a rate": scenario(("reduced", 1, _own_learning_rate)),
}


@cache
def _outcomes_two(world_size: int, first: int, second: int) -> SharedOutcomes[CallOutcome]:
    return run_scenarios(TWO, world_size, (first,), (second,))


@pytest.mark.parametrize("world_size, first, second", [(3, 0, 2), thorough(4, 3, 1)])
@pytest.mark.parametrize(
    "name, phase, both",
    [
        ("two weights", "outside", True),
        ("rate, then weight", "step", True),
        ("gradient, then weight", "gradients", True),
        ("buffer and weight", "outside", False),  # buffers have no invariant: the second is named, the first shown
    ],
)
def test_two_faults_in_one_step_are_both_told(
    name: str, phase: str, both: bool, world_size: int, first: int, second: int
) -> None:
    outcome = _outcomes_two(world_size, first, second)[name]

    assert (outcome.call, outcome.phase) == (2, phase), outcome.text
    assert outcome.ranks == (tuple(sorted((first, second))) if both else (second,)), outcome.text
    assert both or "buffer 'table'" in outcome.names
    text = f"rank {second}: parameters changed outside of a step"
    assert name == "two weights" or outcome.unwrapped.count(text) == 1, outcome.text
    check_harmless(outcome)


@cache
def _outcomes_all_differ() -> SharedOutcomes[CallOutcome]:
    return run_scenarios(ALL_DIFFER, 4, (0, 1, 2, 3))


@pytest.mark.parametrize("name", ALL_DIFFER)
def test_where_no_two_ranks_agree_nobody_is_blamed(name: str) -> None:
    outcome = _outcomes_all_differ()[name]

    assert (outcome.error, outcome.ranks) == ("ReplicaDivergenceError", ())
    assert "a count cannot tell" in outcome.text
    assert "every rank has its own" in outcome.unwrapped
    check_harmless(outcome)


def test_elements_of_several_ranks_are_each_compared_with_what_most_hold() -> None:
    scenarios = {
        "": Scenario(
            [
                ("stepped", 2, replica_faults.flip_weight, 0),
                ("stepped", 2, partial(replica_faults.flip_weight, place=(0, 1), bit=30), 1),
            ]
        )
    }

    assert run_scenarios(scenarios, 4, (1,), (3,))[""].elements == (
        Element("parameter '2.weight'", 1, 1, (1, 2), "one bit", 22),
        Element("parameter '2.weight'", 3, 1, (0, 1), "one bit", 30),
    )


def _broadcast_buffers(scene: Scene) -> None:
    scene.model.broadcast_buffers()


# Of rank 1 (0), and of both ranks (1).
WITH_BOTH = {
    "a rate, and a broadcast of buffers": Scenario(
        [("reduced", 1, _another_rate, 0), ("stepped", 1, _broadcast_buffers, 1)]
    ),
    "a gradient, and a broadcast of buffers": Scenario(
        [("reduced", 1, replica_faults.flip_gradient, 0), ("stepped", 1, _broadcast_buffers, 1)]
    ),
    "a weight before a broadcast of buffers": Scenario(
        [("stepped", 1, replica_faults.flip_weight, 0), ("stepped", 1, _broadcast_buffers, 1)]
    ),
    "a weight after a broadcast of buffers": Scenario(
        [("stepped", 1, _broadcast_buffers, 1), ("stepped", 1, replica_faults.flip_weight, 0)]
    ),
    "a gradient before the second of two steps": Scenario(
        [("reduced", 1, _two_steps, 1), ("between", 1, replica_faults.flip_gradient, 0)]
    ),
    "a gradient before the first of two steps alone": Scenario(
        [
            ("reduced", 1, _two_steps, 1),
            ("reduced", 1, replica_faults.flip_gradient, 0),
            ("between", 1, replica_faults.flip_gradient, 0),  # and back again
        ]
    ),
}


@cache
def _outcomes_with_both() -> SharedOutcomes[CallOutcome]:
    return run_scenarios(WITH_BOTH, 2, (1,), (0, 1))


@pytest.mark.parametrize("name", WITH_BOTH)
def test_what_both_ranks_do_hides_nothing_that_one_did(name: str) -> None:
    outcome = _outcomes_with_both()[name]

    phase = {"a rate": "step", "a gradient": "gradients", "a weight": "outside"}
    kind = next(kind for kind in phase if name.startswith(kind))
    ranks = (1,) if kind == "a weight" else ()
    assert (outcome.call, outcome.phase, outcome.ranks) == (2, phase[kind], ranks), outcome.text


# What a rank may do alone

FREEDOMS = {
    "has other data and statistics of its own": scenario(("wrapped", 0, replica_faults.other_data)),
    "pokes a buffer of its own": scenario(("stepped", 1, replica_faults.poke_buffer), options={"checks": LOCAL_TABLE}),
    "pokes what all ignore": scenario(
        ("stepped", 1, partial(replica_faults.flip_weight, name="3.weight", place=(0, 0))),
        options={"ignore": ["3.weight"]},
    ),
}


@cache
def _outcomes_free(world_size: int, *faulty: int) -> SharedOutcomes[CallOutcome]:
    return run_scenarios(FREEDOMS, world_size, faulty)


@pytest.mark.parametrize("world_size, who", [thorough(2, 1), (3, 0)])
@pytest.mark.parametrize("name", FREEDOMS)
def test_what_a_rank_may_do_alone_is_silent(name: str, world_size: int, who: int) -> None:
    assert _outcomes_free(world_size, who)[name] == CallOutcome(recovered=True)

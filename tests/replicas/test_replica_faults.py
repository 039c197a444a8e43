"""A fault of a single rank is found in the next call, with rank, parameter, phase and element."""

from dataclasses import dataclass
from functools import cache, partial

import pytest

from tests.helpers import replica_faults
from tests.helpers.replica_scenes import (
    LAST_STEP,
    Action,
    CallOutcome,
    Scenario,
    SharedOutcomes,
    check_harmless,
    run_scenarios,
    scenario,
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
    check_harmless(outcome)


@pytest.mark.parametrize("who", [0, thorough(1)])
@pytest.mark.parametrize("name", FAULTS)
def test_of_two_ranks_both_are_shown(name: str, who: int) -> None:
    outcome = _outcomes(2, who)[name]

    assert "rank 1 against rank 0" in outcome.unwrapped
    assert ("a count cannot tell" in outcome.text) == (not FAULTS[name].has_evidence), outcome.text


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.phase in ("gradients", "step")])
def test_how_elements_differ_names_no_cause_that_the_phase_rules_out(name: str) -> None:
    outcome = _outcomes(3, 1)[name]

    assert not [
        word for word in ("start", "data", "order", "kernel") if word in outcome.unwrapped.partition("why: ")[2]
    ]


@pytest.mark.parametrize("world_size, who", [(2, 0), thorough(2, 1), thorough(3, 0), (3, 1), thorough(4, 2)])
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.place is not None])
def test_one_element_is_found_with_its_bit(name: str, world_size: int, who: int) -> None:
    fault, outcome = FAULTS[name], _outcomes(world_size, who)[name]
    shown = who if world_size > 2 else 1  # of two ranks the first is what the other is compared with

    (element,) = (item for item in outcome.elements if item.thing == f"parameter {fault.parameter!r}")

    assert (element.rank, element.count, element.index) == (shown, 1, fault.place)
    if fault.bit is not None:
        assert (element.kind, element.bit) == ("one bit", fault.bit)


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


@pytest.mark.parametrize("name", FAULTS)
def test_two_ranks_of_four_have_no_majority_against_them(name: str) -> None:
    outcome = _outcomes(4, 1, 3)[name]

    assert (outcome.phase, outcome.ranks) == (FAULTS[name].phase, (1, 3) if FAULTS[name].has_evidence else ()), (
        outcome.text
    )
    assert "ranks 1, 3 against ranks 0, 2" in outcome.text
    check_harmless(outcome)

"""Several faults at once, and actions that a rank may do alone."""

from functools import cache, partial

import pytest

from tests.helpers import replica_faults
from tests.helpers.replica_scenes import (
    LOCAL_TABLE,
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

# Several faults at once


def _flip_own_place(scene: Scene) -> None:
    replica_faults.flip_weight(scene, place=(scene.rank, scene.rank))


def _own_seed(scene: Scene) -> None:
    scene.module.load_state_dict(training_net(seed=10 + scene.rank).state_dict())


def _own_learning_rate(scene: Scene) -> None:
    scene.optimizer.param_groups[0]["lr"] *= 1 + scene.rank


_flip_bias = partial(replica_faults.flip_weight, name="0.bias", place=(3,), bit=4)
_another_rate = partial(replica_faults.set_group, key="lr", factor=1.01)
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


def test_of_two_ranks_with_a_fault_each_the_rank_with_evidence_is_named() -> None:
    outcomes = _outcomes_two(2, 0, 1)

    assert {name: outcomes[name].ranks for name in TWO} == {
        "two weights": (),  # each of them changed one
        "rate, then weight": (1,),
        "gradient, then weight": (1,),
        "buffer and weight": (1,),
    }
    assert {"parameter '2.weight'", "parameter '0.bias'"} <= set(outcomes["two weights"].names)


@pytest.mark.parametrize("name", ALL_DIFFER)
def test_where_no_two_ranks_agree_nobody_is_blamed(name: str) -> None:
    outcome = run_scenarios(ALL_DIFFER, 4, (0, 1, 2, 3))[name]

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


BEFORE_A_BROADCAST = {
    "rate": Scenario([("reduced", 1, _another_rate, 0), ("stepped", 1, _broadcast_buffers, 1)]),
    "gradient": Scenario([("reduced", 1, replica_faults.flip_gradient, 0), ("stepped", 1, _broadcast_buffers, 1)]),
    "weight": Scenario([("stepped", 1, replica_faults.flip_weight, 0), ("stepped", 1, _broadcast_buffers, 1)]),
    "weight after it": Scenario([("stepped", 1, _broadcast_buffers, 1), ("stepped", 1, replica_faults.flip_weight, 0)]),
}


@pytest.mark.parametrize(
    "name, phase, ranks",
    [
        ("rate", "step", ()),
        ("gradient", "gradients", ()),
        ("weight", "outside", (1,)),
        ("weight after it", "outside", (1,)),
    ],
)
def test_a_broadcast_of_buffers_hides_nothing_that_parameters_went_through(
    name: str, phase: str, ranks: tuple[int, ...]
) -> None:
    outcome = _outcomes_before_a_broadcast()[name]

    assert (outcome.call, outcome.phase, outcome.ranks) == (2, phase, ranks), outcome.text


@cache
def _outcomes_before_a_broadcast() -> SharedOutcomes[CallOutcome]:
    return run_scenarios(BEFORE_A_BROADCAST, 2, (1,), (0, 1))


_two_steps = partial(replica_faults.other_steps, steps=2)
WITHIN_TWO_STEPS = {
    "before the second": Scenario([("reduced", 1, _two_steps, 1), ("between", 1, replica_faults.flip_gradient, 0)]),
    "before the first alone": Scenario(
        [
            ("reduced", 1, _two_steps, 1),
            ("reduced", 1, replica_faults.flip_gradient, 0),
            ("between", 1, replica_faults.flip_gradient, 0),  # and back again
        ]
    ),
}


@pytest.mark.parametrize("name", WITHIN_TWO_STEPS)
def test_a_gradient_that_one_of_two_steps_found_changed_is_told(name: str) -> None:
    outcome = run_scenarios(WITHIN_TWO_STEPS, 2, (1,), (0, 1))[name]

    assert (outcome.call, outcome.phase, outcome.ranks) == (2, "gradients", ()), outcome.text


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

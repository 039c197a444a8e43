"""One rank alone makes a new optimizer with the state of the old one, where a parameter is in no optimizer."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch

from tests.helpers import replica_faults
from tests.helpers.replica_scenes import (
    Action,
    CallOutcome,
    Scenario,
    Scene,
    SharedOutcomes,
    check_harmless,
    run_scenarios,
)
from tests.helpers.tiers import thorough

REBUILDS, AT_FAULT, ALL = 0, 1, 2  # groups of ranks


def _rebuild(scene: Scene) -> None:
    state, (group,) = scene.optimizer.state_dict(), scene.optimizer.param_groups
    scene.optimizer = torch.optim.SGD(group["params"], lr=1.0)
    scene.optimizer.load_state_dict(state)


_REBUILT = ("stepped", 1, _rebuild, REBUILDS)
_two_steps = partial(replica_faults.other_steps, steps=2)
_flip_frozen = partial(replica_faults.flip_weight, name="3.weight", place=(1, 3))

SILENT = {
    "after the first step": Scenario([_REBUILT]),
    "between call and step": Scenario([("reduced", 2, _rebuild, REBUILDS)]),
    "again and again": Scenario([("reduced", step, _rebuild, REBUILDS) for step in (1, 2, 3)]),
    "between two steps of a call": Scenario([("reduced", 2, _two_steps, ALL), ("between", 2, _rebuild, REBUILDS)]),
}


class _Fault(NamedTuple):
    moment: str
    action: Action
    phase: str
    has_evidence: bool


FAULTS = {
    "a frozen weight flips before the step": _Fault("reduced", _flip_frozen, "outside", True),
    "a frozen weight flips after the step": _Fault("stepped", _flip_frozen, "outside", True),
    "a weight flips before the step": _Fault("reduced", replica_faults.flip_weight, "outside", True),
    "a weight flips after the step": _Fault("stepped", replica_faults.flip_weight, "outside", True),
    "gradients are clipped": _Fault("reduced", replica_faults.clip, "gradients", False),
    "another rate": _Fault("reduced", partial(replica_faults.set_group, key="lr", factor=1.01), "step", False),
    "an optimizer lacks a layer": _Fault("reduced", replica_faults.leave_out, "step", False),
}
SCENARIOS = SILENT | {
    name: Scenario([_REBUILT, (fault.moment, 2, fault.action, AT_FAULT)]) for name, fault in FAULTS.items()
}
# Number of ranks, the rank that rebuilds, the rank at fault.
PLACES = [thorough(2, 0, 0), (2, 0, 1), thorough(3, 1, 1), (3, 0, 2)]


@cache
def _outcomes(world_size: int, rebuilds: int, at_fault: int) -> SharedOutcomes[CallOutcome]:
    return run_scenarios(SCENARIOS, world_size, (rebuilds,), (at_fault,), tuple(range(world_size)))


@pytest.mark.parametrize("world_size, rebuilds, at_fault", PLACES)
@pytest.mark.parametrize("name", SILENT)
def test_equal_replicas_are_no_divergence_where_one_rank_rebuilt_its_optimizer(
    name: str, world_size: int, rebuilds: int, at_fault: int
) -> None:
    assert _outcomes(world_size, rebuilds, at_fault)[name] == CallOutcome(recovered=True)


@pytest.mark.parametrize("world_size, rebuilds, at_fault", PLACES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_difference_after_a_rebuilt_optimizer_has_its_phase_and_its_rank(
    name: str, world_size: int, rebuilds: int, at_fault: int
) -> None:
    fault, outcome = FAULTS[name], _outcomes(world_size, rebuilds, at_fault)[name]

    assert (outcome.error, outcome.call, outcome.phase) == ("ReplicaDivergenceError", 3, fault.phase), outcome.text
    assert outcome.ranks == ((at_fault,) if world_size > 2 or fault.has_evidence else ()), outcome.text
    assert outcome.implicated == ((at_fault,) if fault.has_evidence else ()), outcome.text
    check_harmless(outcome)

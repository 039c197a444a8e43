"""Diverged replicas are found with default settings, or in every N-th call: rank, tensor, and since which call."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers import default_trainings as trainings
from tests.helpers import logged_warnings
from tests.helpers.default_trainings import EACH, Action, Run, Told, train, unwrapped
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, once, run_cases

STEP = 20  # of the fault: a whole rotation has passed before


@dataclass(frozen=True)
class Fault:
    """``names``: the tensors to be reported. ``at_once``: all parameters differ, and the next call tells."""

    action: Action
    names: frozenset[str]
    moment: str = "stepped"
    step: int = STEP
    at_once: bool = False
    words: tuple[str, ...] = ()


_ALL = frozenset({"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"})
_OF_THE_STEP = (  # not on a device, which tells the difference after further steps
    "had no optimizer state before the last step(), unlike the others: perhaps resumed without",
    "optimizer state: `step` is 1 on rank",
)
_everywhere = partial(Fault, names=_ALL, at_once=True)
FAULTS = {
    "weights initialised after wrapping": Fault(
        trainings.initialise,
        frozenset({"3.weight"}),
        moment="wrapped",
        step=0,
        words=("since: between the start and ",),
    ),
    "noise on a weight": Fault(trainings.add_noise, frozenset({"3.weight"}), words=("1 of 65536 elements differs",)),
    "gradients clipped": _everywhere(trainings.clip, moment="reduced"),
    "another learning rate": _everywhere(
        trainings.change_rate, moment="reduced", words=("lr of parameter group 0", "0.0005", "0.001")
    ),
    "optimizer state loaded": _everywhere(
        trainings.load_optimizer, moment="reduced", words=("`exp_avg` differs in 6 of 6 parameters: rank",)
    ),
    "optimizer state lost": _everywhere(
        trainings.lose_optimizer_state,
        moment="reduced",
        words=(*_OF_THE_STEP, "`exp_avg` differs in 6 of 6 parameters: rank"),
    ),
    "a parameter replaced": Fault(
        trainings.replace_parameter, frozenset({"3.bias"}), words=("parameter group of '3.bias'", "none")
    ),
    "a buffer written": Fault(trainings.poke_buffer, frozenset({"table"}), words=("1 of 64 elements differs",)),
}


def _all_faults(rank: int, faulty: tuple[int, ...], steps: int) -> dict[str, Told]:
    return {
        name: train(Run(rank), steps, {(fault.moment, fault.step): fault.action} if rank in faulty else {})
        for name, fault in FAULTS.items()
    }


@once
def _told(*faulty: int) -> list[dict[str, Told]]:
    return run_ranks(_all_faults, 3, faulty, STEP + trainings.told_within() + 4, timeout_seconds=240)


@pytest.mark.parametrize("name", FAULTS)
def test_what_one_rank_does_alone_is_told_once_on_all(name: str) -> None:
    fault, (first, *others) = FAULTS[name], [of_rank[name] for of_rank in _told(0)]

    assert others == [first] * 2
    ((call, text),) = first
    line = unwrapped(text)
    last, late = trainings.told_within(), trainings.told_late()
    assert STEP < call <= STEP + last or (fault.step == 0 and call <= last), first
    assert f"all_reduce() call {call}: replicas differ" in text
    assert "rank 0 against rank" in line
    assert trainings.names_in(text) == fault.names
    assert all(word in line for word in fault.words if not late or word not in _OF_THE_STEP), text
    assert not fault.at_once or STEP + 1 <= call <= STEP + 1 + late
    # A device that is quick has told by the call itself.
    found = "this call" if call == STEP + 1 else f"call {STEP + 1}, as the device has told by this call"
    assert not fault.at_once or f"since: between the first forward after call {STEP - 1} and {found}" in line
    assert all(len(line) <= 80 for line in text.splitlines()), text


@pytest.mark.unsimulated("each operation takes long there, and what is told runs there")
@pytest.mark.parametrize("name", [name for name in FAULTS if not name.startswith("weights")])  # each makes its own
def test_what_all_ranks_do_alike_is_silent(name: str) -> None:
    assert [of_rank[name] for of_rank in _told(0, 1, 2)] == [[]] * 3


def test_the_evidence_of_a_single_tensor_is_a_rotation_wide() -> None:
    ((call, text),) = _told(0)[0]["noise on a weight"]
    since = 1 + int(unwrapped(text).partition("between the first forward after call ")[2].split()[0])

    assert since <= STEP
    assert call - since <= trainings.told_within()


# Reactions


def _diverges(rank: int, checks: tuple[Any, ...], steps: int) -> Told:
    run = Run(rank, arguments={"checks": checks[rank]})
    told = train(run, steps, {("wrapped", 0): trainings.initialise})
    run.optimizer.zero_grad()
    run.model.broadcast_parameters()
    return told + train(run, run.step + steps, {})


def test_a_divergence_can_be_an_error_on_all_ranks_and_training_goes_on_after_a_broadcast() -> None:
    first, *others = run_ranks(_diverges, 3, (Checks(divergence="raise"),) * 3, 4 + trainings.told_within())

    assert others == [first] * 2
    ((_, text),) = first
    assert text.startswith("ReplicaDivergenceError: ")
    assert "replicas differ in 1 of 6 parameters" in text
    assert trainings.names_in(text) == {"3.weight"}


def test_nothing_is_said_where_divergence_is_ignored_or_checks_are_off_on_a_rank() -> None:
    steps, ignored = 4 + trainings.told_within(), Checks(divergence="ignore")
    cases = {"ignored": ((ignored, ignored), steps), "off": (("off", "info"), steps), "info": (("info", "off"), steps)}

    assert run_cases(_diverges, 2, cases) == {name: [[], []] for name in cases}


@on_ranks(2)
def _diverges_twice(rank: int) -> list[int]:
    actions = {
        ("stepped", 2): trainings.initialise,
        ("stepped", 29): lambda run: run.model.broadcast_parameters(),
        ("stepped", 59): trainings.initialise,
    }
    return [call for call, _ in train(Run(rank), 89, actions)]


def test_a_streak_ends_after_a_silent_rotation() -> None:
    first, second = _diverges_twice()

    assert first == second
    assert len(first) == 2
    assert first[0] < 30
    assert first[1] >= 60


def _moves_to_another_group(rank: int, steps: int) -> list[int]:
    groups = [dist.group.WORLD, dist.new_group([0, 1])]

    def move(run: Run) -> None:
        run.model.process_group = groups[(run.step + 1) % 2]

    actions = {("wrapped", 0): move, ("stepped", 29): trainings.initialise, ("stepped", EACH): move}
    return [call for call, _ in train(Run(rank), steps, actions)]


def test_each_process_group_has_a_rotation_of_its_own() -> None:
    first, second = run_ranks(_moves_to_another_group, 2, 30 + 2 * trainings.told_within())

    assert first == second
    assert sorted(call % 2 for call in first) == [0, 1]


def _learns_a_statistic(rank: int, checks: str, pokes: bool) -> Told:
    def learn(run: Run) -> None:
        run.module.get_buffer("table").mul_(0.9).add_(0.1 * (rank + 2))
        if pokes and run.step > 10 and rank == 1:
            trainings.add_noise(run)

    return train(Run(rank, arguments={"checks": checks}), 39, {("backward", EACH): learn})


@pytest.mark.parametrize("checks", ["info", "detail"])
def test_a_buffer_that_changes_on_every_rank_is_a_statistic_and_hides_nothing_else(checks: str) -> None:
    found = run_cases(_learns_a_statistic, 2, {"silent": (checks, False), "faulty": (checks, True)})

    assert found["silent"] == [[], []]
    first, second = found["faulty"]
    assert first == second
    assert trainings.names_in(first[0][1]) == {"3.weight"}


def _holds_a_large_tensor(rank: int, numel: int) -> str:
    """A frozen tensor of its own on rank 1."""
    run = Run(rank)
    run.module.register_parameter("large", torch.nn.Parameter(torch.zeros(numel), requires_grad=False))
    run.wrap()
    with torch.no_grad():
        run.module.get_parameter("large").add_(rank)
    told: list[str] = []
    while not told:
        run.backward()
        run.model.all_reduce()
        told = logged_warnings.take()
        run.optimizer.zero_grad()
    return told[0]


def test_a_default_warning_compares_tensors_up_to_16_mib_by_element() -> None:
    found = run_cases(_holds_a_large_tensor, 2, {"16 MiB": (2**22,), "more": (2**22 + 1,)})

    for first, second in found.values():
        assert first == second
        assert trainings.names_in(first) == {"large"}
    assert "4194304 of 4194304 elements differ" in found["16 MiB"][0]
    assert "elements differ" not in found["more"][0]


def test_a_model_without_digestible_tensors_is_silent(alone: None) -> None:
    model = LegacyDistributedDataParallel(torch.nn.Identity())

    assert model.all_reduce().call == 1


# With ``Checks("detail", every=5)``: all of the replicas in calls 1, 6, 11, and nothing between

_EVERY = {"checks": Checks("detail", every=5)}
_SINCE = "since: between the first forward after call 5 and this call"
# By fault of step 7: the action, the moment, the call of the error, its type and words of its text.
FAULTS_BETWEEN: dict[str, tuple[Action, tuple[str, int], int, str, tuple[str, ...]]] = {
    "noise": (trainings.add_noise, ("reduced", 7), 11, "ReplicaDivergenceError", ("parameter '3.weight'", _SINCE)),
    "buffer": (trainings.poke_buffer, ("reduced", 7), 11, "ReplicaDivergenceError", ("buffer 'table'", _SINCE)),
    "clipped": (trainings.clip, ("reduced", 7), 11, "ReplicaDivergenceError", ("parameter '0.bias'", _SINCE)),
    "the start": (trainings.initialise, ("wrapped", 0), 1, "ReplicaDivergenceError", ("since: the start",)),
    "a step": (
        lambda run: run.optimizer.zero_grad(),
        ("reduced", 7),
        8,
        "DesyncError",
        ("different numbers of optimizer steps",),
    ),
}


def _train_in_detail(rank: int, name: str, who: tuple[int, ...]) -> Told:
    action, moment, *_ = FAULTS_BETWEEN[name]
    return train(Run(rank, arguments=_EVERY), 17, {moment: action} if rank in who else {})


@once
def _told_in_detail(world_size: int, *who: int) -> dict[str, list[Told]]:
    return run_cases(_train_in_detail, world_size, {name: (name, who) for name in FAULTS_BETWEEN})


@pytest.mark.parametrize("name", FAULTS_BETWEEN)
def test_a_fault_is_an_error_on_all_ranks_in_the_next_call_that_compares(name: str) -> None:
    """The first call compares the start; steps are counted in every call."""
    _, _, expected_call, error, words = FAULTS_BETWEEN[name]
    first, *others = _told_in_detail(3, 0)[name]

    assert others == [first] * 2
    ((call, text),) = first
    assert (call, text.partition(":")[0]) == (expected_call, error), text
    assert all(word in unwrapped(text) for word in words), text


def test_what_all_ranks_do_alike_between_two_comparisons_is_silent() -> None:
    found = _told_in_detail(2, 0, 1)
    del found["the start"]  # initialised by each rank

    assert all(told == [[], []] for told in found.values()), found


@on_ranks(2, [[1, 6, 11]] * 2)
def test_the_calls_between_take_no_digest(rank: int) -> list[int]:
    run = Run(rank, arguments=_EVERY)
    train(run, 12, {})
    return [call for call, record in enumerate(run.records, 1) if "digest" in record.seconds]


# which finds the statistics of the normalisation
@on_ranks(2, [[6]] * 2)
def test_a_forward_between_call_and_step_on_one_rank_makes_no_difference(rank: int) -> list[int]:
    """Rank 0 runs a training forward there, with the weights before the step."""
    run = Run(rank, arguments=_EVERY)
    forward = {("reduced", EACH): lambda run: torch.enable_grad()(run.model)(torch.ones(8, 64))}
    train(run, 12, forward if rank == 0 else {})
    return [call for call, record in enumerate(run.records, 1) if "compare" in record.seconds]

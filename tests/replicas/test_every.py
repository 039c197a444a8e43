"""``Checks("detail", every=N)``: all of the replicas in call 1, N + 1, 2 N + 1, and nothing between."""

from typing import NamedTuple

import pytest
import torch

from legacy_ddp import Checks
from tests.helpers import default_trainings as trainings
from tests.helpers.default_trainings import EACH, Action, Run, Told, train, unwrapped
from tests.helpers.shared_jobs import on_ranks, once, run_cases

EVERY = Checks("detail", every=5)


def _train(rank: int, action: Action, who: tuple[int, ...], moment: tuple[str, int]) -> Told:
    return train(Run(rank, arguments={"checks": EVERY}), 17, {moment: action} if rank in who else {})


def _skip_a_step(run: Run) -> None:
    run.optimizer.zero_grad()


class Fault(NamedTuple):
    """``moment``: with its step. ``call``: that of the error. ``words``: of its text."""

    action: Action
    words: tuple[str, ...]
    error: str = "ReplicaDivergenceError"
    moment: tuple[str, int] = ("reduced", 7)
    call: int = 11


_SINCE = "since: between the first forward after call 5 and this call"
FAULTS = {
    "noise": Fault(trainings.add_noise, ("parameter '3.weight'", _SINCE)),
    "buffer": Fault(trainings.poke_buffer, ("buffer 'table'", _SINCE)),
    "clipped": Fault(trainings.clip, ("parameter '0.bias'", _SINCE)),
    "the start": Fault(trainings.initialise, ("since: the start",), moment=("wrapped", 0), call=1),
    "a step": Fault(_skip_a_step, ("different numbers of optimizer steps",), error="DesyncError", call=8),
}


@once
def _told(world_size: int, *who: int) -> dict[str, list[Told]]:
    return run_cases(_train, world_size, {name: (fault.action, who, fault.moment) for name, fault in FAULTS.items()})


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_on_all_ranks_in_the_next_call_that_compares(name: str) -> None:
    """The first call compares the start; steps are counted in every call."""
    fault, (first, *others) = FAULTS[name], _told(3, 0)[name]

    assert others == [first] * 2
    ((call, text),) = first
    assert (call, text.partition(":")[0]) == (fault.call, fault.error), text
    assert all(word in unwrapped(text) for word in fault.words), text


def test_what_all_ranks_do_alike_is_silent() -> None:
    found = _told(2, 0, 1)
    del found["the start"]  # initialised by each rank

    assert all(told == [[], []] for told in found.values()), found


@on_ranks(2, [[1, 6, 11]] * 2)
def test_the_calls_between_take_no_digest(rank: int) -> list[int]:
    run = Run(rank, arguments={"checks": EVERY})
    train(run, 12, {})
    return [call for call, record in enumerate(run.records, 1) if "digest" in record.seconds]


# which finds the statistics of the normalisation
@on_ranks(2, [[6]] * 2)
def test_a_forward_between_call_and_step_on_one_rank_makes_no_difference(rank: int) -> list[int]:
    """Rank 0 runs a training forward there, with the weights before the step."""
    run = Run(rank, arguments={"checks": EVERY})
    forward = {("reduced", EACH): lambda run: torch.enable_grad()(run.model)(torch.ones(8, 64))}
    train(run, 12, forward if rank == 0 else {})
    return [call for call, record in enumerate(run.records, 1) if "compare" in record.seconds]

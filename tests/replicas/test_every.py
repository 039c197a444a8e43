"""``Checks("detail", every=N)``: all of the replicas in call 1, N + 1, 2 N + 1, and nothing between."""

from typing import Any

import pytest
import torch

from legacy_ddp import Checks, LegacyDDPError
from tests.helpers import default_trainings as trainings
from tests.helpers import logged_warnings
from tests.helpers.default_trainings import Action, Run
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, once, run_cases
from tests.helpers.tiers import thorough

EVERY = Checks("detail", every=5)
Ended = tuple[int, str, str]  # the call of the error, its type and its text


def _train(rank: int, action: Action, who: tuple[int, ...], at: int, checks: tuple[Any, ...], moment: str) -> Ended:
    run = Run(rank, arguments={"checks": checks[rank]})
    try:
        run.wrap()
        for call in range(1, 18):
            if (moment, call) == ("backward", at) and rank in who:
                action(run)
            run.backward()
            run.model.all_reduce()
            if (moment, call) == ("reduced", at) and rank in who:
                action(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
    except LegacyDDPError as error:
        return error.call or 0, type(error).__name__, str(error)
    assert logged_warnings.take() == []
    return 0, "", ""


_ALL = {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
FAULTS: dict[str, tuple[Action, set[str]]] = {
    "noise": (trainings.add_noise, {"3.weight"}),
    "buffer": (trainings.poke_buffer, {"table"}),
    "replaced": (trainings.replace_parameter, {"3.bias"}),
    "clipped": (trainings.clip, _ALL),
    "rate": (trainings.change_rate, _ALL),
}


@once
def _ended(world_size: int, *who: int) -> dict[str, list[Ended]]:
    """By the fault of the ranks ``who``, after call 7."""
    checks = (EVERY,) * world_size
    cases = {name: (action, who, 7, checks, "reduced") for name, (action, _) in FAULTS.items()}
    if len(who) == world_size:
        del cases["replaced"]  # no optimizer holds the new parameter, and another check warns of that
    return run_cases(_train, world_size, cases)


def _faulty(action: Action, at: int = 7, moment: str = "reduced") -> list[Ended]:
    return run_ranks(_train, 2, action, (1,), at, (EVERY, EVERY), moment)


@pytest.mark.parametrize("world_size, who", [thorough(2, 1), (3, 0)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_divergence_is_an_error_on_all_ranks_in_the_next_call_that_compares(
    name: str, world_size: int, who: int
) -> None:
    first, *others = _ended(world_size, who)[name]

    assert others == [first] * (world_size - 1)
    call, kind, text = first
    assert (call, kind) == (11, "ReplicaDivergenceError")
    assert trainings.names_in(text) >= FAULTS[name][1]
    assert "since: between the first forward after call 5 and this call" in " ".join(text.split())


def test_what_all_ranks_do_alike_is_silent() -> None:
    found = _ended(2, 0, 1)

    assert found == dict.fromkeys(found, [(0, "", "")] * 2)


def test_the_first_call_compares_the_start() -> None:
    first, second = _faulty(trainings.initialise, at=1, moment="backward")

    assert first == second
    assert first[:2] == (1, "ReplicaDivergenceError")
    assert "since: the start" in " ".join(first[2].split())


def _skip_a_step(run: Run) -> None:
    run.optimizer.zero_grad()


def test_steps_are_counted_between() -> None:
    first, second = _faulty(_skip_a_step)

    assert first == second
    assert first[:2] == (8, "DesyncError")
    assert "different numbers of optimizer steps" in first[2]


@pytest.mark.parametrize("others", [Checks("detail", every=3), Checks("detail")])
def test_ranks_with_another_every_are_an_error_at_construction(others: Checks) -> None:
    first, second = run_ranks(_train, 2, trainings.add_noise, (), 1, (EVERY, others), "reduced")

    assert first == second
    assert first[1] == "LayoutError"
    assert "every=5" in first[2]


@on_ranks(2, [[1, 6, 11]] * 2)
def test_the_calls_between_take_no_digest(rank: int) -> list[int]:
    run = Run(rank, arguments={"checks": EVERY})
    run.wrap()
    calls = []
    for call in range(1, 13):
        run.backward()
        record = run.model.all_reduce()
        calls += [call] * ("digest" in record.seconds)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return calls


# which finds the statistics of the normalisation
@on_ranks(2, [[6]] * 2)
def test_a_forward_between_call_and_step_on_one_rank_makes_no_difference(rank: int) -> list[int]:
    """Rank 0 runs a training forward there, with the weights before the step."""
    run = Run(rank, arguments={"checks": EVERY})
    run.wrap()
    compared = []
    for call in range(1, 13):
        run.backward()
        record = run.model.all_reduce()
        compared += [call] * ("compare" in record.seconds)
        if rank == 0:
            run.model(torch.ones(8, 64))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return compared

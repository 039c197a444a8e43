"""With default settings: a warned difference hides no later one, and figures of another moment are called so."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, ReplicaDivergenceError
from tests.helpers import default_trainings as trainings
from tests.helpers import logged_warnings
from tests.helpers.default_trainings import PARTS, Run, names_in
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import once

Plan = Mapping[tuple[int, int], Callable[[Run], object]]  # what a rank does after a step, by step and rank
Told = list[tuple[int, str]]  # the calls that warn, and their texts


def _add_noise(run: Run, name: str) -> None:
    with torch.no_grad():
        run.module.get_parameter(name).view(-1)[0] += 1e-3


def _small_net() -> nn.Sequential:
    """Two tensors in a single part."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 4))


_noise = {
    name: partial(_add_noise, name=name) for name in ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias")
}
PLANS: dict[str, Plan] = {
    "once": {(3, 1): _noise["3.weight"]},
    "another tensor": {(3, 1): _noise["3.weight"], (30, 1): _noise["0.weight"]},
    "another rank": {(3, 1): _noise["3.weight"], (30, 2): _noise["3.weight"]},
    "another kind": {(3, 1): _noise["3.weight"], (30, 1): trainings.poke_buffer},
    "a tensor of the same part": {(3, 1): _noise["0.weight"], (6, 1): _noise["0.bias"]},
    "all tensors": {(3, 1): trainings.change_rate},
    "one after the other": {
        **{(3 + 18 * index, 1): action for index, action in enumerate(_noise.values())},
        (120, 2): _noise["0.bias"],
        (140, 0): _noise["2.weight"],
    },
}
SECOND = {
    "another tensor": (
        30,
        {"0.weight", "3.weight"},
        "new since the last warning, or on other ranks: parameter '0.weight'",
    ),
    "another rank": (30, {"3.weight"}, "new since the last warning, or on other ranks: parameter '3.weight'"),
    "another kind": (30, {"table", "3.weight"}, "new since the last warning, or on other ranks: buffer 'table'"),
    "a tensor of the same part": (6, {"0.weight", "0.bias"}, "on other ranks: parameter '0.bias'"),
}


def _train(rank: int, name: str) -> Told:
    run = Run(rank, module=_small_net()) if name == "a tensor of the same part" else Run(rank)
    run.wrap()
    logged_warnings.take()
    told: Told = []
    for step in range(1, 170 if name == "one after the other" else 32 + trainings.told_within()):
        run.backward()
        run.model.all_reduce()
        told += [(step, text) for text in logged_warnings.take()]
        run.optimizer.step()
        run.optimizer.zero_grad()
        if action := PLANS[name].get((step, rank)):
            action(run)
    return told


def _train_all(rank: int) -> dict[str, Told]:
    return {name: _train(rank, name) for name in PLANS}


@once
def _told() -> list[dict[str, Told]]:
    return run_ranks(_train_all, 3, timeout_seconds=240)


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_warns_alike(name: str) -> None:
    first, *others = (of_rank[name] for of_rank in _told())

    assert others == [first] * 2
    assert all(len(line) <= 80 for _, text in first for line in text.splitlines())


@pytest.mark.parametrize("name", SECOND)
def test_a_later_difference_is_told_although_an_earlier_one_goes_on(name: str) -> None:
    step, names, words = SECOND[name]
    first, second = _told()[0][name]

    assert "new since" not in first[1]
    assert step < second[0] <= step + trainings.told_within()
    assert names_in(second[1].partition("note:")[0]) == names
    assert words in " ".join(second[1].split())


@pytest.mark.parametrize("name", ["once", "all tensors"])
def test_a_difference_that_goes_on_is_told_once(name: str) -> None:
    assert len(_told()[0][name]) == 1


def test_the_warnings_of_a_streak_are_few() -> None:
    told = _told()[0]["one after the other"]

    assert len(told) == 5
    assert ["this is the last warning until" in " ".join(text.split()) for _, text in told] == [False] * 4 + [True]


# Weights that a loop perturbs around the call, and restores before step()


def _perturbs(rank: int, checks: Checks, step_of_fault: int | None) -> Told:
    run = Run(rank, arguments={"checks": checks})
    run.wrap()
    logged_warnings.take()
    told: Told = []
    for step in range(1, 3 * PARTS):
        run.backward()
        kept = [parameter.detach().clone() for parameter in run.model.parameters()]
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape))  # of this rank alone
        run.optimizer.zero_grad()
        run.backward()
        try:
            run.model.all_reduce()
        except ReplicaDivergenceError as error:
            return [(step, str(error))]
        told += [(step, text) for text in logged_warnings.take()]
        with torch.no_grad():
            for parameter, value in zip(run.model.parameters(), kept, strict=True):
                parameter.copy_(value)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if step == step_of_fault and rank == 1:
            _add_noise(run, "3.weight")
    return told


def _perturbs_at_all_levels(rank: int, step_of_fault: int | None) -> dict[str, Told]:
    levels = {"info": Checks(), "detail": Checks("detail"), "every": Checks("detail", every=3)}
    return {name: _perturbs(rank, checks, step_of_fault) for name, checks in levels.items()}


@pytest.mark.parametrize("level", ["info", "detail", "every"])
def test_a_report_during_a_perturbation_names_the_rank_of_the_digest_and_shows_no_perturbed_values(level: str) -> None:
    told, *others = (of_rank[level] for of_rank in _perturbed(2))
    ((call, text),) = told
    unwrapped = " ".join(text.split())

    assert others == [told] * 2
    assert 2 < call <= 2 + trainings.told_within()
    assert "who: rank 1 against ranks 0, 2" in unwrapped
    assert "the parameters have changed on ranks 0-2 since the forward in which they were found to differ" in unwrapped
    assert "elements differ" not in unwrapped.partition("buffer")[0]


@pytest.mark.parametrize("level", ["info", "detail", "every"])
def test_a_perturbation_alone_is_silent(level: str) -> None:
    assert [of_rank[level] for of_rank in _perturbed(None)] == [[]] * 3


@once
def _perturbed(step_of_fault: int | None) -> list[dict[str, Told]]:
    return run_ranks(_perturbs_at_all_levels, 3, step_of_fault, timeout_seconds=240)

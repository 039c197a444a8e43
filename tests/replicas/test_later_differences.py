"""With default settings: a warned difference hides no later one, and figures of another moment are called so."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import Checks
from tests.helpers import default_trainings as trainings
from tests.helpers.default_trainings import EACH, PARTS, Run, Told, names_in, train, unwrapped
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import once, run_cases

Plan = Mapping[tuple[int, int], Callable[[Run], object]]  # what a rank does after a step, by step and rank


def _add_noise(run: Run, name: str) -> None:
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


def _train_all(rank: int) -> dict[str, Told]:
    found = {}
    for name, plan in PLANS.items():
        run = Run(rank, module=_small_net()) if name == "a tensor of the same part" else Run(rank)
        steps = 169 if name == "one after the other" else 31 + trainings.told_within()
        found[name] = train(run, steps, {("stepped", step): act for (step, who), act in plan.items() if who == rank})
    return found


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
    assert words in unwrapped(second[1])


@pytest.mark.parametrize("name", ["once", "all tensors"])
def test_a_difference_that_goes_on_is_told_once(name: str) -> None:
    assert len(_told()[0][name]) == 1


def test_the_warnings_of_a_streak_are_few() -> None:
    told = _told()[0]["one after the other"]

    assert len(told) == 5
    assert ["this is the last warning until" in unwrapped(text) for _, text in told] == [False] * 4 + [True]


# Weights that a loop perturbs around the call, and restores before step()


def _perturbs(rank: int, checks: Checks, step_of_fault: int | None) -> Told:
    kept: list[torch.Tensor] = []

    def perturb(run: Run) -> None:
        kept[:] = [parameter.clone() for parameter in run.model.parameters()]
        for parameter in run.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))  # of this rank alone
        run.optimizer.zero_grad()
        with torch.enable_grad():
            run.backward()

    def restore(run: Run) -> None:
        for parameter, value in zip(run.model.parameters(), kept, strict=True):
            parameter.copy_(value)

    actions = {("backward", EACH): perturb, ("reduced", EACH): restore}
    if step_of_fault is not None and rank == 1:
        actions["stepped", step_of_fault] = _noise["3.weight"]
    return train(Run(rank, arguments={"checks": checks}), 3 * PARTS - 1, actions)


LEVELS = {"info": Checks(), "detail": Checks("detail"), "every": Checks("detail", every=3)}


def test_a_report_during_a_perturbation_names_the_rank_of_the_digest_and_shows_no_perturbed_values() -> None:
    for told, *others in run_cases(_perturbs, 3, {level: (checks, 2) for level, checks in LEVELS.items()}).values():
        ((call, text),) = told
        line = unwrapped(text)

        assert others == [told] * 2
        assert 2 < call <= 2 + trainings.told_within()
        assert "who: rank 1 against ranks 0, 2" in line
        assert "the parameters have changed on ranks 0-2 since the forward in which they were found to differ" in line
        assert "elements differ" not in line.partition("buffer")[0]


@pytest.mark.unsimulated("each operation takes long there, and what is told runs there")
def test_a_perturbation_alone_is_silent() -> None:
    found = run_cases(_perturbs, 3, {level: (checks, None) for level, checks in LEVELS.items()})

    assert found == {level: [[]] * 3 for level in LEVELS}

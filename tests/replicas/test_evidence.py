"""With checks="detail": evidence against a rank, and changes that are not evidence."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, ReplicaDivergenceError, UnsynchronizedStepError
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, tanh_net

wrap_in_detail = partial(LegacyDistributedDataParallel, checks="detail")


# Evidence against a rank


def _error_text(action: Callable[[], object]) -> str:
    with pytest.raises(ReplicaDivergenceError) as caught:
        action()
    return f"{caught.value.phase} {caught.value.ranks}"


def _clips_and_skips(rank: int, skips: bool) -> str:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
        if skips or (index, rank) != (2, 1):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not skips or (index, rank) != (2, 1):
            optimizer.step()
    optimizer.zero_grad()
    return _error_text(model.all_reduce)


@pytest.mark.parametrize("world_size, ranks", [(2, ()), (3, (1,))])
def test_ranks_that_clip_as_always_are_not_accused_of_it(world_size: int, ranks: tuple[int, ...]) -> None:
    assert run_cases(_clips_and_skips, world_size, {"step": (True,), "gradients": (False,)}) == {
        phase: [f"{phase} {ranks}"] * world_size for phase in ("step", "gradients")
    }


@on_ranks(2, ["outside ()"] * 2)
def test_a_rank_that_clamps_as_always_is_not_accused_of_it(rank: int) -> str:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
        optimizer.step()
        if (index, rank) != (2, 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-1e-3, 1e-3)
    return _error_text(model.all_reduce)


# Steps that did not happen, and gradients that nobody uses


@on_ranks(2, [None] * 2)
def test_a_step_that_the_guard_refused_leaves_no_trace(rank: int) -> Said:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        add_gradients(model, 1.0 + rank)
        if rank == 0:
            with pytest.raises(UnsynchronizedStepError):
                optimizer.step()
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
    return error_of(model.all_reduce)


@on_ranks(2, [None] * 2)
def test_gradients_that_a_closure_drops_are_not_compared(rank: int) -> Said:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        add_gradients(model, 1.0 + rank)
        model.all_reduce()
        return 0.0

    for _ in range(3):
        add_gradients(model, 5.0 + rank)  # of this rank alone, and dropped by the closure
        optimizer.step(closure)
    return error_of(closure)


@on_ranks(2, [None] * 2)
def test_a_gradient_left_on_a_frozen_layer_that_no_optimizer_holds_is_silent(rank: int) -> Said:
    model = wrap_in_detail(nn.Sequential(nn.Linear(1, 1), tanh_net()))
    optimizer = torch.optim.SGD(model.module[1].parameters(), lr=0.1)
    for index in range(3):
        for parameter in model.module[0].parameters():
            parameter.requires_grad_(index == 0)
            if index == 0:
                parameter.grad = torch.full_like(parameter, float(rank))
        if index == 0:
            for parameter in model.module[0].parameters():
                parameter.requires_grad_(False)
        for parameter in model.module[1].parameters():
            parameter.grad = torch.ones_like(parameter)
        model.all_reduce()
        optimizer.step()
    return error_of(model.all_reduce)


@on_ranks(2, ["outside (1,)"] * 2)
def test_another_module_put_in_place_is_the_one_that_is_followed(rank: int) -> str:
    model = wrap_in_detail(tanh_net())
    model.module = copy.deepcopy(model.module)
    model.all_reduce()
    if rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1
    return _error_text(model.all_reduce)


@on_ranks(2)
def _steps_at_another_rate_for_once(rank: int) -> str:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for index in range(3):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
        optimizer.param_groups[0]["lr"] = 0.25 if (index, rank) == (2, 1) else 0.5
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
    return error_of(model.all_reduce)[1]


def test_a_rate_that_was_another_during_the_step_alone_is_told() -> None:
    for text in _steps_at_another_rate_for_once():
        assert "lr of parameter group 0: rank 1 has 0.25; rank 0 has 0.5" in text


@on_ranks(2)
def _edits_a_gradient_that_changes_no_weight(rank: int) -> str:
    model = wrap_in_detail(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    add_gradients(model, 1.0)
    model.all_reduce()
    if rank == 1:
        model.module[0].weight.grad[0, 0] += 1
    optimizer.step()
    optimizer.zero_grad()
    return error_of(model.all_reduce)[1]


def test_replicas_with_another_past_are_not_equal() -> None:
    for text in _edits_a_gradient_that_changes_no_weight():
        assert text.startswith("all_reduce() call 2: replicas differ in the history since the last call\n")

"""The number of optimizer steps between two calls, and of backward passes."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.outcomes import Outcome, check_agreed, check_silent, outcome_of
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, tanh_net

# Different numbers of optimizer steps between two calls are an error on every rank in the second call

Model = LegacyDistributedDataParallel
Steps = Callable[[Model, SGD, int], object]


def _skips(model: Model, optimizer: SGD, rank: int) -> None:
    pass


def _steps_twice(model: Model, optimizer: SGD, rank: int) -> None:
    optimizer.step()
    optimizer.step()


def _drops_gradients(model: Model, optimizer: SGD, rank: int) -> None:
    optimizer.zero_grad()
    optimizer.step()


def _steps_in_a_block(model: Model, optimizer: SGD, rank: int) -> None:
    optimizer.step()
    with model.no_sync():
        optimizer.step()


def _steps_beside(model: Model, optimizer: SGD, rank: int) -> None:
    """The optimizer of another model, and a step with zeros, which makes optimizer state."""
    optimizer.step()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    SGD(other.parameters(), lr=0.1).step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def _fails_to_step(model: Model, optimizer: SGD, rank: int) -> None:
    def closure() -> float:
        raise KeyError("no batch")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    optimizer.step()


def _trains(rank: int, who: tuple[int, ...], steps: Steps, checks: str | Checks) -> Outcome:
    model = Model(tanh_net(), checks=checks)
    optimizer = SGD(model.parameters(), lr=0.1)
    for index in range(4):
        add_gradients(model, 1.0 + rank)
        if index == 3:
            break
        model.all_reduce()
        if index == 2 and rank in who:
            steps(model, optimizer, rank)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return outcome_of(model, rank, model.all_reduce)


_IGNORES = Checks(divergence="ignore")
_NUMBERS: dict[str, tuple[Steps, int]] = {
    "skips": (_skips, 0),
    "twice": (_steps_twice, 2),
    "drops": (_drops_gradients, 0),
}


@pytest.mark.parametrize("world_size, who", [(2, 1), (3, 0)])
def test_ranks_with_different_numbers_of_steps_are_told(world_size: int, who: int) -> None:
    cases = {name: ((who,), steps, _IGNORES) for name, (steps, _) in _NUMBERS.items()}
    for name, outcomes in run_cases(_trains, world_size, cases).items():
        words = (f"rank {who} has {_NUMBERS[name][1]}", "have 1" if world_size > 2 else "has 1", "call 4")
        check_agreed(outcomes, "DesyncError", (who,) if world_size > 2 else (), "numbers of optimizer steps", *words)


_ALLOWS = Checks(unsynchronized_step="allow", divergence="ignore")
_SILENT: dict[str, tuple[tuple[int, ...], Steps, str | Checks]] = {
    "no step of any rank": ((0, 1), _skips, "info"),
    "two steps of all ranks": ((0, 1), _steps_twice, "info"),
    "no gradients on any rank": ((0, 1), _drops_gradients, "info"),
    "steps that change no replica": ((1,), _steps_beside, "info"),
    "a step that fails": ((1,), _fails_to_step, "info"),
    "local steps": ((1,), _steps_in_a_block, _IGNORES),
    "checks off": ((1,), _skips, "off"),
    "allowed": ((1,), _skips, _ALLOWS),
}


def test_equal_numbers_and_steps_that_do_not_count_are_silent_and_nothing_is_counted_without_the_check() -> None:
    for outcomes in run_cases(_trains, 2, _SILENT).values():
        check_silent(outcomes)


def _steps_with_large_gradient(rank: int, place: int | None) -> Said:
    """A step of rank 1 alone with zeros, or with a 1 at ``place``; the error of the next call."""
    model = Model(nn.Linear(2**10, 2**10, bias=False), checks=Checks(divergence="ignore"))
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
    grad = model.module.weight.grad.zero_()
    if place is not None:
        grad.view(-1)[place] = 1.0
    if rank == 1:
        optimizer.step()
    optimizer.zero_grad()
    add_gradients(model, 1.0)
    return error_of(model.all_reduce)


@pytest.mark.cpu("on a device the first step of an optimizer counts without a look at the gradients")
def test_a_large_gradient_is_read_to_its_end() -> None:
    found = run_cases(_steps_with_large_gradient, 2, {"zeros": (None,), "first": (0,), "last": (2**20 - 1,)})

    assert found.pop("zeros") == [None, None]
    for said in (*found["first"], *found["last"]):
        assert said is not None
        assert "rank 1 has 1; rank 0 has 0" in said[1]


@on_ranks(2)
def _unscales_before_the_call(rank: int) -> str:
    """An infinity on rank 1 in step 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    model = Model(tanh_net(), checks=Checks(grad_scaler=scaler, nonfinite="ignore", edited="allow"))
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(torch.randn(2, 4) + rank).square().mean()
        (scaler.scale(loss) * (float("inf") if (step, rank) == (2, 1) else 1.0)).backward()
        scaler.unscale_(optimizer)
        try:
            model.all_reduce()
        except RuntimeError as error:
            return f"{step} {type(error).__name__} {error}"
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return ""


def test_a_scaler_that_skips_on_one_rank_alone_is_told_in_the_next_call() -> None:
    first, second = _unscales_before_the_call()

    assert first == second
    assert first.startswith("3 DesyncError")
    assert "rank 1 has 0; rank 0 has 1" in first
    assert "unscale" in first


@pytest.mark.usefixtures("alone")
def test_a_step_is_safe_while_another_thread_makes_wrappers() -> None:
    """optimizer.step() raised "Set changed size during iteration"."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            kept = [Model(nn.Linear(1, 1)) for _ in range(5)]
            del kept

    maker = threading.Thread(target=make)
    maker.start()
    try:
        for _ in range(5_000):
            optimizer.step()
    finally:
        is_over.set()
        maker.join()

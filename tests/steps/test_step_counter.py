"""The number of optimizer steps between two calls, and of backward passes."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp._steps.backward_counter import BackwardCounter, is_any_counting
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._steps.step_counter import StepCounter
from tests.helpers.outcomes import Outcome, check_agreed, check_silent, outcome_of
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, tanh_net
from tests.helpers.tiers import thorough

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


@pytest.mark.parametrize("world_size, who", [(2, 1), (3, 0), thorough(4, 2)])
@pytest.mark.parametrize("steps, number", [(_skips, 0), (_steps_twice, 2), (_drops_gradients, 0)])
def test_ranks_with_different_numbers_of_steps_are_told(steps: Steps, number: int, world_size: int, who: int) -> None:
    outcomes = run_ranks(_trains, world_size, (who,), steps, Checks(divergence="ignore"))

    words = (f"rank {who} has {number}", "have 1" if world_size > 2 else "has 1", "call 4")
    check_agreed(outcomes, "DesyncError", (who,) if world_size > 2 else (), "numbers of optimizer steps", *words)


@pytest.mark.parametrize("steps", [_skips, _steps_twice, _drops_gradients])
def test_the_same_number_on_all_ranks_is_silent(steps: Steps) -> None:
    check_silent(run_ranks(_trains, 2, (0, 1), steps, "info"))


@pytest.mark.parametrize("steps", [_steps_beside, _fails_to_step])
def test_steps_that_change_no_replica_do_not_count(steps: Steps) -> None:
    check_silent(run_ranks(_trains, 2, (1,), steps, "info"))


def test_local_steps_do_not_count() -> None:
    check_silent(run_ranks(_trains, 2, (1,), _steps_in_a_block, Checks(divergence="ignore")))


@pytest.mark.parametrize("checks", ["off", Checks(unsynchronized_step="allow", divergence="ignore")])
def test_nothing_is_counted_without_the_check(checks: str | Checks) -> None:
    check_silent(run_ranks(_trains, 2, (1,), _skips, checks))


@pytest.mark.parametrize("place, number", [(None, 0), (0, 1), (2**20 - 1, 1)])
def test_a_large_gradient_is_read_to_its_end(place: int | None, number: int) -> None:
    group, parameter = _Group(), nn.Parameter(torch.ones(2**10, 2**10))
    counter = StepCounter(StepPolicy(guarded=True))
    counter.ids = frozenset([id(parameter)])
    counter.begin(group)
    parameter.grad = torch.zeros(2**10, 2**10)
    if place is not None:
        parameter.grad.view(-1)[place] = 1.0

    SGD([parameter], lr=0.1).step()

    assert counter.take(group) == number


class _Group:
    """Stands for a process group."""


def test_gradients_of_other_devices_are_not_read() -> None:
    group, parameter = _Group(), nn.Parameter(torch.ones(2, device="meta"))
    counter = StepCounter(StepPolicy(guarded=True))
    counter.ids = frozenset([id(parameter)])
    counter.begin(group)
    parameter.grad = torch.ones(2, device="meta")

    SGD([parameter], lr=0.1).step()

    assert counter.take(group) == 0


def _scales(rank: int, unscales_before: bool) -> str:
    """An infinity on rank 1 in step 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    model = Model(tanh_net(), checks=Checks(grad_scaler=scaler, nonfinite="ignore", edited="allow"))
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(torch.randn(2, 4) + rank).square().mean()
        (scaler.scale(loss) * (float("inf") if (step, rank) == (2, 1) else 1.0)).backward()
        if unscales_before:
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
    first, second = run_ranks(_scales, 2, True)

    assert first == second
    assert first.startswith("3 DesyncError")
    assert "rank 1 has 0; rank 0 has 1" in first
    assert "unscale" in first


def test_a_scaler_that_skips_on_all_ranks_is_silent() -> None:
    assert run_ranks(_scales, 2, False) == ["", ""]


# The quick look whether any gradient waits for a call, while other threads make wrappers


class _NoResult:
    """The place of a gradient before the first call."""

    version = 0
    view = None

    def is_in(self, grad: torch.Tensor) -> bool:
        return grad is None


def test_the_look_is_safe_while_other_threads_make_counters() -> None:
    """optimizer.step() raised "Set changed size during iteration"."""
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            kept = [BackwardCounter(guarded=True) for _ in range(20)]
            del kept

    maker = threading.Thread(target=make)
    maker.start()
    try:
        for _ in range(20_000):
            is_any_counting()
    finally:
        is_over.set()
        maker.join()


def test_a_count_is_seen_until_its_reset_and_not_after_the_end_of_its_counter() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    counter = BackwardCounter(guarded=True)
    counter.attach(["weight"], [parameter], [_NoResult()])
    before = is_any_counting()
    parameter.sum().backward()
    assert is_any_counting()
    counter.reset()
    assert is_any_counting() == before

    parameter.sum().backward()
    del counter
    assert is_any_counting() == before

"""Ranks with different numbers of steps: join() as under torch DDP, and errors in place of hangs."""

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel, SyncTimeoutError
from legacy_ddp.debug import check_replicas
from tests.helpers.besides_ddp import distributed_optimizers
from tests.helpers.cases import bits_of, set_gradients, wrap_module
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, error_of, gradient_values, step, tanh_net, wrap

Model = LegacyDistributedDataParallel


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    torch.manual_seed(rank)
    for _ in range(count):
        model(torch.randn(8, 4)).square().mean().backward()
        if isinstance(model, Model):
            model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()


def _net() -> nn.Module:
    net = tanh_net()
    net.register_buffer("seen", torch.zeros(1))
    return net


def _uneven(rank: int, epochs: Sequence[tuple[int, int]], divide: bool) -> list[Any]:
    """The weights and the buffer after epochs with these numbers of steps, with torch DDP and with ours."""
    found = []
    for wrapper in (DistributedDataParallel, Model):
        model = wrapper(_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for counts in epochs:
            with model.join(divide_by_initial_world_size=divide):
                _steps(model, optimizer, rank, counts[rank])
                model.module.seen.fill_(1.0 + rank)
        found.append([bits_of(tensor.detach()) for tensor in model.state_dict().values()])
    return found


@pytest.mark.unsimulated("torch DDP logs a warning there")
def test_uneven_ranks_end_with_torch_ddps_weights() -> None:
    """Also in a second epoch, which begins without gradients."""
    epochs = [[(2, 5)], [(4, 1)], [(3, 3)], [(2, 3), (3, 2)]]
    cases = {f"{each}, {divide}": (each, divide) for each in epochs for divide in (True, False)}
    for name, (first, second) in run_cases(_uneven, 2, cases).items():
        theirs, ours = first
        assert ours == theirs, name
        assert first == second, name


def _one_more(rank: int, sample_size: int | None, options: dict[str, bool], reproducible: bool = False) -> list[Any]:
    """Rank 0 has two steps, the others one: the gradients of the second."""
    model = wrap(reproducible=reproducible)
    with model.join(**options):
        for _ in range(2 if rank == 0 else 1):
            model.zero_grad()
            add_gradients(model, 6.0)
            record = model.all_reduce(sample_size=sample_size)
            left = record.skipped_ranks, record.divisor, list(gradient_values(model).values())
    return [left, list(gradient_values(model).values())]


# The arguments of a case, then divisor and mean.
MEANS: dict[str, tuple[tuple[Any, ...], int, float]] = {
    "who left counts as zeros": ((None, {}), 3, 2.0),
    "who left does not count": ((None, {"divide_by_initial_world_size": False}), 1, 6.0),
    "items are counted, not ranks": ((2, {}), 2, 3.0),
    "items, and sums are reproducible": ((2, {}, True), 2, 3.0),
}


def test_a_mean_counts_the_ranks_that_it_is_told_to() -> None:
    seen = run_cases(_one_more, 3, {name: case for name, (case, _, _) in MEANS.items()})
    for name, (_, divisor, value) in MEANS.items():
        first, *others = seen[name]
        assert first == [((1, 2), divisor, [value]), [None]]
        for other in others:
            assert other[1] == [None], "what a rank stood in for is no gradient of its next epoch"


@on_ranks(2, [[None, 1, 1.5]] * 2)
def test_a_window_that_no_rank_fills_is_dropped_too(rank: int) -> list[float | None]:
    """Both run out in the middle of a window."""
    model = wrap()
    with model.join(), model.no_sync():
        add_gradients(model, 1.0)
    left = gradient_values(model)["weight"]
    add_gradients(model, 1.0 + rank)
    return [left, model.all_reduce().rows[rank].micro_batches, gradient_values(model)["weight"]]


@on_ranks(2, [["0.bias"]] * 2)
def test_the_gradient_of_an_ignored_parameter_is_left_alone(rank: int) -> list[str]:
    model = LegacyDistributedDataParallel(tanh_net(), ignore=["0.bias"])
    with model.join():
        model(torch.ones(1, 4)).sum().backward()
        model.all_reduce()
    return [name for name, parameter in model.module.named_parameters() if parameter.grad is not None]


# (2 + 4) / 2 with both; then rank 0 alone, whatever rank 1 had begun.
@on_ranks(2, [[[3.0], [2.0]], [[3.0]]])
def test_a_window_that_is_not_full_is_dropped(rank: int) -> list[Any]:
    """Rank 1 runs out in the middle of a window of two micro-batches."""
    model, calls = wrap(), []
    with model.join(divide_by_initial_world_size=False):
        for number in range(4 if rank == 0 else 3):
            if number % 2 == 0:
                model.zero_grad()
                with model.no_sync():
                    add_gradients(model, 1.0 + rank)
                    assert not model.all_reduce().synchronized  # no notice in here: the others are not asked
            else:
                add_gradients(model, 1.0 + rank)
                model.all_reduce()
                calls.append(list(gradient_values(model).values()))
    return calls


def _with_zero(rank: int) -> list[Any]:
    """Our weights with ZeRO, torch DDP's with the same optimizer not sharded."""
    theirs = DistributedDataParallel(_net())
    with theirs.join():
        _steps(theirs, torch.optim.SGD(theirs.parameters(), lr=0.5), rank, 3 - rank)
    ours = Model(_net())
    sharded = distributed_optimizers().ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.5)
    with Join([ours, sharded]):
        _steps(ours, sharded, rank, 3 - rank)
    found = [[bits_of(tensor.detach()) for tensor in model.state_dict().values()] for model in (theirs, ours)]
    ours.broadcast_buffers()  # the block is over
    _steps(ours, torch.optim.SGD(ours.parameters(), lr=0.5), rank, 1)
    return found


def test_it_composes_with_zero_when_it_comes_first() -> None:
    # Under torch DDP, a rank that left steps its shard with its own last gradients (torch 2.13): that is no oracle.
    ranks = run_ranks(_with_zero, 2)
    for theirs, ours in ranks:
        assert ours == theirs
    assert ranks[0] == ranks[1]


def _second(rank: int) -> None:
    model = wrap()
    optimizer = distributed_optimizers().ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    with pytest.raises(ValueError, match="expected it first"):
        Join([optimizer, model])
    step(model, 1.0)  # what was refused left nothing behind


def test_a_wrapper_behind_another_is_refused_before_anybody_waits() -> None:
    run_ranks(_second, 2)


@on_ranks(2, [True] * 2)
def test_a_collective_without_the_ranks_that_left_is_an_error_inside_the_block_only(rank: int) -> bool:
    model = wrap()
    move = partial(setattr, model, "process_group", None)
    with model.join():
        for act in (model.broadcast_parameters, model.broadcast_buffers, partial(check_replicas, model), move):
            with pytest.raises(LegacyDDPError, match=r"inside join\(\)"):
                act()
    model.broadcast_parameters()
    move()
    return check_replicas(model).identical


@on_ranks(2, [("RuntimeError", True, 1.0)] * 2)
def test_running_out_early_can_be_an_error_on_all_ranks(rank: int) -> Any:
    model = wrap()

    def work() -> None:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 + rank):
                add_gradients(model, 1.0)
                model.all_reduce()

    kind, text = error_of(work)
    return kind, "exhausted" in text, step(model, 1.0)


@on_ranks(2, [[1.5]] * 2)
def test_after_an_exception_inside_the_block_is_over(rank: int) -> list[float | None]:
    model = wrap()
    with pytest.raises(KeyError, match="data"), model.join():
        raise KeyError("data")
    model.broadcast_parameters()
    add_gradients(model, 1.0 + rank)
    model.all_reduce()
    return list(gradient_values(model).values())


@on_ranks(2, [("NonFiniteGradientError", 1.5)] * 2)
def test_after_an_agreed_error_inside_the_block_is_over_on_all_ranks(rank: int) -> Any:
    """torch's own context does not tell the wrapper that it was left by an exception."""
    model = wrap(checks=Checks(nonfinite="raise"))

    def work() -> None:
        with Join([model]):
            for number in range(2 + rank):
                model.zero_grad()
                add_gradients(model, float("nan") if number == 2 else 1.0)
                model.all_reduce()

    said = error_of(work)
    model.broadcast_parameters()
    return said and said[0], step(model, 1.0 + rank)


@on_ranks(2, [[1.5], [1.5, 2.0]])
def test_a_disabled_join_inside_leaves_the_outer_one_on(rank: int) -> list[float | None]:
    model, found = wrap(timeout_seconds=5.0), []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            with model.join(enable=False):
                pass
            found.append(step(model, 1.0 + rank))
    return found


@on_ranks(2, [[(False, 2, 1.0)], [(False, 2, 1.0), (True, 0, None)]])
def test_where_no_rank_takes_part_ranks_that_left_do_not_count_either(rank: int) -> list[Any]:
    model, found = wrap(), []
    with model.join():
        for number in range(1 + rank):
            add_gradients(model, 1.0)
            record = model.all_reduce(skip=number == 1)
            found.append((record.skipped, record.divisor, gradient_values(model)["weight"]))
    return found


# g = (3, 1): A = (9 + 1) / 2, the mean of the two is 2, N = 2: tr = (5 - 4) / (1 - 1 / 2), |G|^2 = 4 - 2 / 2.
@pytest.mark.cpu("norms are not read on a device")
@on_ranks(3, [pytest.approx((3.0, 2.0))] * 2 + [None])
def test_the_noise_scale_counts_those_that_took_part(rank: int) -> Any:
    model = wrap_module([torch.zeros(1)])
    with model.join():
        if rank < 2:
            set_gradients(model, [torch.tensor([3.0 - 2 * rank])])
            record = model.all_reduce()
            found = record.noise_scale(model.module[0].grad.norm())
            return found.squared_norm, found.noise
    return None


def _in_a_sub_group(rank: int) -> list[Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrap(process_group=groups[rank // 2])
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank % 2):
            add_gradients(model, 1.0 + rank)
            model.all_reduce()
            found = list(gradient_values(model).values())
            model.zero_grad()
    return found


def test_each_sub_group_joins_for_itself() -> None:
    assert run_ranks(_in_a_sub_group, 4) == [[1.5], [2.0], [3.5], [4.0]]


def _late(rank: int) -> Any:
    """Rank 1 never comes to its notice, and lives."""
    model = wrap(timeout_seconds=1.0)
    step(model, 1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with model.join():
            model.all_reduce()
    except SyncTimeoutError as error:
        again = error_of(model.all_reduce)
        return error.ranks, error.phase, again and again[0]
    return None


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
def test_a_rank_that_stays_away_ends_the_wait_with_the_timeout() -> None:
    seen, _ = run_ranks(_late, 2, lost=(1,), survivors_exit=False)
    assert seen == ((1,), "join", "LostPeerError")


def _asleep_in_its_second_step(rank: int) -> Any:
    model = wrap(timeout_seconds=2.0)
    try:
        with model.join():
            for number in range(rank + 1):
                if (rank, number) == (1, 1):
                    time.sleep(6.0)  # beyond the timeout: being away is the fault
                step(model, 1.0)
    except RuntimeError as error:  # gloo's own, for who waits inside torch's Join
        return getattr(error, "ranks", None), " ".join(str(error).split())


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
def test_a_rank_that_is_out_of_data_is_not_blamed_for_one_that_hangs() -> None:
    ranks, text = run_ranks(_asleep_in_its_second_step, 3, lost=(0, 1), survivors_exit=False)[2]
    assert ranks == (1,)
    assert "missing rank 1 (user code after all_reduce() call 1" in text
    assert "0 join, out of data after all_reduce() call" in text

"""Exceptions in user code on a single rank: training continues or ends on all ranks alike."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.outcomes import attempt, backward, small_net
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases


class _Broken(torch.autograd.Function):
    """Passes its input on; its backward fails."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(*_: Any) -> torch.Tensor:
        raise KeyError("bad batch")


def _backward_or_break(model: nn.Module, value: float, breaks: bool, where: str = "after") -> None:
    """One micro-batch of ``value``, or one of which backward fails: before, or after, it has reached the last layer."""
    if not breaks:
        return backward(model, value)
    hidden = model.module[0](torch.ones(1, 2))
    output = model.module[1](_Broken.apply(hidden) if where == "after" else hidden)
    return (_Broken.apply(output) if where == "before" else output).sum().backward()


def _drops_a_step(rank: int, broken: tuple[int, ...], where: str) -> list[bool]:
    model = LegacyDistributedDataParallel(small_net())  # with a warning of uneven work, which is an error here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = []
    for step in range(4):
        failed = torch.zeros(1)
        try:
            _backward_or_break(model, float(rank), step == 1 and rank in broken, where)
        except KeyError:
            failed += 1
        dist.all_reduce(failed)
        if not failed:
            model.all_reduce()
            weight = model.module[0].weight  # its gradient is in proportion to the input: 0, 1 and 2, in the mean 1
            expected = torch.autograd.grad(model(torch.ones(1, 2)).sum(), weight)[0]
            right.append(torch.allclose(weight.grad, expected))
            optimizer.step()
        optimizer.zero_grad()
    return right


def test_a_step_that_all_ranks_drop_because_backward_failed_on_one_leaves_no_trace() -> None:
    broken = {"none": ((), "after"), "all, after": ((0, 1, 2), "after"), "all, before": ((0, 1, 2), "before")}
    broken |= {"one, after": ((1,), "after"), "one, before": ((1,), "before")}
    expected = {name: [[True] * (3 if ranks else 4)] * 3 for name, (ranks, _) in broken.items()}

    assert run_cases(_drops_a_step, 3, broken) == expected


def _drops_a_step_alone(rank: int) -> tuple[list[float], tuple[int, ...]]:
    """Rank 1 drops step 1, of which a part of a backward had run, without a word to rank 0. The gradients are steps."""
    model = LegacyDistributedDataParallel(small_net(), checks=Checks(uneven="raise"))
    calls: list[float] = []
    try:
        for step in range(4):
            try:
                with model.no_sync():
                    backward(model, 1.0)
                _backward_or_break(model, float(step), rank == 1 and step == 1, "before")
            except KeyError:
                model.zero_grad()
                continue
            model.module[1].bias.grad.fill_(float(step))
            model.all_reduce()
            calls.append(model.module[1].bias.grad[0].item())
            model.zero_grad()
    except LegacyDDPError as error:
        return calls, error.ranks
    dist.destroy_process_group()
    return calls, ()


def test_a_step_that_one_rank_drops_together_with_its_call_shows_when_it_leaves() -> None:
    (first, lost), (second, _) = run_ranks(_drops_a_step_alone, 2)

    assert first == second == [0.0, 1.5, 2.5]  # of steps 0 and 0, 1 and 2, 2 and 3
    assert lost == (1,)


def _error_in_no_sync(rank: int, failing: tuple[int, ...]) -> list[float]:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        try:
            with model.no_sync():
                backward(model, 1.0 + rank)
                if rank in failing and step == 1:
                    raise KeyError("from user code")
        except KeyError:
            pass
        model.all_reduce()
        found += model.module.weight.grad.flatten().tolist()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_an_exception_inside_no_sync_does_not_leave_synchronisation_off() -> None:
    failing: dict[str, tuple[Any, ...]] = {"none": ((),), "one": ((1,),), "all": ((0, 1),)}

    assert run_cases(_error_in_no_sync, 2, failing) == dict.fromkeys(failing, [[1.5] * 6] * 2)


def _repairs_after_an_error(rank: int, error: str, moment: str) -> tuple[str, str]:
    """The errors of a call in which ranks disagree, and of the next. Rank 1 writes to a weight, at the ``moment``.

    ``error``: "steps" for a step of rank 0 alone, "argument" for an unusable argument of rank 1.
    """
    model = LegacyDistributedDataParallel(small_net(), checks=Checks(uneven="raise", divergence="warn"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backward(model, 1.0)
    model.all_reduce()
    if error == "steps" and rank == 0:
        optimizer.step()
    found = []
    for is_repaired in (False, True):
        optimizer.zero_grad()
        backward(model, 1.0)
        if rank == 1 and not is_repaired and moment == "before":
            _write(model)
        size: Any = "many" if error == "argument" and rank == 1 and not is_repaired else None
        found.append(str(attempt(partial(model.all_reduce, sample_size=size)) or ""))
        if rank == 1 and moment == "after":
            _write(model)
    return found[0], found[1]


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)


def test_weights_repaired_by_one_rank_after_an_error_are_no_uneven_work() -> None:
    """The rank counted its dropped gradient, and the next call was an error: "rank 1 has 2; rank 0 has 1"."""
    cases = {f"{error}, {moment}": (error, moment) for error in ("steps", "argument") for moment in ("before", "after")}
    texts = {
        "steps": "ranks made different numbers of optimizer steps",
        "argument": "rank 1 failed before the exchange",
    }

    for name, results in run_cases(_repairs_after_an_error, 2, cases).items():
        for first, second in results:
            assert texts[cases[name][0]] in first, name
            assert second == "", name

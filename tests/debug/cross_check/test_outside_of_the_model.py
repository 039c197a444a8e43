"""A cross-check neither changes nor overlooks what a run uses outside of the model."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import CrossCheck, cross_check
from tests.helpers.cases import bits_of
from tests.helpers.cross_faults import Net, batch_of, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases

Built = tuple[nn.Module, list[nn.Module], Callable[[nn.Module, Any], torch.Tensor]]


def _with_a_head() -> Built:
    """A second model behind the first, with statistics of its own."""
    body, head = LegacyDistributedDataParallel(Net(nn.Tanh())), LegacyDistributedDataParallel(nn.BatchNorm1d(3))
    run = lambda model, batch: functional.cross_entropy(head(model(batch["inputs"])), batch["targets"])  # noqa: E731
    return body, [head], run


class _Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.bernoulli(torch.full(inputs.shape, 0.5), generator=self.generator)


def _with_a_generator() -> Built:
    return LegacyDistributedDataParallel(Net(_Noisy())), [], loss_of


def _train(build: Callable[[], Built], rank: int, *, checked: bool) -> list[bytes]:
    model, others, run = build()
    models = [model, *others]
    optimizer = torch.optim.SGD([item for one in models for item in one.parameters()], lr=0.1)
    check = CrossCheck(model, run, every=2)
    for _ in range(4):
        batch = batch_of(rank)
        optimizer.zero_grad()
        run(model, batch).backward()
        if checked:
            report = check(batch)
            assert report is None or report.agrees, report
        for one in models:
            record = one.all_reduce()
            assert record.rows[rank].micro_batches == 1
        optimizer.step()
    return [bits_of(value) for one in models for value in one.state_dict().values()]


def _with_and_without(rank: int) -> list[bool]:
    builds = _with_a_head, _with_a_generator
    return [_train(build, rank, checked=True) == _train(build, rank, checked=False) for build in builds]


@pytest.mark.unsimulated("its generator draws no dropout of a probability of its own")
def test_a_check_changes_no_second_model_and_no_generator_of_a_module() -> None:
    assert run_ranks(_with_and_without, 3) == [[True, True]] * 3


def _learnable(rank: int, guilty: int) -> tuple[str, tuple[int, ...], bool, Any]:
    """A temperature outside of the model; on a guilty rank its gradient is wrong."""
    temperature = torch.ones((), requires_grad=True)
    calls = count()
    temperature.register_post_accumulate_grad_hook(lambda _: next(calls))

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        scaled = temperature * 1.0
        if rank == guilty:
            scaled.register_hook(lambda grad: grad * 2)
        return functional.cross_entropy(model(batch["inputs"]) * scaled, batch["targets"])

    report = cross_check(LegacyDistributedDataParallel(Net(nn.Tanh())), run, batch_of(rank))
    return report.verdict, report.ranks, temperature.grad is None, (next(calls), report.differing)


def test_a_learnable_loss_keeps_its_gradient_and_is_compared() -> None:
    found = run_cases(_learnable, 3, {"right": (9,), "wrong": (1,)})

    assert found["right"] == [("equal", (), True, (0, ()))] * 3
    assert found["wrong"] == [("differs", (1,), True, (0, ("gradients outside of the model",)))] * 3


@on_ranks(3, gives=[(True, True, True)] * 3)
def test_a_run_that_calls_eval_leaves_wrapper_and_other_modules_in_training_mode(rank: int) -> tuple[bool, bool, bool]:
    model, other = LegacyDistributedDataParallel(Net(nn.Tanh())), nn.Dropout()

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        model.eval()
        other.eval()
        return loss_of(model, batch)

    agrees = cross_check(model, run, batch_of(rank)).agrees
    return agrees, all(module.training for module in model.modules()), other.training


class _Warm(nn.Module):
    """The first pass of all differs, as with a lazy cache."""

    def __init__(self, is_warm: bool) -> None:
        super().__init__()
        self.calls = count(int(is_warm))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1.0 if next(self.calls) else 0.5)


def _warm_up(rank: int, warm_ranks: tuple[int, ...], operations: bool) -> tuple[str, tuple[int, ...], str]:
    model = LegacyDistributedDataParallel(Net(_Warm(rank in warm_ranks)))
    report = cross_check(model, loss_of, batch_of(rank), operations=operations)
    return report.verdict, report.ranks, " ".join(str(report).split())


@on_ranks(3, gives=[None] * 3)
def test_a_warm_up_of_every_rank_accuses_no_rank_and_no_hardware(rank: int) -> None:
    for operations in (False, True):
        verdict, ranks, text = _warm_up(rank, (), operations)
        assert (verdict, ranks) == ("once", (0, 1, 2)), text
        assert "the first run of every batch differs from the run on the next rank" in text, text
        assert "why: state of a first run: a warm-up, a lazy cache, a counter" in text, text
        assert "hardware" not in text, text


@on_ranks(3, gives=[None] * 3)
def test_a_warm_up_of_one_rank_is_among_the_causes_of_a_single_event(rank: int) -> None:
    verdict, ranks, text = _warm_up(rank, (0, 2), operations=False)
    cause = "a single event is state of a first run in Python, memory or hardware, or a kernel that is rarely"
    assert (verdict, ranks, cause in text) == ("once", (1,), True), text


@on_ranks(3, gives=[None] * 3)
def test_another_constant_of_the_function_is_the_next_step(rank: int) -> None:
    pieces = 8 if rank == 1 else 4
    model = LegacyDistributedDataParallel(Net(nn.Tanh()))
    report = cross_check(model, lambda model, batch: loss_of(model, batch) / pieces, batch_of(rank))
    text = " ".join(str(report).split())
    assert "; rank 1 (here) against ranks 0, 2 (there)" in text, text
    assert "setting run variable 'pieces': ranks 0, 2 have 4; rank 1 has 8" in text, text
    assert "next: if the loss depends on run variable 'pieces', make it equal on all ranks" in text, text

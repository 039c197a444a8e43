"""A training with cross-checks in between has the bits of a training without."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import check_replicas, cross_check
from tests.helpers.cases import bits_of
from tests.helpers.cross_faults import Net, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.tiers import thorough_but


class _Drawing(nn.Module):
    """Draws from the generators of Python and NumPy, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(inputs) * (random.random() + np.random.rand())


def _batches(rank: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2 * steps):
        inputs = torch.randn(6 + rank, 6, generator=generator)
        yield {"inputs": inputs, "targets": torch.randint(3, (6 + rank,), generator=generator)}


def _train(rank: int, arguments: dict[str, Any], *, checked: bool, faulty: bool) -> list[object]:
    """The bits of everything after a few steps. ``checked``: with cross-checks at every place in a step."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model = LegacyDistributedDataParallel(Net(_Drawing()), **arguments)
    if faulty and rank == 1:  # a difference makes every run of a cross-check
        model.module.middle.register_forward_hook(_only_in_checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[object] = []
    forwards = list[int]()
    model._synchronizer.observers.forward.add(lambda *_: forwards.append(1))

    def check(batch: Any) -> None:
        if checked:
            with patch.dict(_checking, now=True):
                report = cross_check(model, _loss_without_sync, batch)
            assert report.agrees != faulty, report

    batches = _batches(rank, 4)
    for _ in range(4):
        optimizer.zero_grad()
        first, second = next(batches), next(batches)
        check(first)
        with model.no_sync() if arguments.get("reproducible") else nullcontext():
            loss_of(model, first).backward()
        check(second)
        loss = loss_of(model, second)
        check(second)
        loss.backward()
        check(second)
        record = model.all_reduce(sample_size=2) if arguments.get("reproducible") else model.all_reduce()
        check(second)
        optimizer.step()
        check(second)
        seen.append([row.micro_batches for row in record.rows])
    assert check_replicas(model, optimizer, local_buffers=["*.running_*"]).identical
    gradients = [bits_of(item.grad) for item in model.parameters()]
    tensors = [bits_of(value) for value in model.state_dict().values()]
    return [seen, len(forwards), gradients, tensors, bits_of(torch.get_rng_state()), random.random()]


_checking: dict[str, bool] = {}  # empty outside of a check


def _only_in_checks(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5 if _checking else output


def _loss_without_sync(model: LegacyDistributedDataParallel, batch: Any) -> torch.Tensor:
    """As a loop that puts forward passes into a block, which is a micro-batch with reproducible sums."""
    with model.no_sync():
        return loss_of(model, batch)


SETTINGS = {
    "default": {},
    "detail": {"checks": Checks("detail", local_buffers=["*.running_*"])},
    "copies": {"gradient_as_bucket_view": False},
    "gloo": {"transport": "gloo", "checks": Checks("detail", every=2)},
    "reproducible": {"reproducible": True},
}


def _compare(rank: int, name: str, faulty: bool) -> list[bool]:
    plain = _train(rank, SETTINGS[name], checked=False, faulty=False)
    checked = _train(rank, SETTINGS[name], checked=True, faulty=faulty)
    return [was == now for was, now in zip(plain, checked, strict=True)]


@pytest.mark.unsimulated("each operation takes long there, and test_faults and test_arguments run there")
@pytest.mark.parametrize(
    "name, faulty",
    thorough_but([("default", False), ("default", True), ("reproducible", False)], product(SETTINGS, [False, True])),
)
def test_a_training_with_cross_checks_has_the_bits_of_one_without(name: str, faulty: bool) -> None:
    assert run_ranks(_compare, 2, name, faulty, timeout_seconds=120) == [[True] * 6] * 2


@on_ranks(2, gives=[[True] * 4] * 2)
def test_it_can_be_called_in_any_mode_which_stays(rank: int) -> list[bool]:
    model, seen = LegacyDistributedDataParallel(Net(nn.BatchNorm1d(16))), []
    batch = next(_batches(rank, 1))
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), model.no_sync()):
        with mode:
            grads, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            autocast = torch.is_autocast_enabled("cpu")
            agrees = cross_check(model, loss_of, batch).agrees
            after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            seen.append(agrees and after == (grads, inference, autocast))
    return seen


def _torch_ddp(rank: int, faulty: bool) -> tuple[str, bool]:
    model = nn.parallel.DistributedDataParallel(Net(nn.BatchNorm1d(16)))
    first, second = _batches(rank, 1)
    loss_of(model, first).backward()
    if faulty and rank == 1:
        model.module.drop.eval()
    verdict = cross_check(model, loss_of, first).verdict
    model.zero_grad()
    loss_of(model, second).backward()
    return verdict, check_replicas(model, what=["gradients"]).identical


@on_ranks(2, gives=[[("equal", True), ("differs", True)]] * 2)
def test_a_model_under_torch_ddp_is_checked_without_its_communication(rank: int) -> list[tuple[str, bool]]:
    return [_torch_ddp(rank, faulty) for faulty in (False, True)]

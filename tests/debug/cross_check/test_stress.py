"""Many cross-checks in processes of their own, with and without faults and errors: the state stays, and the exit is
clean."""

import random

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, PeerError
from legacy_ddp.debug import cross_check
from tests.helpers.cases import bits_of
from tests.helpers.cross_faults import KERNELS, Double, batch_of, flip, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import count

CHECKS = count(200, 30)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    looked = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Flatten(), Double(), nn.BatchNorm1d(4), nn.Dropout(0.2))
    return nn.Sequential(looked, nn.GRU(4, 5, batch_first=True), _First(), nn.Linear(5, 3))


class _First(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0]


def _state(model: nn.Module) -> list[object]:
    tensors = [*model.parameters(), *model.buffers()]
    grads = [(id(item.grad), item.grad.data_ptr(), bits_of(item.grad)) for item in model.parameters()]
    return [grads, [(id(item), item._version, bits_of(item)) for item in tensors], bits_of(torch.get_rng_state())]


def _many(rank: int) -> dict[str, int]:
    model, draw = LegacyDistributedDataParallel(_net()), random.Random(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, int] = {}
    for step in range(CHECKS):
        batch = batch_of(rank + 10 * (step % 4))  # of several sizes; the GRU unrolls their rows
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        model.all_reduce()
        before = _state(model)
        guilty, raises, place = draw.randrange(4), draw.random() < 0.2, (draw.randrange(8), draw.randrange(4))
        is_captured = draw.random() < 0.3

        def run(model: nn.Module, batch: object, fails: bool = raises and rank == guilty) -> torch.Tensor:
            loss = loss_of(model, batch)
            if fails:
                raise ArithmeticError("planted")
            return loss

        def kernel(
            tensor: torch.Tensor, is_wrong: bool = rank == guilty, place: tuple[int, int] = place
        ) -> torch.Tensor:
            return flip(tensor * 2, place, bit=22) if is_wrong else tensor * 2

        try:
            with KERNELS.replaced(kernel):
                verdict = cross_check(model, run, batch, operations=is_captured).verdict
        except PeerError:
            verdict = "error"
        assert _state(model) == before, (step, verdict)
        assert (verdict == "error") == (raises and guilty < 2), (step, verdict)
        found[verdict] = found.get(verdict, 0) + 1
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_many_cross_checks_leave_the_state_and_a_clean_exit() -> None:
    first, second = run_ranks(_many, 2, fresh=True, timeout_seconds=8.0 * CHECKS)

    assert first == second
    assert {"equal", "differs", "error"} <= set(first)
    assert sum(first.values()) == CHECKS

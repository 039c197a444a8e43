"""With default settings and no line added, faults of a loop are told with their rank within 16 calls, on 2 to 4 ranks.

``tests/replicas/test_found_by_default.py`` states the same for seven ways in which replicas diverge.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough

AT = 3  # the step of a fault that happens once
WITHIN = 16
Told = list[tuple[int, str]]  # the call, and the text as one line


@dataclass(frozen=True)
class Fault:
    """``words``: of the report, besides the ranks. ``is_everywhere``: every rank has the report, not rank 0 alone."""

    words: tuple[str, ...]
    is_everywhere: bool = True


FAULTS = {
    "NaN": Fault(("non-finite gradients", "'2.weight': 2048 NaN of 2048")),
    "wrong scaler order": Fault(("unscaled by a GradScaler", "'0.bias' among them", "unscale after all_reduce()")),
    "clip before the call": Fault(("clipped by norm", "'0.bias' among them", "clip and unscale after all_reduce()")),
    "skipped step": Fault(("different numbers of optimizer steps",)),
    "same data": Fault(("norms of local gradients are equal", "the same data"), is_everywhere=False),
}


def _train(rank: int, fault: str) -> Told:
    """A loop with a GradScaler and a clip, in the right order but for the ``fault``; without a scaler if for a NaN."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 1))
    model = LegacyDistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled="NaN" not in fault)
    data = torch.Generator().manual_seed(7 if fault == "same data" else 100 + rank)
    told: Told = []
    for step in range(1, WITHIN + 5):
        loss = model(torch.randn(6, 4, generator=data) + 0.1).square().mean()
        if fault == "NaN" and step == AT:
            loss = loss + net[2].weight.sum() * torch.nan
        scaler.scale(loss).backward()
        if fault == "wrong scaler order":
            scaler.unscale_(optimizer)
        if fault == "clip before the call":
            clip_grad_norm_(model.parameters(), 1e-2)
        try:
            model.all_reduce()
        except LegacyDDPError as error:
            return [*told, (step, " ".join(str(error).split()))]
        told += [(step, " ".join(text.split())) for text in logged_warnings.take()]
        if fault != "wrong scaler order":
            scaler.unscale_(optimizer)
        if fault != "clip before the call":
            clip_grad_norm_(model.parameters(), 1e-2)
        if fault != "skipped step" or step != AT:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return told


def _train_all(rank: int, faulty: tuple[int, ...]) -> dict[str, Told]:
    return {fault: _train(rank, fault if rank in faulty else f"none ({fault})") for fault in FAULTS}


@cache
def _told(world_size: int, *faulty: int) -> list[dict[str, Told]]:
    return run_ranks(_train_all, world_size, faulty, timeout_seconds=120)


def _named(ranks: tuple[int, ...]) -> str:
    """One rank, all ranks of several, or the first and the last."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks 0{'-' if ranks == tuple(range(len(ranks))) else ', '}{ranks[-1]}"


def _assert_told(fault: str, world_size: int, *faulty: int) -> None:
    of_ranks = [of_rank[fault] for of_rank in _told(world_size, *faulty)]
    for told in of_ranks if FAULTS[fault].is_everywhere else of_ranks[:1]:
        found = [(call, text) for call, text in told if all(word in text for word in FAULTS[fault].words)]
        assert len(found) == 1, of_ranks
        assert found[0][0] <= WITHIN
        assert _named(faulty) in found[0][1]
        assert found == [pair for pair in of_ranks[0] if pair in found]  # the same text in the same call


@pytest.mark.parametrize("world_size", [thorough(2), 3, thorough(4)])
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "same data"])
def test_a_fault_of_one_rank_is_told_within_16_calls(fault: str, world_size: int) -> None:
    _assert_told(fault, world_size, world_size - 1)


@pytest.mark.parametrize("world_size", [thorough(2), 3, thorough(4)])
@pytest.mark.parametrize("fault", ["wrong scaler order", "clip before the call", "same data"])
def test_a_fault_of_all_ranks_is_told_within_16_calls(fault: str, world_size: int) -> None:
    _assert_told(fault, world_size, *range(world_size))


@pytest.mark.parametrize("world_size", [3, thorough(4)])
def test_two_ranks_with_the_same_data_are_told_among_others(world_size: int) -> None:
    _assert_told("same data", world_size, 0, world_size - 1)


@pytest.mark.parametrize("world_size", [thorough(2), 3, thorough(4)])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_loop_in_the_right_order_is_silent(fault: str, world_size: int) -> None:
    assert [of_rank[fault] for of_rank in _told(world_size)] == [[]] * world_size


@pytest.mark.parametrize("world_size", [thorough(2), 3, thorough(4)])
def test_a_step_that_all_ranks_skip_is_silent(world_size: int) -> None:
    assert [of_rank["skipped step"] for of_rank in _told(world_size, *range(world_size))] == [[]] * world_size

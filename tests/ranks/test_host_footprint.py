"""What the memory of the host costs a process: descriptors, mappings and resident memory, over many steps."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import tiers
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


class Footprint(NamedTuple):
    descriptors: int
    segments: int
    proportional_bytes: int  # of segments: shared pages are divided among the processes that map them


def _footprint() -> Footprint:
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    shared = [mapping for mapping in maps if "/memfd:legacy_ddp" in mapping]
    pss = sum(int(re.search(r"^Pss: +(\d+) kB", mapping, re.MULTILINE)[1]) for mapping in shared)
    return Footprint(len(os.listdir("/proc/self/fd")), len(shared), 1024 * pss)


def _after_many(rank: int, steps: int) -> list[tuple[Footprint, int]]:
    """Footprint and resident bytes after a tenth of the steps, and after all; gradients are kept now and then."""
    net = nn.Linear(1 << 14, 1, bias=False)
    model = LegacyDistributedDataParallel(net, transport="host")
    seen = []
    for step in range(steps):
        kept = net.weight.grad if step % (5 + rank) == 0 else None
        model.zero_grad()
        net(torch.ones(1, 1 << 14)).sum().backward()
        model.all_reduce()
        del kept
        if step in (steps // 10, steps - 1):
            model.zero_grad(set_to_none=False)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            seen.append((_footprint(), resident))
    return seen


def test_many_steps_leave_no_memory_descriptor_or_mapping_behind(transport: str) -> None:
    steps = tiers.count(5000, 300)
    for (before, resident_before), (after, resident_after) in run_ranks(
        _after_many, 2, steps, fresh=True, timeout_seconds=300.0
    ):
        assert after.descriptors <= before.descriptors
        assert after.segments <= before.segments + 2  # one spare more on each of two ranks
        # A segment of 64 KiB left behind per step would be four times as much. The memory of Python and torch grows for
        # some thousands of steps.
        assert resident_after - resident_before < 2**14 * steps * 0.9


def _memory(rank: int) -> Footprint:
    net = nn.Linear(1 << 21, 1, bias=False)
    model = LegacyDistributedDataParallel(net, transport="host")
    for _ in range(3):
        model.zero_grad()
        net.weight.grad = torch.ones_like(net.weight)
        model.all_reduce()
    torch.distributed.barrier()
    footprint = _footprint()
    torch.distributed.barrier()
    return footprint


def test_the_ranks_together_hold_each_gradient_once_per_rank(transport: str) -> None:
    seen = run_ranks(_memory, 4, fresh=True)

    assert [footprint.segments for footprint in seen] == [4] * 4  # of every rank
    assert sum(footprint.proportional_bytes for footprint in seen) == pytest.approx(4 * 2**21 * 4, rel=0.05)


def _released(rank: int) -> list[int]:
    """Segments mapped while the model lives, and after it."""
    net = nn.Linear(64, 1, bias=False)
    model = LegacyDistributedDataParallel(net, transport="host")
    net.weight.grad = torch.ones_like(net.weight)
    model.all_reduce()
    counts = [_footprint().segments]
    net.weight.grad = None
    del model, net
    counts.append(_footprint().segments)
    return counts


def test_a_model_that_is_gone_leaves_no_mapping(transport: str) -> None:
    assert run_ranks(_released, 2) == [[2, 0]] * 2

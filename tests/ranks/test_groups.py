"""Private groups: separate from user groups, and an error for a missing rank that names it."""

import random
import subprocess
import sys
import time

from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks


def _just_as_a_slice_ends(rank: int) -> int:
    model = LegacyDistributedDataParallel(nn.Linear(2, 2))
    jitter = random.Random(0)
    for _ in range(40):
        if rank == 1:  # being late by a slice of the wait, give or take, is the fault under test
            time.sleep(0.1 + jitter.uniform(-3e-4, 3e-4))
        call = model.all_reduce().call
    return call


def test_a_rank_that_arrives_as_a_wait_slice_ends_is_not_reported_lost() -> None:
    assert run_ranks(_just_as_a_slice_ends, 2) == [40, 40]


SCRIPT = """
import gc, weakref
import torch, torch.distributed as dist
from legacy_ddp import LegacyDistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
model = LegacyDistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 1)).sum().backward()
model.all_reduce()
optimizer.step()
dist.destroy_process_group()
gc.collect()
assert group() is None, gc.get_referrers(group())
"""


def test_nothing_keeps_a_destroyed_group_alive_into_the_interpreter_s_exit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )

    assert (run.returncode, run.stderr) == (0, "")

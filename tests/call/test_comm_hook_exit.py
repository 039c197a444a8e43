"""Exit of a process with a pending collective of a communication hook."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_script
from tests.helpers.torch_versions import without_gloo_lines

_LEFT_BEHIND = """
import atexit, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from legacy_ddp import LegacyDistributedDataParallel

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
module = nn.ParameterList([torch.ones(2), torch.ones(2, dtype=torch.float64)])
model = LegacyDistributedDataParallel(module, timeout_seconds=60.0)
first, exiting = torch.futures.Future(), threading.Event()

def hook(state, bucket):
    if bucket.index() == 1:
        raise KeyError("the second bucket's")
    return first

def end():
    exiting.wait()
    time.sleep(1.0)  # being late is the fault
    print("the first bucket's collective has ended", flush=True)
    first.set_result(torch.ones(2))

model.register_comm_hook(None, hook)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
try:
    model.all_reduce()
except KeyError as error:
    print(error, flush=True)
threading.Thread(target=end, daemon=True).start()
atexit.register(exiting.set)
dist.destroy_process_group()
"""


def test_a_process_ends_after_the_collectives_that_its_hook_began() -> None:
    result = fork_script("-c", _LEFT_BEHIND)

    said = ['"the second bucket\'s"', "the first bucket's collective has ended"]
    assert (result.returncode, without_gloo_lines(result.stdout).splitlines()) == (0, said), result.stderr


def test_the_wait_for_a_collective_that_never_ends_is_as_long_as_the_timeout() -> None:
    begun = _LEFT_BEHIND.replace("timeout_seconds=60.0", "timeout_seconds=0.5")
    result = fork_script(
        "-c", begun.replace("threading.Thread(target=end, daemon=True).start()\n", ""), limit_seconds=60.0
    )

    said = ['"the second bucket\'s"']
    assert (result.returncode, without_gloo_lines(result.stdout).splitlines()) == (0, said), result.stderr


_SURVIVES = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from legacy_ddp import LegacyDistributedDataParallel, PeerLostError

store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
model = LegacyDistributedDataParallel(torch.nn.Linear(3, 1), timeout_seconds=60.0)

def hook(group, bucket):
    if rank == 1:
        raise KeyError("the hook's own")
    return default_hooks.allreduce_hook(group, bucket)

model.register_comm_hook(dist.group.WORLD, hook)  # so that the group, and its threads, live until the process ends
try:
    model(torch.ones(2, 3)).sum().backward()
    model.all_reduce()
except (KeyError, PeerLostError) as error:
    print(type(error).__name__)
finally:
    dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_survivors_of_a_hook_that_raised_end_with_code_0(tmp_path: Path) -> None:
    size = 4  # among more than three, some are not connected with the rank that ends first
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _SURVIVES, str(tmp_path / "store"), str(rank), str(size)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [(rank.returncode, without_gloo_lines(out).strip()) for rank, (out, _) in zip(ranks, outputs, strict=True)]
    lost = (0, "PeerLostError")
    assert said == [lost, (0, "KeyError"), lost, lost], outputs

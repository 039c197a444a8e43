"""Exit of a process with a pending collective of a communication hook."""

from pathlib import Path

import pytest

from tests.helpers.scripts import fork_ranks, fork_scripts
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


_NEVER_ENDS = _LEFT_BEHIND.replace("timeout_seconds=60.0", "timeout_seconds=0.5").replace(
    "threading.Thread(target=end, daemon=True).start()\n", ""
)


def test_a_process_ends_after_the_collectives_that_its_hook_began_and_waits_no_longer_than_the_timeout() -> None:
    runs = fork_scripts([("-c", _LEFT_BEHIND), ("-c", _NEVER_ENDS)], [{}, {}], limit_seconds=60.0)

    raised, ended = '"the second bucket\'s"', "the first bucket's collective has ended"
    for run, said in zip(runs, ([raised, ended], [raised]), strict=True):
        assert (run.returncode, without_gloo_lines(run.stdout).splitlines()) == (0, said), run.stderr


_SURVIVES = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from legacy_ddp import LegacyDistributedDataParallel, PeerLostError

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size)
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
    print(f"rank {rank}: {type(error).__name__}")
finally:
    dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_survivors_of_a_hook_that_raised_end_with_code_0(tmp_path: Path) -> None:
    """Among more than three ranks, some are not connected with the rank that ends first."""
    run = fork_ranks(4, "-c", _SURVIVES, str(tmp_path / "store"), environment={"GLOO_SOCKET_IFNAME": "lo"})

    said = [f"rank {rank}: {'KeyError' if rank == 1 else 'PeerLostError'}" for rank in range(4)]
    assert (run.returncode, sorted(without_gloo_lines(run.stdout).splitlines())) == (0, said), run.stderr

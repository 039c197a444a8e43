"""The host transport beside other jobs, and on hosts that leave little shared memory to programs."""

import ctypes
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.hosts import reason_not_permitted
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)

_CLONE_NEWNS, _MS_PRIVATE, _MS_REC = 0x00020000, 1 << 18, 1 << 14  # sched.h, sys/mount.h
_SHM = Path("/dev/shm")


def _means(rank: int, job: int, steps: int) -> list[tuple[str, float]]:
    net = nn.Linear(1 << 14, 1, bias=False)
    model = LegacyDistributedDataParallel(net, transport="host")
    seen = []
    for step in range(steps):
        net.weight.grad = torch.full_like(net.weight, 100.0 * job + 10.0 * rank + step)
        record = model.all_reduce()
        seen.append((record.transport, float(net.weight.grad.unique())))
    return seen


def test_two_jobs_on_one_host_stay_apart(transport: str) -> None:
    with ThreadPoolExecutor() as jobs:
        running = [jobs.submit(run_ranks, _means, 2, job, 30, fresh=True) for job in (1, 2)]
        seen = [job.result() for job in running]

    for job, ranks in enumerate(seen, 1):
        assert ranks == [[("host", 100.0 * job + 5.0 + step) for step in range(30)]] * 2


def _with_little_shared_memory(rank: int) -> tuple[int, list[str], list[tuple[str, float]]]:
    """Size of /dev/shm, the files there after the calls, and their results."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(None, b"/", None, _MS_PRIVATE | _MS_REC, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"tmpfs", str(_SHM).encode(), b"tmpfs", 0, b"size=16k") == 0, os.strerror(ctypes.get_errno())
    seen = _means(rank, 0, 3)
    return shutil.disk_usage(_SHM).total, os.listdir(_SHM), seen


@pytest.mark.skipif(os.geteuid() != 0 or reason_not_permitted() is not None, reason="mounts a file system")
def test_a_small_dev_shm_does_not_matter(transport: str) -> None:
    """Containers often have 64 MiB; here 16 KiB, a quarter of the gradients."""
    for size, files, seen in run_ranks(_with_little_shared_memory, 2, fresh=True):
        assert (size, files) == (16384, [])
        assert seen == [("host", 5.0), ("host", 6.0), ("host", 7.0)]

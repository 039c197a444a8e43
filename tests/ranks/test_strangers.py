"""The host transport beside processes of other users and other jobs, and where directories are small or not common."""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.host_sockets import changed
from tests.helpers.hosts import reason_not_permitted
from tests.helpers.rank_faults import error_after_interrupt
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import step, transport_line, wrap

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)

_CLONE_NEWNS, _MS_PRIVATE, _MS_REC = 0x00020000, 1 << 18, 1 << 14  # sched.h, sys/mount.h
_NOBODY = 65534
# Of a line of addresses it fills the queue of each; says how many connections it got, and the errors.
_FLOODER = f"""
import json, os, socket, sys
os.setgroups([]), os.setgid({_NOBODY}), os.setuid({_NOBODY})
held = []
for line in sys.stdin:
    errors = []
    for address in json.loads(line):
        while True:
            held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            try:
                held[-1].connect(address)
            except OSError as error:
                held.pop().close()
                errors.append(error.errno)
                break
    print(json.dumps([len(held), errors]), flush=True)
    held.clear()
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes the rights of another user, which only root can")


class _Flooder:
    """A process of another user."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", _FLOODER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def flood(self, addresses: Sequence[str]) -> tuple[int, list[int]]:
        """The number of connections that it got, and the error that ended each try."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(addresses), file=self._process.stdin, flush=True)
        count, errors = json.loads(self._process.stdout.readline())
        return count, errors

    def end(self) -> None:
        self._process.communicate(timeout=30.0)


def _beside_a_flooder(rank: int, group_count: int, folder: str) -> tuple[list[tuple[str, float | None]], list[Any]]:
    """Transport and mean in every group, and what the flooder got. It knows the address of the hub, and floods in the
    worst moment: the hub listens, and the other rank has not connected. ``folder``: open to all users, as are new
    files."""
    tempfile.tempdir = folder
    os.umask(0)
    flooder, got, chosen = _Flooder(), [], []

    def flood_first(connect: Any, connection: socket.socket, address: str) -> None:
        descriptor, _, name = address.rpartition("/")  # of the directory of the hub
        got.append(flooder.flood([f"{os.readlink(descriptor)}/{name}"]))
        connect(connection, address)

    with changed("connect", flood_first):
        for _ in range(group_count):
            model = wrap(process_group=dist.new_group([0, 1]), checks="off")
            mean = step(model, 1.0 + rank)
            chosen.append((model.all_reduce().transport, mean))
    flooder.end()
    return chosen, got


@as_root
def test_a_process_of_another_user_that_floods_every_meeting_keeps_no_group_from_shared_memory(transport: str) -> None:
    """The queue of an abstract name was full then, and 15 of 15 groups used gloo."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        results = run_ranks(_beside_a_flooder, 2, 15, folder, store="rank0")

    assert [chosen for chosen, _ in results] == [[("host", 1.5)] * 15] * 2
    assert results[0][1] + results[1][1] == [(0, [13])] * 15  # EACCES


def _interrupted(rank: int, folder: str) -> None:
    """Ctrl-C in the meeting of every rank."""
    tempfile.tempdir = folder
    assert error_after_interrupt(lambda: wrap(checks="off"), "await_all", here=True) == "KeyboardInterrupt"
    tempfile.tempdir = None


def test_a_meeting_that_is_interrupted_leaves_no_directory(transport: str, tmp_path: Path) -> None:
    run_ranks(_interrupted, 2, str(tmp_path), fresh=True)
    assert list(tmp_path.iterdir()) == []


def _mount(place: str, options: bytes | None = None) -> None:
    """Give this process files of its own: an empty folder in ``place``."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(None, b"/", None, _MS_PRIVATE | _MS_REC, None),
        libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, options),
    ):
        assert not failed, os.strerror(ctypes.get_errno())


def _in_containers(rank: int, common: str | None) -> tuple[str, float | None, str]:
    """Rank 1 has other files than rank 0, and the same network. ``common``: a directory of both."""
    if rank == 1:
        _mount(tempfile.gettempdir())
    tempfile.tempdir = common or tempfile.tempdir
    model = wrap()
    mean = step(model, 1.0 + rank)
    return model.all_reduce().transport, mean, transport_line(model)


mounting = pytest.mark.skipif(os.geteuid() != 0 or reason_not_permitted() is not None, reason="mounts a file system")


@mounting
def test_containers_with_one_network_and_a_common_directory_for_temporary_files_share_memory(transport: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as common:
        assert run_ranks(_in_containers, 2, common, store="rank0") == [("host", 1.5, "transport: host")] * 2


@mounting
def test_containers_with_one_network_and_other_files_use_gloo_and_say_why(transport: str) -> None:
    results = run_ranks(_in_containers, 2, None, store="rank0")  # a file of a store would be hidden, too

    assert results == [results[0]] * 2
    transport, mean, line = results[0]
    assert (transport, mean) == ("gloo", 1.5)
    assert re.match(r"transport: gloo \(rank [01]: no connection on the host \(OSError: ", line)
    assert re.search(r"of rank [01] is not visible here; containers of one network need a common directory", line)


def _means(rank: int, job: int, steps: int) -> list[tuple[str, float]]:
    net = nn.Linear(1 << 14, 1, bias=False)
    model = LegacyDistributedDataParallel(net, transport="host")
    seen = []
    for number in range(steps):
        net.weight.grad = torch.full_like(net.weight, 100.0 * job + 10.0 * rank + number)
        record = model.all_reduce()
        seen.append((record.transport, float(net.weight.grad.unique())))
    return seen


def test_two_jobs_on_one_host_stay_apart(transport: str) -> None:
    with ThreadPoolExecutor() as jobs:
        running = [jobs.submit(run_ranks, _means, 2, job, 30, fresh=True) for job in (1, 2)]
        seen = [job.result() for job in running]

    for job, ranks in enumerate(seen, 1):
        assert ranks == [[("host", 100.0 * job + 5.0 + number) for number in range(30)]] * 2


def _with_little_shared_memory(rank: int) -> tuple[int, list[str], list[tuple[str, float]]]:
    """Size of /dev/shm, the files there after the calls, and their results."""
    _mount("/dev/shm", b"size=16k")
    seen = _means(rank, 0, 3)
    return shutil.disk_usage("/dev/shm").total, os.listdir("/dev/shm"), seen


@mounting
def test_a_small_dev_shm_does_not_matter(transport: str) -> None:
    """Containers often have 64 MiB; here 16 KiB, a quarter of the gradients."""
    expected = (16384, [], [("host", 5.0), ("host", 6.0), ("host", 7.0)])

    assert run_ranks(_with_little_shared_memory, 2, fresh=True) == [expected] * 2

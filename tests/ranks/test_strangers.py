"""The sockets of a host beside processes of other users, without a common directory, and what is left of them."""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.host_sockets import changed
from tests.helpers.hosts import reason_not_permitted
from tests.helpers.rank_faults import error_after_interrupt
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import step, wrap

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


def _in_containers(rank: int, common: str | None) -> tuple[str, float | None, str]:
    """Rank 1 has other files than rank 0, and the same network. ``common``: a directory of both."""
    if rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        assert libc.mount(None, b"/", None, _MS_PRIVATE | _MS_REC, None) == 0, os.strerror(ctypes.get_errno())
        place = tempfile.gettempdir().encode()
        assert libc.mount(b"tmpfs", place, b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())
    tempfile.tempdir = common or tempfile.tempdir
    model = wrap()
    mean = step(model, 1.0 + rank)
    (line,) = [text for text in repr(model).splitlines() if "transport:" in text]
    return model.all_reduce().transport, mean, line.strip()


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

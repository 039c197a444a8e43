"""The hosts of one machine are as far apart as hosts are, and nothing is left of them afterwards.

Run as a script, this file is one rank: `test_hosts.py FUNCTION FOLDER`.
"""

import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.hosts import Host, HostFailure, Hosts, reason_not_permitted
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.skipif(reason_not_permitted() is not None, reason=str(reason_not_permitted()))
LIMIT_SECONDS = 120.0
SLEEP = "import time; print(flush=True); time.sleep(60)"
HOLD = """
import sys
from tests.helpers.hosts import Hosts
with Hosts(2) as hosts:
    job = hosts.torchrun("tests/helpers/test_hosts.py", "_hang", sys.argv[1])
    job.wait(120.0)
"""


def _await_ranks(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all((folder / f"rank-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _raise_on_rank_0_hang_on_rank_1(folder: Path) -> None:
    print("rank", dist.get_rank(), "is here", flush=True)
    if dist.get_rank() == 0:
        (folder / "rank-0").touch()
        raise ValueError("the planted error")
    _hang(folder)


def _hang(folder: Path) -> None:
    (folder / f"rank-{dist.get_rank()}").touch()
    threading.Event().wait()


def _sleep_on(host: Host) -> "subprocess.Popen[str]":
    """A process that is there, and ends with its host."""
    sleeper = subprocess.Popen(host.command(sys.executable, "-c", SLEEP), stdout=subprocess.PIPE, text=True)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    return sleeper


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of every process that a test starts, and of no others."""
    mark = f"planted-{uuid.uuid4()}"
    monkeypatch.setenv("LEFT_OVER", mark)
    return mark


def _with_mark(mark: str) -> dict[int, bytes]:
    """Command lines of the processes that were started with ``mark`` in their environment, or whose parent was."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        # A process may end between listing and reading; others are of another user.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if mark.encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes()
    return found


def test_a_host_sees_its_own_name_network_and_processes_only() -> None:
    with Hosts(2) as hosts:
        names = [hosts[index].run("uname", "-n").strip() for index in range(2)]
        networks = {hosts[index].run("readlink", "/proc/self/ns/net") for index in range(2)}
        sleepers = [_sleep_on(hosts[index]) for index in range(2)]
        seen = [hosts[index].run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr -d '\\0'") for index in range(2)]
        addresses = [hosts[index].run("ip", "-br", "address").split() for index in range(2)]
        looked_up = hosts[0].run("getent", "hosts", "host-1").split()

    assert names == hosts.names == ["host-0", "host-1"]
    assert len(networks | {os.readlink("/proc/self/ns/net") + "\n"}) == 3
    assert [text.count("time.sleep(60)") for text in seen] == [1, 1]
    assert [f"{address}/24" in found for address, found in zip(hosts.addresses, addresses, strict=True)] == [True, True]
    assert looked_up == [hosts.addresses[1], "host-1"]
    for sleeper in sleepers:
        sleeper.communicate()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_hanging_host_is_named_and_its_processes_killed(tmp_path: Path, mark: str) -> None:
    with Hosts(2) as hosts:
        job = hosts.torchrun(__file__, "_raise_on_rank_0_hang_on_rank_1", str(tmp_path))
        _await_ranks(tmp_path)
        with pytest.raises(HostFailure, match=r"host-1 did not end within 2\.0 s(.|\n)*rank 1 is here"):
            job.wait(2.0)
        left = list(_with_mark(mark).values())

    assert not [command for command in left if b"hang_on_rank_1" in command]


def test_nothing_is_left_after_the_block(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with suppress(ZeroDivisionError), Hosts(2) as hosts:
        sleeper = _sleep_on(hosts[0])
        inside = len(_with_mark(mark))
        _ = 1 / 0
    sleeper.communicate()

    assert inside >= 8  # three holders with their launchers, and the sleeper with its own
    assert _with_mark(mark) == {}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HostFailure):
        hosts[0].run("true")


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_runs_on_when_the_process_is_killed(mark: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # files are left there by a killed process
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, env=environment)
    _await_ranks(tmp_path)
    handles = [os.pidfd_open(pid) for pid in _with_mark(mark)]
    owner.kill()
    owner.wait()

    assert len(handles) >= 11  # the owner, three holders with their launchers, two torchruns, two ranks
    for handle in handles:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        assert ended.poll(LIMIT_SECONDS * 1000)
        os.close(handle)
    assert _with_mark(mark) == {}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        globals()[sys.argv[1]](Path(sys.argv[2]))
    finally:
        dist.destroy_process_group()

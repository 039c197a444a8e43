"""Are the hosts of one machine as far apart as hosts are, and is nothing left of them afterwards?

Run as a script, this file is one rank: `test_hosts.py FUNCTION FOLDER`.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import processes
from tests.helpers.hosts import Host, HostFailure, Hosts, JobFailure, reason_not_permitted
from tests.helpers.paths import ROOT
from tests.helpers.scripts import heed_ctrl_c

needs_hosts = pytest.mark.skipif(reason_not_permitted() is not None, reason=str(reason_not_permitted()))
LIMIT_SECONDS = 120.0
SERVE = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.close()  # the client may now stop its clock
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])).close()
except TimeoutError:
    print("timed out")
else:
    print("reached")
"""
HOLD = """
import sys
from tests.helpers.hosts import Hosts
with Hosts(2) as hosts:
    job = hosts.torchrun("tests/helpers/test_hosts.py", "_hang", sys.argv[1])
    job.wait(120.0)
"""


def _write(folder: Path, facts: Any) -> None:
    path = folder / f"rank-{os.environ['RANK']}"
    path.with_suffix(".part").write_text(json.dumps(facts))
    path.with_suffix(".part").rename(path)


def _await_ranks(folder: Path, world_size: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all((folder / f"rank-{rank}").exists() for rank in range(world_size)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _raise_on_rank_0_hang_on_rank_1(folder: Path) -> None:
    print("rank", dist.get_rank(), "is here", flush=True)
    _write(folder, os.getpid())
    if dist.get_rank() == 0:
        raise ValueError("the planted error")
    threading.Event().wait()


def _hang(folder: Path) -> None:
    _write(folder, os.getpid())
    threading.Event().wait()


def _start(host: Host, script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(host.command(sys.executable, "-c", script, *arguments), stdout=subprocess.PIPE, text=True)


def _serve(host: Host) -> "subprocess.Popen[str]":
    server = _start(host, SERVE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def _reach(source: Host, target: Host, seconds: float) -> str:
    return source.run(sys.executable, "-c", REACH, target.address, str(seconds)).strip()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of every process that a test starts, and of no others."""
    mark = f"planted-{uuid.uuid4()}"
    monkeypatch.setenv("LEFT_OVER", mark)
    return mark


@needs_hosts
def test_a_host_sees_its_own_name_network_and_processes_only() -> None:
    with Hosts(2) as hosts:
        names = [hosts[index].run("uname", "-n").strip() for index in range(2)]
        networks = {hosts[index].run("readlink", "/proc/self/ns/net") for index in range(2)}
        sleepers = [_start(hosts[index], "import time; print(flush=True); time.sleep(60)") for index in range(2)]
        for sleeper in sleepers:
            assert sleeper.stdout is not None
            sleeper.stdout.readline()
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


@needs_hosts
@pytest.mark.slow
def test_a_hanging_host_is_named_and_its_processes_killed(tmp_path: Path, mark: str) -> None:
    with Hosts(2) as hosts:
        job = hosts.torchrun(__file__, "_raise_on_rank_0_hang_on_rank_1", str(tmp_path))
        _await_ranks(tmp_path, 2)
        with pytest.raises(JobFailure, match=r"host-1 did not end within 2\.0 s") as caught:
            job.wait(2.0)
        left = list(processes.with_variable(mark).values())

    assert "host-1" in caught.value.names
    assert "rank 1 is here" in caught.value.results[1].text
    assert not [command for command in left if b"hang_on_rank_1" in command]


@needs_hosts
def test_a_cut_host_is_out_of_reach_until_it_is_mended() -> None:
    with Hosts(3) as hosts:
        servers = [_serve(hosts[index]) for index in range(2)]
        assert _reach(hosts[0], hosts[1], LIMIT_SECONDS) == "reached"

        hosts.cut(1)
        assert _reach(hosts[0], hosts[1], 0.5) == "timed out"
        assert _reach(hosts[1], hosts[0], 0.5) == "timed out"
        assert _reach(hosts[2], hosts[0], LIMIT_SECONDS) == "reached"
        assert "LOWER_UP" in hosts[1].run("ip", "link", "show", "eth0")

        hosts.mend(1)
        assert _reach(hosts[0], hosts[1], LIMIT_SECONDS) == "reached"
    for server in servers:
        server.communicate()


@needs_hosts
@pytest.mark.parametrize("how", ["normally", "by an exception"])
def test_nothing_is_left_after_the_block(how: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    servers = []
    with contextlib.suppress(ZeroDivisionError), Hosts(2) as hosts:
        servers.append(_serve(hosts[0]))
        inside = len(processes.with_variable(mark))
        if how == "by an exception":
            _ = 1 / 0
    for server in servers:
        server.communicate()

    assert inside >= 8  # three holders with their launchers, and the server with its own
    assert processes.with_variable(mark) == {}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HostFailure):
        hosts[0].run("true")


@needs_hosts
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_runs_on_when_the_process_is_interrupted_or_killed(
    how: signal.Signals, mark: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # files are left there by a killed process
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    owner = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    )
    _await_ranks(tmp_path, 2)
    handles = [os.pidfd_open(pid) for pid in processes.with_variable(mark)]
    owner.send_signal(how)
    owner.communicate(timeout=LIMIT_SECONDS / 2)  # its job would end by itself at the limit

    assert len(handles) >= 11  # the owner, three holders with their launchers, two torchruns, two ranks
    for handle in handles:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        assert ended.poll(LIMIT_SECONDS * 1000)
        os.close(handle)
    assert processes.with_variable(mark) == {}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        globals()[sys.argv[1]](Path(sys.argv[2]))
    finally:
        dist.destroy_process_group()

"""The hosts of one machine are as far apart as hosts are, and nothing is left of them afterwards.

Run as a script, this file is a rank of a job in which rank 0 raises and rank 1 hangs: `test_hosts.py FOLDER`.
"""

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.hosts import Host, HostFailure, Hosts
from tests.helpers.watching import wait_for

pytestmark = pytest.mark.hosts
SLEEP = "import time; print(flush=True); time.sleep(60)"


def _sleep_on(host: Host) -> "subprocess.Popen[str]":
    """A process that is there, and ends with its host."""
    sleeper = subprocess.Popen(host.command(sys.executable, "-c", SLEEP), stdout=subprocess.PIPE, text=True)
    sleeper.stdout.readline()
    return sleeper


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
def test_a_hanging_host_is_named_and_its_processes_killed(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        job = hosts.torchrun(__file__, str(tmp_path))
        wait_for(lambda: len([*tmp_path.iterdir()]) == 2)
        with pytest.raises(HostFailure, match=r"host-1 did not end within 2\.0 s(.|\n)*rank 1 is here"):
            job.wait(2.0)
        assert "test_hosts" not in hosts[1].run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr -d '\\0'")


def test_nothing_is_left_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with suppress(ZeroDivisionError), Hosts(2) as hosts:
        sleeper = _sleep_on(hosts[0])
        _ = 1 / 0
    sleeper.communicate()  # it has ended

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HostFailure):
        hosts[0].run("true")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("rank", dist.get_rank(), "is here", flush=True)
    Path(sys.argv[1], f"rank-{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        raise ValueError("the planted error")
    threading.Event().wait()

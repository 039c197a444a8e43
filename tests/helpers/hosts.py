"""Hosts on one machine, without touching its network: each has a network, a host name and processes of its own.

The hosts are joined by a bridge, which has a set of namespaces of its own: the switch. What they
still share: files (but /etc/hosts), the boot id, CPUs and clocks, and /sys, where /sys/class/net
shows the machine's own interfaces.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

from legacy_ddp._ranks import first_meeting
from tests.helpers.paths import ROOT
from tests.helpers.processes import slowness

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child")
# Who is not root builds everything in one user namespace, in which it is.
_AS_ROOT = ("--user", "--map-root-user") if os.geteuid() else ()
# Runs as process 1 of its host: when it ends, the kernel kills all others there. It must also bury
# orphans, which ignoring SIGCHLD does.
_HOLD = (
    "import signal, socket, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    "socket.sethostname(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
)
_END_SECONDS = 10.0


class HostFailure(AssertionError):  # noqa: N818 - pytest shows the name: what failed is the host, not the helper
    """Says which hosts failed and how."""


@cache
def reason_not_permitted() -> str | None:
    """Why no hosts can be built here, or ``None``; found by trying what is needed from the kernel."""
    if sys.platform != "linux":
        return f"hosts are namespaces of the Linux kernel, and this is {sys.platform}"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    trial = (
        "ip link add name switch type bridge && ip link add name port type veth peer name peer && "
        "tc qdisc add dev port root tbf rate 1mbit burst 64kb latency 50ms"
    )
    tried = subprocess.run(
        [*_UNSHARE, *_AS_ROOT, "sh", "-c", trial], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    said = tried.stderr.strip() or f"exit code {tried.returncode}"
    return f"namespaces, bridge or tbf not permitted here: {said}" if tried.returncode else None


class Host:
    """One set of namespaces and the process that holds it."""

    def __init__(self, name: str, address: str = "", switch: "Host | None" = None) -> None:
        self.name = name
        self.address = address
        entered = () if switch is None or not _AS_ROOT else switch._enter()
        self._holder = subprocess.Popen(
            [*entered, *_UNSHARE, *(() if entered else _AS_ROOT), sys.executable, "-IS", "-c", _HOLD, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then clean up
        )
        if (said := self._holder.stdout.readline()) != "ready\n":
            said += self._holder.communicate()[0]
            raise HostFailure(f"{name} did not start: {said}")

    @property
    def pid(self) -> int:
        """The process outside that is already in all namespaces but that of processes."""
        return self._holder.pid

    def command(self, *command: str) -> list[str]:
        """The same command, to be run on this host; killing what it starts does not kill the command."""
        processes = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        # Without --wd, the working directory is lost on entering the mounts.
        return [*self._enter(), "--net", "--uts", "--ipc", "--mount", "--wd", processes, *command]

    def run(self, *command: str, timeout_seconds: float = 60.0) -> str:
        """What a command on this host writes to stdout; a failing one raises :class:`HostFailure`."""
        return self._run(self.command(*command), timeout_seconds)

    def configure(self, *command: str) -> None:
        """Run ``ip`` or ``tc`` on this host's network, process ids being those outside."""
        self._run([*self._enter(), "--net", *command], _END_SECONDS)

    def close(self) -> None:
        """End the host: every process there is dead afterwards, the kernel takes the interfaces away."""
        with self._holder:
            try:
                self._holder.communicate(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._holder.kill()  # --kill-child passes it on

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *(["--user", "--preserve-credentials"] if _AS_ROOT else [])]

    def _run(self, command: list[str], timeout_seconds: float) -> str:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
        if done.returncode:
            said = f"{done.stderr}{done.stdout}"
            raise HostFailure(f"{' '.join(command)} on {self.name}: exit code {done.returncode}: {said}")
        return done.stdout


INTERFACE = "eth0"
# From the range for benchmarks of networks (RFC 2544): no name server is in it, so that looking up
# what /etc/hosts does not know fails at once and does not wait for an answer.
_ADDRESS = "198.18.0.{}"
# What may leave at once, and how long frames may queue before they are dropped. Fast links need a larger burst: with
# 64 KiB at 2 Gbit/s, frames wait for timers, and an all_reduce gets a third of the rate.
_LEAST_BURST_BYTES, _BURST_SECONDS, _QUEUE = 2**16, 2e-3, "50ms"


class Result(NamedTuple):
    """How torchrun ended on one host: exit code (below 0: a signal), and stdout and stderr in one text."""

    name: str
    exit_code: int
    text: str


class Job:
    """One torchrun per host, all part of one job."""

    def __init__(self) -> None:
        self._started: list[tuple[Host, subprocess.Popen[bytes], Path]] = []

    def start(self, host: Host, command: list[str], environment: Mapping[str, str], output: Path) -> None:
        """Start torchrun on one host; it writes to the file ``output``."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                host.command(*command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((host, process, output))

    def wait(self, timeout_seconds: float, *, check: bool = True) -> list[Result]:
        """How the job ended on each host. Nothing of it runs afterwards, nor anything else on its hosts.

        Raises:
            HostFailure: a host did not end in time, or, with ``check``, had an exit code other than 0.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_seconds * slowness()
        try:
            for _, process, _ in self._started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            late = [host.name for host, process, _ in self._started if process.poll() is None]
        finally:
            self.close()
        results = [
            Result(host.name, process.returncode, output.read_text(errors="replace"))
            for host, process, output in self._started
        ]
        failed = [r.name for r in results if check and r.exit_code and r.name not in late]
        if late or failed:
            # Failures first: torchrun where all went well waits 300 s for one that failed elsewhere.
            faults = [f"{', '.join(failed)} failed"] if failed else []
            faults += [f"{', '.join(late)} did not end within {timeout_seconds} s"] if late else []
            texts = [f"--- {r.name}, exit code {r.exit_code}, ends with\n{r.text[-4000:]}" for r in results]
            raise HostFailure("\n".join(["; ".join(faults), *texts]))
        return results

    def close(self) -> None:
        """Kill what still runs."""
        for host, process, _ in self._started:
            process.kill()  # first, because it may be stopped and is what its child waits for to be gone
            process.wait()
            # All but the one that holds the host, until they are gone: kill fails when there is none.
            host.run("sh", "-c", "while kill -KILL -1 2>/dev/null; do sleep 0.01; done")


class Hosts:
    """2 to 8 hosts, ``hosts[0]`` and so on; alive and connected inside the ``with`` block.

    ``rate_mbit`` limits what each host sends and what each receives, in 10^6 bits of Ethernet frames
    per second.
    """

    def __init__(self, n: int, *, rate_mbit: float | None = None) -> None:
        self._rate_mbit = rate_mbit
        self.names = [f"host-{index}" for index in range(n)]
        self.addresses = [_ADDRESS.format(index + 1) for index in range(n)]
        self._hosts: list[Host] = []
        self._ports = count(29500)  # one per job, so that a job cannot meet what is left of the one before
        self._cleanup = ExitStack()  # filled on entering

    def __enter__(self) -> "Hosts":
        with ExitStack() as cleanup:
            self._folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))
            # Torch's store asks for the name of an IPv4 address written as IPv6, and warns if there is none.
            names = [
                f"{address} {name}\n::ffff:{address} {name}.mapped\n"
                for address, name in zip(self.addresses, self.names, strict=True)
            ]
            Path(self._folder, "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
            self.switch = cleanup.enter_context(closing(Host("switch")))
            self.switch.configure("ip", "link", "add", "name", "switch", "up", "type", "bridge")
            for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
                host = cleanup.enter_context(closing(Host(name, address, self.switch)))
                self._hosts.append(host)
                self._connect(host, _port(index))
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def torchrun(
        self,
        script: Path | str,
        *arguments: str,
        nproc_per_node: int = 1,
        options: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Job:
        """Start the same job on all hosts, rank 0 on the first; ``environment`` is added to this process's.

        ``options`` are more of torchrun's own, on every host.
        """
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self)}"]
        launcher += [f"--nproc-per-node={nproc_per_node}", f"--master-addr={self.addresses[0]}"]
        port = next(self._ports)
        launcher += [f"--master-port={port}", *options]
        ours = {f"{library}_SOCKET_IFNAME": INTERFACE for library in ("GLOO", "NCCL", "TP")}
        ours |= {"OMP_NUM_THREADS": "1", "TMPDIR": self._folder}
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, **ours, **environment}
        job = self._cleanup.enter_context(closing(Job()))
        for index, host in enumerate(self._hosts):
            command = [*launcher, f"--node-rank={index}", f"--local-addr={host.address}", str(script), *arguments]
            job.start(host, command, variables, Path(self._folder, f"output-{port}-{host.name}"))
        return job

    def cut(self, index: int) -> None:
        """Take a host off the switch: what it sends and what is sent to it is lost, and nobody is told."""
        # Not "down": the host would lose its carrier, which it does not when a cable further away is cut.
        self.switch.configure("ip", "link", "set", "dev", _port(index), "nomaster")

    def _connect(self, host: Host, port: str) -> None:
        peer = ("peer", "name", INTERFACE, "netns", str(host.pid))
        host.run("mount", "--bind", f"{self._folder}/hosts", "/etc/hosts")
        self.switch.configure("ip", "link", "add", "name", port, "type", "veth", *peer)
        self.switch.configure("ip", "link", "set", "dev", port, "up", "master", "switch")
        host.configure("ip", "link", "set", "dev", "lo", "up")
        host.configure("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
        host.configure("ip", "link", "set", "dev", INTERFACE, "up")
        if self._rate_mbit is not None:
            for side, device in ((host, INTERFACE), (self.switch, port)):
                burst_bytes = max(_LEAST_BURST_BYTES, int(self._rate_mbit * 1e6 / 8 * _BURST_SECONDS))
                limit = ("rate", f"{self._rate_mbit}mbit", "burst", str(burst_bytes), "latency", _QUEUE)
                side.configure("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)


def _port(index: int) -> str:
    return f"port{index}"


def leave_facts(path: Path, facts: Any) -> None:
    """Write a file that is there with all of its contents, or not at all."""
    path.with_suffix(".part").write_text(json.dumps(facts))
    path.with_suffix(".part").rename(path)


def on_host(name: str) -> AbstractContextManager[object]:
    """Without namespaces: the card of this rank tells of a host ``name``, in the first call on a group in the block."""
    own_card = first_meeting.own_card
    return patch.object(first_meeting, "own_card", lambda: {**own_card(), "boot": name})


def hubs_below_a_hub(arity: int) -> AbstractContextManager[object]:
    """So many, in the first call on a group in the block."""
    return patch.object(first_meeting, "ARITY", arity)


@contextmanager
def arriving_in_order(arity: int = first_meeting.ARITY) -> Iterator[None]:
    """In the first call on a group in the block, the ranks arrive in their order: the lowest rank of each host is its
    hub, and rank 0 the root. ``arity``: the hubs below a hub."""
    join = first_meeting._Meeting.join_host

    def join_in_order(self: first_meeting._Meeting) -> None:
        if self._rank:
            self._read(f"joined/{self._rank - 1}", f"rank {self._rank - 1}")
        join(self)
        self._store.set(f"joined/{self._rank}", "{}")

    with patch.object(first_meeting._Meeting, "join_host", join_in_order), hubs_below_a_hub(arity):
        yield

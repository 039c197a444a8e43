"""How does a test get a host of its own: network, host name and processes that nobody else sees?

A host is a set of Linux namespaces. They have no names here: a set lives as long as one process, its
holder, and the holder until its standard input closes. So all of it, processes included, is gone
when this process is, however it ends.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

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
    """Says which hosts failed and how; ``names`` holds them."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


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
        assert self._holder.stdout is not None
        if (said := self._holder.stdout.readline()) != "ready\n":
            said += self._holder.communicate()[0]
            raise HostFailure(f"{name} did not start: {said}", [name])

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

    def kill_all(self) -> None:
        """Kill every process on this host but the one that holds it; returns when they are gone."""
        self.run("sh", "-c", "while kill -KILL -1 2>/dev/null; do sleep 0.01; done")  # fails when there is none

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
            message = f"{' '.join(command)} on {self.name}: exit code {done.returncode}: {done.stderr}{done.stdout}"
            raise HostFailure(message, [self.name])
        return done.stdout

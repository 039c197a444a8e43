"""State of processes on this machine, from /proc."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RUNNING, STOPPED, TRACED, DEAD, UNKNOWN = "running", "stopped", "held by a debugger", "dead", ""
_STATES = {"T": STOPPED, "t": TRACED, "Z": DEAD, "X": DEAD}


@dataclass(frozen=True)
class Identity:
    """A process. ``machine``: equal for processes that can see each other in /proc.

    ``started``: the start time; a later process may get the same pid.
    """

    host: str
    pid: int
    started: str
    machine: str


def own_identity() -> Identity:
    """The identity of this process."""
    return Identity(socket.gethostname(), os.getpid(), _started(os.getpid()), _machine())


def state_of(process: Identity) -> str:
    """``running``, ``stopped``, ``held by a debugger`` or ``dead``; empty if this process cannot see ``process``."""
    if not process.machine or process.machine != _machine():
        return UNKNOWN
    try:
        fields = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:  # a limit of this process, not the state of the other: no more files can be opened
        return UNKNOWN
    if fields[_STARTED] != process.started:
        return DEAD
    return _STATES.get(fields[_STATE], RUNNING)


def moved_bytes() -> int:
    """Bytes read and written by this process through files and pipes until now; 0 without /proc."""
    try:
        counts = dict(line.split(":") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return int(counts["rchar"]) + int(counts["wchar"])


# Fields of /proc/<pid>/stat behind the command's name, see proc(5): state is field 3, start time field 22.
_STATE, _STARTED = 0, 19


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _started(pid: int) -> str:
    try:
        return _stat(pid)[_STARTED]
    except OSError:
        return ""


@cache
def _machine() -> str:
    """Boot and pid namespace: containers on one machine do not see each other's processes. Empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""

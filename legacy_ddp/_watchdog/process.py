"""The processes of ranks as the kernel shows them: identity, state, and the time for which they waited."""

import os
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from legacy_ddp._text import printable

RUNNING, STOPPED, TRACED, DEAD, UNKNOWN = "running", "stopped", "held by a debugger", "dead", ""
ENDING = "ending"  # its sockets may be closed, and its launcher does not know of the end yet
_DISK_WAIT = "D"
_STATES = {"T": STOPPED, "t": TRACED, "Z": DEAD, "X": DEAD}
# Fields of /proc/<pid>/stat behind the name of the command, see proc(5): field 3, field 9, and field 22.
_STATE, _FLAGS, _STARTED = 0, 6, 19
_PF_EXITING = 0x4  # Linux, sched.h


@dataclass(frozen=True)
class Identity:
    """A process. ``machine``: equal for processes that can see each other in /proc, if nothing hides them.

    ``started``: the start time; a later process may get the same pid. ``network``: equal for processes with the same
    loopback interface.
    """

    host: str
    pid: int
    started: str
    machine: str
    network: str = ""


def own_identity() -> Identity:
    """The identity of this process."""
    return Identity(printable(socket.gethostname()), os.getpid(), _started(os.getpid()), _machine(), _network())


def visible_state(process: Identity) -> str:
    """``running``, ``stopped``, ``held by a debugger``, ``ending`` or ``dead``; empty where /proc does not show it.

    "dead" is not certain: there is no entry of a process of another user that is hidden (``hidepid``), and a process
    of another time namespace has another start time here. ``state_of`` of ``client`` is certain.
    """
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
    state = _STATES.get(fields[_STATE], RUNNING)
    return ENDING if state == RUNNING and int(fields[_FLAGS]) & _PF_EXITING else state


def moved_bytes() -> int:
    """Bytes read and written by this process through files and pipes until now; 0 without /proc."""
    try:
        counts = dict(line.split(":") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return int(counts["rchar"]) + int(counts["wchar"])


def busy_seconds() -> float:
    """Seconds until now in which this process computed, or in which its main thread waited for a processor.

    On a crowded machine a thread that computes gets a small share of a processor.
    """
    return time.process_time() + _queued_seconds(Path("/proc/self/schedstat"))


def waits_for_disk() -> bool:
    """Whether the main thread waits in the kernel, as for a disk. False without /proc."""
    try:
        return _stat(os.getpid())[_STATE] == _DISK_WAIT
    except OSError:
        return False


def queued_seconds(process: Identity) -> float:
    """Seconds until now in which the threads of the process, together, were ready to run and waited for a processor.

    0 if this process cannot see ``process``, and after its end.
    """
    if not process.machine or process.machine != _machine():
        return 0.0
    try:
        with os.scandir(f"/proc/{process.pid}/task") as entries:
            threads = [entry.path for entry in entries]
    except OSError:  # the process has ended, perhaps a moment ago
        return 0.0
    return sum(_queued_seconds(Path(thread, "schedstat")) for thread in threads)


def _queued_seconds(schedstat: Path) -> float:
    """The second number of schedstat: the time in which a thread was ready to run and did not run."""
    try:
        return int(schedstat.read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):  # the thread has ended, or Linux does not count
        return 0.0


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
    """Boot and pid namespace: containers on one machine do not see each other's processes. Empty without /proc.

    Also empty if /proc belongs to another pid namespace: the numbers in it are of other processes.
    """
    try:
        is_own = os.readlink("/proc/self") == str(os.getpid())
        return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}" if is_own else ""
    except OSError:
        return ""


def _network() -> str:
    """Boot and network namespace; without /proc the name of the host."""
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


@cache
def boot_id() -> str:
    """The id of the present start of the kernel; OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

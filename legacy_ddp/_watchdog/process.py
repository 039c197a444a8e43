"""Processes as the kernel shows them, and phase and stack of the training thread of this process."""

import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from legacy_ddp._log import outward
from legacy_ddp._steps.policy import closure_owner, local_work_text
from legacy_ddp._text import printable, shorten

RUNNING, STOPPED, TRACED, DEAD, UNKNOWN = "running", "stopped", "held by a debugger", "dead", ""
ENDING = "ending"  # its sockets may be closed, and its launcher does not yet know of the end
_DISK_WAIT = "D"
_STATES = {"T": STOPPED, "t": TRACED, "Z": DEAD, "X": DEAD}
# Fields of /proc/<pid>/stat behind the name of the command, see proc(5): field 3, field 9, and field 22.
_STATE, _FLAGS, _STARTED = 0, 6, 19
_PF_EXITING = 0x4  # Linux, sched.h


@dataclass(frozen=True)
class Identity:
    """A process."""

    host: str
    pid: int
    started: str  # the start time: a later process may get the same pid
    machine: str  # equal for processes that see each other in /proc, if nothing hides them
    network: str = ""  # equal for processes with the same loopback interface


def own_identity() -> Identity:
    return Identity(printable(socket.gethostname()), os.getpid(), _started(os.getpid()), _machine(), _network())


def visible_state(process: Identity) -> str:
    """``running``, ``stopped``, ``held by a debugger``, ``ending`` or ``dead``; empty if /proc does not show it.

    "dead" is not certain: /proc may hide processes of other users (``hidepid``), and a process in another time
    namespace has another start time here. ``state_of()`` in ``client`` is certain.
    """
    if not process.machine or process.machine != _machine():
        return UNKNOWN
    try:
        fields = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:  # this process cannot open more files
        return UNKNOWN
    if fields[_STARTED] != process.started:
        return DEAD
    state = _STATES.get(fields[_STATE], RUNNING)
    return ENDING if state == RUNNING and int(fields[_FLAGS]) & _PF_EXITING else state


def moved_bytes() -> int:
    """Bytes that this process has read and written through files and pipes; 0 without /proc."""
    try:
        counts = dict(line.split(":") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return int(counts["rchar"]) + int(counts["wchar"])


def busy_seconds() -> float:
    """Seconds in which this process computed, or its main thread waited for a processor."""
    # The wait counts, because on a crowded machine a thread that computes gets a small share of a processor.
    return time.process_time() + _queued_seconds(Path("/proc/self/schedstat"))


def waits_for_disk() -> bool:
    """Whether the main thread waits in the kernel, for example for a disk. False without /proc."""
    try:
        return _stat(os.getpid())[_STATE] == _DISK_WAIT
    except OSError:
        return False


def queued_seconds(process: Identity) -> float:
    """Seconds in which the threads of ``process``, together, waited for a processor; 0 if it has ended or is hidden."""
    if not process.machine or process.machine != _machine():
        return 0.0
    try:
        with os.scandir(f"/proc/{process.pid}/task") as entries:
            threads = [entry.path for entry in entries]
    except OSError:  # the process has ended, perhaps a moment ago
        return 0.0
    return sum(_queued_seconds(Path(thread, "schedstat")) for thread in threads)


def _queued_seconds(schedstat: Path) -> float:
    try:
        # The second number: the time in which a thread was ready to run and did not run.
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
    """Boot and pid namespace: containers on one machine do not see each other's processes. Empty without /proc."""
    try:
        # False if /proc belongs to another pid namespace: its numbers are of other processes.
        is_own = os.readlink("/proc/self") == str(os.getpid())
        return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}" if is_own else ""
    except OSError:
        return ""


def _network() -> str:
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


@cache
def boot_id() -> str:
    """The id of the present start of the kernel; OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


FORWARD, BACKWARD, DEBUGGER, USER_CODE = "forward", "backward", "debugger", "user code"
AT_END = "process exit"  # the script has returned, or Python displays its error
OUT_OF_DATA = "join, out of data"
HOOK = "hook"  # the phase of a call that runs the user's communication hook
RUN = "run"  # the phase of a cross-check that runs the user's function
_MAX_FRAMES, _MAX_FRAME_COLUMNS = 12, 200
_PACKAGE = str(Path(__file__).parents[1])
# Files of this package with frames around user code: the step guard calls closures, a strategy calls the training loop.
AROUND_USER_CODE = (f"{_PACKAGE}/_steps/guard.py", f"{_PACKAGE}/lightning.py")
_PATHS = sysconfig.get_paths()
LIBRARIES = (_PACKAGE, _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], "<frozen")


class ActivityMark(NamedTuple):
    """The phase entered last."""

    call: str  # empty outside of calls
    phase: str
    since: float
    thread: int  # its ident
    changes: int  # the number of phases entered


new_mark = tuple.__new__  # the constructor of a NamedTuple is a Python function, and takes three times as long


@dataclass(frozen=True)
class Sample:
    """Phase and stack of a process at one moment."""

    call: str
    phase: str
    age_seconds: float
    changes: int  # the number of phases entered
    stack: tuple[str, ...]  # innermost frame last
    line: str = ""  # the innermost frame in user code
    closure: str = ""  # the optimizer whose closure runs, see closure_owner()
    local_work: str = ""  # open no_sync() blocks, and calls inside them, as text


class Activity:
    """The current phase of one thread.

    To enter a phase costs the thread a microsecond. A sample costs it nothing: the thread that samples does the work.
    """

    def __init__(self) -> None:
        self.mark = ActivityMark("", USER_CODE, time.monotonic(), threading.main_thread().ident or 0, 0)

    def enter(self, phase: str, call: str = "") -> ActivityMark:
        """Record the phase of the calling thread. Returns the previous mark."""
        before = self.mark
        self.mark = new_mark(ActivityMark, (call, phase, time.monotonic(), threading.get_ident(), before.changes + 1))
        return before

    def sample(self) -> Sample:
        """Sample the thread that entered the last phase. The stack shows backward and a debugger."""
        mark = self.mark
        running = list(outward(sys._current_frames().get(mark.thread)))
        frames = [_read_frame(frame) for frame in running][::-1]
        files = {entry.filename for entry in frames}
        phase = mark.phase
        if any(name.endswith(("/bdb.py", "/pdb.py")) for name in files):
            phase = DEBUGGER
        elif mark.phase == USER_CODE and mark.thread == threading.main_thread().ident and _has_left_main(running):
            phase = AT_END
        elif not mark.call and any(name.endswith("/torch/autograd/graph.py") for name in files):
            phase = BACKWARD
        if mark.call:
            frames = _frames_into_call(frames, with_user_code=mark.phase in (HOOK, RUN))
        own = [entry for entry in frames if not entry.filename.startswith(LIBRARIES)]
        return Sample(
            mark.call,
            phase,
            time.monotonic() - mark.since,
            mark.changes,
            stack=_innermost(frames, own),
            line=own[-1].text if own else "",
            closure=closure_owner(running),
            local_work=local_work_text(),
        )


def _has_left_main(frames: Sequence[FrameType]) -> bool:
    """Whether the main thread with these frames has left the main module. False if it was never seen there."""
    return _BEGAN_IN_MAIN and not any(map(_is_main, frames))


def _is_main(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "__main__"


# False where a program in another language calls Python.
_BEGAN_IN_MAIN = any(map(_is_main, outward(sys._current_frames().get(threading.main_thread().ident or 0))))
process_activity = Activity()


def frame_text(frame: FrameType) -> str:
    """File, line and function of a frame."""
    return _read_frame(frame).text


class _Frame(NamedTuple):
    filename: str
    text: str


def _read_frame(frame: FrameType) -> _Frame:
    # Not by the traceback module: it reads source files, perhaps from the disk that blocks all ranks.
    code = frame.f_code
    path = "/".join(Path(code.co_filename).parts[-2:])  # enough to find the file, and short enough for a line
    return _Frame(code.co_filename, shorten(f"{path}:{frame.f_lineno} in {code.co_name}", _MAX_FRAME_COLUMNS))


def _frames_into_call(frames: list[_Frame], *, with_user_code: bool) -> list[_Frame]:
    """The frames up to the entry of a library call; ``with_user_code``: also the frames of user code inside."""
    library = [index for index, entry in enumerate(frames) if _is_library_call(entry.filename)]
    if not library:
        return frames
    return [*frames[: library[0] + 1], *(frames[library[-1] + 1 :] if with_user_code else ())]


def _is_library_call(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and not filename.startswith(AROUND_USER_CODE)


def _innermost(frames: Sequence[_Frame], own: Sequence[_Frame]) -> tuple[str, ...]:
    """At most ``_MAX_FRAMES`` innermost frames. The user's own line is first if it is not among them."""
    shown = list(frames[-_MAX_FRAMES:])
    texts = [entry.text for entry in shown]
    if own and own[-1] not in shown:
        texts = [own[-1].text, "...", *texts[2:]]
    return tuple(texts)

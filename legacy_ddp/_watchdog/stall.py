"""Waits of the training thread in ``torch.distributed``, outside of the calls of this library.

The thread of the status server looks at the training thread four times in ``warn_after_seconds``. The training thread
waits if nothing has moved since the look before: its stack is the same, no group of the process has issued an
operation, and the thread has not run. One of these alone is not enough. In a loop that is faster than the looks,
every look may meet the same line.
"""

import dis
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch.distributed as dist

from legacy_ddp import _torch as internals
from legacy_ddp._log import outward
from legacy_ddp._watchdog.process import LIBRARIES, frame_text, process_activity

# The public functions that wait, and the shells around them, which have no name of their own.
_COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/nn/functional.py",
    "/torch/distributed/collective_utils.py",
    "/torch/distributed/_functional_collectives.py",
)
_SHELLS = ("wrapper", "unwrap", "inner")
# The argument with the one rank that a function waits for.
_PEER = {"recv": "src", "recv_object_list": "src", "send": "dst", "send_object_list": "dst"}
LOOKS = 4  # in warn_after_seconds
# Of the time between two looks. A thread that runs all the time on the same line waits for a device in a busy loop.
_SPINNING_SHARE = 0.8
# For each time the thread ran, and for two of these at least. A signal, or a debugger that reads stacks, wakes a
# waiting thread, and it waits on: for 15 to 50 µs, and for longer on a slow or shared processor. An operation
# counts as issued. Only with a backend that has no count, an operation that is shorter than this goes unseen.
_WAKE_SECONDS = 150e-6
# No rank leaves these before all ranks of the group have come.
_FOR_ALL = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "reduce_scatter", "reduce_scatter_tensor"),
)


@dataclass(frozen=True)
class Wait:
    """A wait in a function of ``torch.distributed``.

    ``function``: for example ``barrier``; ``line``: of the script; ``seconds``: since when nothing has moved, as far as
    the looks tell. ``ranks``: of the group of the collective, counted in the whole job; empty for all ranks, and for an
    unknown group. ``source``: the one rank that ``recv()`` or ``send()`` waits for, or -1.
    """

    function: str
    line: str
    seconds: float
    ranks: tuple[int, ...] = ()
    source: int = -1

    @property
    def is_for_all(self) -> bool:
        """Whether it is a collective of all ranks of the job that no rank leaves before all have come."""
        return not self.ranks and self.function in _FOR_ALL


class _Seen(NamedTuple):
    """What a look has seen. ``cpu_seconds``, ``slices``: of the training thread, 0 without /proc."""

    stack: tuple[tuple[CodeType, int], ...]
    changes: int
    issued: int
    cpu_seconds: float
    slices: int
    at: float


class StallWatch:
    """The looks at the training thread of this process."""

    def __init__(self, warn_after_seconds: float) -> None:
        self._warn_after_seconds = warn_after_seconds
        self._seen: _Seen | None = None
        self._since = time.monotonic()
        self._next_report = warn_after_seconds
        self._native: dict[int, int] = {}  # the threads of the kernel, by the ident of Python
        self._looks_at = 0.0
        self._asked: _Seen | None = None  # as of the last question of another rank
        self._moved_at = float("-inf")  # when a question found that something had moved
        self.is_waiting = False  # in torch.distributed, as of the last look

    def seconds_to_look(self) -> float | None:
        if self._warn_after_seconds == float("inf"):
            return None
        return max(0.0, self._looks_at - time.monotonic())

    def look(self) -> bool:
        """Look if it is time. Whether a report is due: after ``warn_after_seconds``, then at twice the time each."""
        now = time.monotonic()
        if now < self._looks_at:
            return False
        self._looks_at = now + self._warn_after_seconds / LOOKS
        frames = _frames()
        before, self._seen = self._seen, self._see(frames, now)
        if before is None or process_activity.mark.call or _has_moved(before, self._seen):
            self._since, self._next_report, self.is_waiting = now, self._warn_after_seconds, False
            return False
        self.is_waiting = bool(_function_of(frames)[0])
        if not self.is_waiting or now - self._since < self._next_report:
            return False
        self._next_report = 2 * (now - self._since)
        return True

    def wait(self) -> Wait | None:
        """Where the training thread waits now; None outside of ``torch.distributed``, and in a call of the library."""
        frames = _frames()
        function, outermost = _function_of(frames)
        if not function or process_activity.mark.call:
            return None
        since = max(self._since, self._last_move(frames))
        user = next((frame for frame in frames if _is_of_user(frame)), None)
        ranks, source = _group_of(function, outermost)
        line = frame_text(user) if user is not None else ""
        return Wait(function, line, time.monotonic() - since, ranks, source)

    def _last_move(self, frames: Sequence[FrameType]) -> float:
        """When something was last found moved by a question. Two looks may be many seconds apart."""
        now = self._see(frames, time.monotonic())
        known = [seen for seen in (self._asked, self._seen) if seen is not None]
        before = max(known, key=lambda seen: seen.at, default=None)
        if before is None or _has_moved(before, now):
            self._moved_at = now.at
        self._asked = now
        return self._moved_at

    def _see(self, frames: Sequence[FrameType], now: float) -> _Seen:
        mark = process_activity.mark
        stack = tuple((frame.f_code, frame.f_lasti) for frame in frames)
        return _Seen(stack, mark.changes, internals.issued_on_all_groups(), *self._time_of(mark.thread), now)

    def _time_of(self, thread: int) -> tuple[float, int]:
        if thread not in self._native:
            self._native = {one.ident or 0: one.native_id or 0 for one in threading.enumerate()}
        try:
            path = f"/proc/self/task/{self._native.get(thread, 0)}/schedstat"
            numbers = Path(path).read_text(encoding="ascii").split()
            return int(numbers[0]) * 1e-9, int(numbers[2])
        except (OSError, IndexError, ValueError):  # without /proc, or without numbers of scheduling
            return 0.0, 0


def _frames() -> list[FrameType]:
    """The frames of the training thread, the innermost first."""
    return list(outward(sys._current_frames().get(process_activity.mark.thread)))


def _has_moved(before: _Seen, now: _Seen) -> bool:
    if before[:3] != now[:3]:
        return True
    cpu_seconds, slices = now.cpu_seconds - before.cpu_seconds, now.slices - before.slices
    is_spinning = cpu_seconds > _SPINNING_SHARE * (now.at - before.at)
    return slices > 0 and cpu_seconds > _WAKE_SECONDS * max(2, slices) and not is_spinning


def _is_of_user(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(LIBRARIES)


def _function_of(frames: Sequence[FrameType]) -> tuple[str, FrameType | None]:
    """The outermost function of ``torch.distributed`` inside of the user's innermost line, and its frame."""
    found: tuple[str, FrameType | None] = ("", None)
    for frame in frames:
        if _is_of_user(frame):
            return ("wait", None) if frame is frames[0] and _waits_for_work(frame) else found
        name = frame.f_code.co_name
        if frame.f_code.co_filename.endswith(_COLLECTIVES) and not name.startswith("_") and name not in _SHELLS:
            found = (name, frame)
    return found


def _waits_for_work(frame: FrameType) -> bool:
    """Whether the frame is in ``wait()`` of a Work of ``torch.distributed``, which leaves no frame of Python.

    An object that is not known, as in ``works[0].wait()``, counts as a Work if ``wait()`` has no argument: that of a
    store has its keys.
    """
    method, variable, arguments = _called(frame.f_code, frame.f_lasti)
    if method != "wait":
        return False
    # Up to Python 3.12 the variables of a function are not read: they are copied to the dict that locals() has given to
    # the script, and the frame keeps this dict with every tensor in it.
    code = frame.f_code
    is_readable = sys.version_info >= (3, 13) or not code.co_flags & CO_OPTIMIZED
    values = frame.f_locals if is_readable else dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    value = values.get(variable, frame.f_globals.get(variable))
    return (value is None and not arguments) or isinstance(value, dist.Work | internals.Future)


@lru_cache(maxsize=64)
def _called(code: CodeType, last: int) -> tuple[str, str, int]:
    """The names of the method in C that a frame is in and of the variable with its object; the number of arguments.

    The names are empty if there is no method or variable.
    """
    method, variable, loaded, arguments = "", "", "", 0
    for instruction in dis.get_instructions(code):
        if instruction.offset >= last:
            arguments = instruction.arg or 0
            break
        if instruction.opname == "POP_TOP" or instruction.opname.startswith("STORE_"):
            method = variable = ""  # the end of a statement
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            method, variable = str(instruction.argval), loaded
        is_variable = instruction.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
        loaded = str(instruction.argval) if is_variable else ""
    return method, variable, arguments


def _group_of(function: str, frame: FrameType | None) -> tuple[tuple[int, ...], int]:
    """The ranks of the group of a collective, as ranks of the job, and the single rank that the collective waits for.

    No ranks if the group is the whole job. -1 if the collective waits for no single rank.
    """
    values = frame.f_locals if frame is not None else {}
    peer = _PEER.get(function, "")
    source = values.get(peer)
    try:
        group = values.get("group", values.get("pg"))
        ranks = tuple(dist.get_process_group_ranks(group))
        if source is None and (number := values.get(f"group_{peer}")) is not None:
            source = ranks[number]
        if len(ranks) == dist.get_world_size():
            ranks = ()  # so that the answers of a thousand ranks do not hold a thousand numbers each
    except Exception:  # noqa: BLE001 - any object may be in a variable of this name
        ranks = ()
    return ranks, source if type(source) is int else -1

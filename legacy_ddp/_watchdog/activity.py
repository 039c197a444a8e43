"""What does this process do right now? The training thread says so in passing; whoever asks reads it off later."""

import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from legacy_ddp._text import shorten

FORWARD, BACKWARD, DEBUGGER, USER_CODE = "forward", "backward", "debugger", "user code"
STANDING_IN = "join, out of data"
HOOK = "hook"  # the phase of a call that runs code of the user's
_MAX_FRAMES, _MAX_FRAME_COLUMNS = 12, 200
_PACKAGE = str(Path(__file__).parents[1])
# The guard of optimizer steps is around closures, a strategy around the loop.
_AROUND = (f"{_PACKAGE}/_step_guard/guard.py", f"{_PACKAGE}/lightning/")
_PATHS = sysconfig.get_paths()
_LIBRARIES = (_PACKAGE, _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], "<frozen")


class Mark(NamedTuple):
    """What was last said: the call's name ("" outside), the phase, since when, by which thread, and how many before."""

    call: str
    phase: str
    since: float
    thread: int
    changes: int


@dataclass(frozen=True)
class Sample:
    """What a process was seen doing. ``stack``: innermost frame last; ``line``: the innermost that is the user's own.

    ``changes`` grows whenever the phase changes.
    """

    call: str
    phase: str
    age_seconds: float
    changes: int
    stack: tuple[str, ...]
    line: str = ""


class Activity:
    """One per process. Saying costs a microsecond; all else is paid by who asks."""

    def __init__(self) -> None:
        self._mark = Mark("", USER_CODE, time.monotonic(), threading.main_thread().ident or 0, 0)

    def enter(self, phase: str, call: str = "") -> None:
        """Say what the calling thread does from now on."""
        self._mark = Mark(call, phase, time.monotonic(), threading.get_ident(), self._mark.changes + 1)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Say that a forward pass runs in the block; afterwards goes on what was before, perhaps another forward."""
        before = self._mark
        self.enter(FORWARD)
        try:
            yield
        finally:
            self.enter(before.phase, before.call)

    def sample(self) -> Sample:
        """Look at the thread that spoke last. Backward and a debugger say nothing: they are seen on its stack."""
        mark = self._mark
        frame = sys._current_frames().get(mark.thread)
        files = {code.co_filename for code in _codes(frame)}
        phase = mark.phase
        if any(name.endswith(("/bdb.py", "/pdb.py")) for name in files):
            phase = DEBUGGER
        elif not mark.call and any(name.endswith("/torch/autograd/graph.py") for name in files):
            phase = BACKWARD
        frames = _frames(frame)
        if mark.call:
            frames = _way_into_call(frames, with_hook=mark.phase == HOOK)
        own = [entry for entry in frames if not entry.filename.startswith(_LIBRARIES)]
        return Sample(
            mark.call,
            phase,
            time.monotonic() - mark.since,
            mark.changes,
            stack=_cut(frames, own),
            line=own[-1].text if own else "",
        )


HERE = Activity()


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


class _Frame(NamedTuple):
    filename: str
    text: str


def _frames(frame: FrameType | None) -> list[_Frame]:
    """All frames, outermost first.

    By hand: the traceback module looks at the source files, perhaps on the disk that everybody waits for.
    """
    frames: list[_Frame] = []
    while frame is not None:
        code = frame.f_code
        text = f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frames.append(_Frame(code.co_filename, shorten(text, _MAX_FRAME_COLUMNS)))
        frame = frame.f_back
    frames.reverse()
    return frames


def _way_into_call(frames: list[_Frame], *, with_hook: bool) -> list[_Frame]:
    """What leads into a call of ours, and of what is inside it only what a hook of the user's does."""
    ours = [index for index, entry in enumerate(frames) if _is_call(entry.filename)]
    if not ours:
        return frames
    return [*frames[: ours[0] + 1], *(frames[ours[-1] + 1 :] if with_hook else ())]


def _is_call(filename: str) -> bool:
    """Whether it is of a call of ours, and not of what may be around the user's code, too."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_AROUND)


def _cut(frames: Sequence[_Frame], own: Sequence[_Frame]) -> tuple[str, ...]:
    """The innermost ones, and the user's own line where that is further out."""
    shown = list(frames[-_MAX_FRAMES:])
    texts = [entry.text for entry in shown]
    if own and own[-1] not in shown:
        texts = [own[-1].text, "...", *texts[2:]]
    return tuple(texts)


def _short(filename: str) -> str:
    """The last two parts of a path: enough to find the file, short enough for a line of 80 columns."""
    return "/".join(Path(filename).parts[-2:])

"""Frames of the call stack that are no place in the script of a user."""

import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType

import torch

from legacy_ddp._text import shorten

LIBRARY = os.path.join(os.path.dirname(__file__), "")
# Frames of these files between the script and the library, or between two frames of the library.
INNER = (LIBRARY, os.path.join(os.path.dirname(torch.__file__), ""), contextlib.__file__)
_MAX_COLUMNS = 200  # compiled code may have any name
_MAX_LINES = 16  # recursion may have thousands


def script_level() -> int:
    """The ``stacklevel`` with which ``warnings.warn()`` in the caller names the last line before torch and the library.

    1, the line of the caller, in a thread without such a line.
    """
    frames = enumerate(_outward(sys._getframe(1)), start=1)
    return next((level for level, frame in frames if not _is_inner(frame)), 1)


def script_lines() -> list[str]:
    """``train.py:12 in main``: the lines of the script that lead to the library, the innermost first, 16 at most.

    Empty in a thread without such a line.
    """
    frames = (frame for frame in _outward(sys._getframe(1)) if not _is_inner(frame))
    return [_line_of(frame) for frame in islice(frames, _MAX_LINES)]


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    return shorten(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}", _MAX_COLUMNS)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_inner(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(INNER)

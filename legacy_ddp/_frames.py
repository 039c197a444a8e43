"""Frames of the call stack that are no place in the script of a user."""

import contextlib
import os
import sys

import torch

LIBRARY = os.path.join(os.path.dirname(__file__), "")
# Frames of these files between the script and the library, or between two frames of the library.
INNER = (LIBRARY, os.path.join(os.path.dirname(torch.__file__), ""), contextlib.__file__)


def script_level() -> int:
    """The ``stacklevel`` with which ``warnings.warn()`` in the caller names the last line before torch and the library.

    1, the line of the caller, in a thread without such a line.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(INNER):
        if frame.f_back is None:
            return 1
        level, frame = level + 1, frame.f_back
    return level

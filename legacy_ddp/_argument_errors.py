"""The end of a TypeError or ValueError about an argument: the command that explains it."""

import os
import traceback
from contextlib import ContextDecorator
from types import TracebackType

from legacy_ddp._error_text import how_to_explain

_LIBRARY = os.path.join(os.path.dirname(__file__), "")


class ArgumentErrors(ContextDecorator):
    """Adds the command to a TypeError or ValueError raised by the library inside the block or the decorated function.

    The section is about both classes, which are Python's own, and thus cannot bring the command themselves. Errors
    raised by other code inside the block (a module, a hook) stay as they are.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            add_explanation(error)


def add_explanation(error: BaseException) -> None:
    """Add the command to ``error``, if it is a TypeError or ValueError raised by the library."""
    if not isinstance(error, TypeError | ValueError) or not _is_of_library(error.__traceback__):
        return
    note = how_to_explain("TypeError" if isinstance(error, TypeError) else "ValueError")
    if note not in getattr(error, "__notes__", ()):  # of an inner block
        error.add_note(note)


def _is_of_library(trace: TracebackType | None) -> bool:
    """Whether the frame that raised belongs to the library."""
    return all(frame.f_code.co_filename.startswith(_LIBRARY) for frame, _ in list(traceback.walk_tb(trace))[-1:])


argument_errors = ArgumentErrors()

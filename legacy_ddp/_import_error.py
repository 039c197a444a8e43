"""The error of an import that this system, this Python, this torch or a missing package does not allow."""

import sys
from importlib import import_module

from legacy_ddp._error_text import how_to_explain


def import_error(text: str) -> ImportError:
    """An ImportError with the command that explains it at its end, as all errors of the library."""
    error = ImportError(text)
    error.add_note(how_to_explain("ImportError"))
    return error


def check_system() -> None:
    """Refuse a system that is neither Linux nor like it, such as Windows.

    Raises:
        ImportError: Python has no fcntl here.
    """
    try:
        import_module("fcntl")
    except ModuleNotFoundError:
        raise import_error(
            "legacy_ddp does not run on this system: got a Python without fcntl "
            f"(sys.platform {sys.platform!r}), expected Linux, or macOS without shared memory; "
            "on Windows use the Windows Subsystem for Linux"
        ) from None

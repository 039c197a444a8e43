"""Ctrl-C at an exact place of a call, and what the ranks see of it."""

import sys
from collections.abc import Callable

from legacy_ddp import LegacyDDPError
from tests.helpers.rank_faults import do_when


def error_after_interrupt(call: Callable[[], object], function: str, *, here: bool) -> str:
    """The type of the error of ``call``, empty after success. With ``here`` Ctrl-C comes as ``function`` is entered.

    The error itself would keep gradients alive.
    """
    if here:
        sys.setprofile(do_when(function, _interrupt))
    try:
        call()
    except (KeyboardInterrupt, LegacyDDPError) as error:
        return type(error).__name__
    finally:
        sys.setprofile(None)
    return ""


def _interrupt() -> None:
    raise KeyboardInterrupt

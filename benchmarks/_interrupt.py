"""Exit of a benchmark at Ctrl-C: the status that a shell expects, without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Exit with status 130; child processes get the signal, too."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)

"""How does a benchmark end at Ctrl-C? As a shell expects, and without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Exit with status 130; whoever was started got the signal, too."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)

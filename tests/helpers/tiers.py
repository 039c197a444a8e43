"""Counts of repeated faults: a few in ``make test``, all in ``make soak``."""

import os

SOAK = "SOAK" in os.environ


def count(full: int, usual: int) -> int:
    """``full`` in ``make soak``, else ``usual``."""
    return full if SOAK else usual

"""Warnings and log records; each record of the logger ``legacy_ddp`` has the attribute ``rank``."""

import logging
import warnings
from collections.abc import Callable, Mapping

from legacy_ddp._text import say_bytes

LOGGER = logging.getLogger("legacy_ddp")


def logger_of(rank: int) -> "logging.LoggerAdapter[logging.Logger]":
    """The logger of one rank, counted inside its group."""
    return logging.LoggerAdapter(LOGGER, {"rank": rank})


def warn(rank: int, text: str, *, stacklevel: int) -> None:
    """Show a ``UserWarning``. It is never raised: where a filter makes an error of it, the log gets it, level WARNING.

    An error on one rank would end a call, or a step, that the other ranks make.
    """
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except UserWarning:
        logger_of(rank).warning("%s", text)


def log_construction(rank: int, describe: Callable[[], str]) -> None:
    """A wrapper was made; level INFO."""
    if LOGGER.isEnabledFor(logging.INFO):
        logger_of(rank).info("rank %d, new wrapper: %s", rank, describe().replace("\n", "; "))


def log_call(rank: int, call: str, payload_bytes: int, seconds: Mapping[str, float]) -> None:
    """A call is over; level DEBUG, which the caller has tested."""
    phases = ", ".join(f"{phase} {1000 * value:.2f} ms" for phase, value in seconds.items())
    logger_of(rank).debug("rank %d, %s: %s; %s", rank, call, say_bytes(payload_bytes), phases)

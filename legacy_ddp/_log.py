"""Warnings and log records; each record of the logger ``legacy_ddp`` has the attribute ``rank``."""

import logging
import warnings
from collections.abc import Callable, Mapping

from legacy_ddp._text import format_bytes

LOGGER = logging.getLogger("legacy_ddp")


def logger_of(rank: int) -> "logging.LoggerAdapter[logging.Logger]":
    """The logger of one rank, counted inside its group."""
    return logging.LoggerAdapter(LOGGER, {"rank": rank})


def warn(rank: int, text: str, *, stacklevel: int, is_everywhere: bool = False) -> None:
    """Show a ``UserWarning``. If a filter turns the warning into an error, log it at level WARNING instead.

    An error on a single rank would end a call, or a step, while the other ranks go on. ``is_everywhere``: every rank
    has this text. Rank 0 shows it, and every rank with a configured log logs it.
    """
    is_logged = is_everywhere and LOGGER.hasHandlers()
    if is_logged:
        logger_of(rank).warning("%s", text)
    if is_everywhere and rank != 0:
        return
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except UserWarning:
        if not is_logged:
            logger_of(rank).warning("%s", text)


def log_construction(rank: int, describe: Callable[[], str]) -> None:
    """Log a new wrapper, level INFO."""
    if LOGGER.isEnabledFor(logging.INFO):
        logger_of(rank).info("rank %d, new wrapper: %s", rank, describe().replace("\n", "; "))


def log_transport(rank: int, transport: str) -> None:
    """Log the choice of a transport, level INFO."""
    logger_of(rank).info("rank %d, transport: %s", rank, transport)


def log_call(rank: int, call: str, payload_bytes: int, seconds: Mapping[str, float]) -> None:
    """Log a completed call. The caller has tested for level DEBUG."""
    phases = ", ".join(f"{phase} {1000 * value:.2f} ms" for phase, value in seconds.items())
    logger_of(rank).debug("rank %d, %s: %s; %s", rank, call, format_bytes(payload_bytes), phases)

"""Warnings and log records; each record of the logger ``legacy_ddp`` has the attribute ``rank``."""

import logging
import sys
import warnings
from collections.abc import Callable, Mapping

from legacy_ddp._frames import script_level
from legacy_ddp._text import format_bytes

LOGGER = logging.getLogger("legacy_ddp")


class _DefaultHandler(logging.Handler):
    """Writes records to stderr as long as the script has no handler for them. Every text is a single write, so that
    reports of several ranks do not mix."""

    def __init__(self) -> None:
        super().__init__()
        form = "%(asctime)s %(levelname)s %(name)s rank %(rank)s: %(message)s"
        self.setFormatter(logging.Formatter(form, defaults={"rank": "?"}))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, or the lines of a report."""
        if is_configured():
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler of Python: a log that cannot be written stops no training
            self.handleError(record)


_DEFAULT = _DefaultHandler()


def is_configured() -> bool:
    """Whether a handler of the script takes the records."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(handler is not _DEFAULT for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def logger_of(rank: int) -> "logging.LoggerAdapter[logging.Logger]":
    """The logger of one rank, counted inside its group."""
    LOGGER.addHandler(_DEFAULT)  # at the first use, because an import configures nothing; once
    return logging.LoggerAdapter(LOGGER, {"rank": rank})


def warn(rank: int, text: str, *, is_everywhere: bool = False) -> None:
    """Show a ``UserWarning`` at the line of the script that led here. If a filter makes it an error, log it instead.

    The log record has level WARNING. An error on a single rank would end a call, or a step, while the other ranks go
    on. ``is_everywhere``: every rank has this text. Rank 0 shows it, and every rank with a configured log logs it.
    """
    is_logged = is_everywhere and is_configured()
    if is_logged:
        logger_of(rank).warning("%s", text)
    if is_everywhere and rank != 0:
        return
    try:
        warnings.warn(text, stacklevel=script_level())
    except UserWarning:
        if not is_logged:
            logger_of(rank).warning("%s", text)


def log_construction(rank: int, describe: Callable[[], str]) -> None:
    """Log a new wrapper, level INFO."""
    if LOGGER.isEnabledFor(logging.INFO):
        logger_of(rank).info("new wrapper: %s", describe().replace("\n", "; "))


def log_transport(rank: int, transport: str) -> None:
    """Log the choice of a transport, level INFO."""
    logger_of(rank).info("transport: %s", transport)


def log_call(rank: int, call: str, payload_bytes: int, seconds: Mapping[str, float]) -> None:
    """Log a completed call. The caller has tested for level DEBUG."""
    phases = ", ".join(f"{phase} {1000 * value:.2f} ms" for phase, value in seconds.items())
    logger_of(rank).debug("%s: %s; %s", call, format_bytes(payload_bytes), phases)

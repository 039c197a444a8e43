"""Warnings that the library logged because a filter makes errors of them, as the tests' filter does."""

import logging


class _Handler(logging.Handler):
    """Keeps the texts of those warnings, and of no other record."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "warning":
            self.texts.append(record.getMessage())


_handler = _Handler()


def listen() -> None:
    """Begin to keep them."""
    logging.getLogger("legacy_ddp").addHandler(_handler)


def take() -> list[str]:
    """The texts since the last call of this function."""
    texts, _handler.texts = _handler.texts, []
    return texts


def assert_nothing_left() -> None:
    """Fail for a warning that the test did not take: a warning that nobody expects is an error in a test."""
    if texts := take():
        raise AssertionError(f"warned of, and not expected: {texts}")

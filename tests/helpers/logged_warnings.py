"""Warnings that the library logged because a filter makes errors of them, as the tests' filter does."""

import logging
import warnings

COMMAND = "meaning and next step: legacy-ddp explain "


class _Handler(logging.Handler):
    """Keeps the texts of those warnings, and of no other record, without the command in their last line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.sections: list[str] = []  # that the commands name

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "warning":
            text, _, last = record.getMessage().rpartition("\n")
            self.texts.append(text if last.startswith(COMMAND) else f"without a command: {record.getMessage()}")
            self.sections.append(last.removeprefix(COMMAND))


_handler = _Handler()


def listen() -> None:
    """Begin to keep them."""
    logging.getLogger("legacy_ddp").addHandler(_handler)


def take() -> list[str]:
    """The texts since the last call of this function."""
    texts, _handler.texts = _handler.texts, []
    return texts


def sections() -> list[str]:
    """The sections that their commands name, since the last call of this function."""
    found, _handler.sections = _handler.sections, []
    return found


def text_of(warning: warnings.WarningMessage) -> str:
    """The text of a warning that was not logged, without its command."""
    return str(warning.message).partition(f"\n{COMMAND}")[0]


def assert_nothing_left() -> None:
    """Fail for a warning that the test did not take: a warning that nobody expects is an error in a test."""
    if texts := take():
        raise AssertionError(f"warned of, and not expected: {texts}")

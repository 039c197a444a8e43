"""The warnings of the library: records of its logger with the event ``warning``."""

import logging
from typing import NamedTuple

_COMMAND = "meaning and next step: legacy-ddp explain "


class Told(NamedTuple):
    """A warning, the file of the script in its record, and the section of its command."""

    text: str
    filename: str
    section: str


class _Handler(logging.Handler):
    """Keeps the texts of those warnings, and of no other record, without the line of the script and the command."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "warning":
            text, _, last = record.getMessage().rpartition("\n")
            before, _, place = text.rpartition("\n")  # such as "at train.py:12 in main"
            text = before if place.startswith("at ") else text
            text = text if last.startswith(_COMMAND) else f"without a command: {text}"
            self.told.append(Told(text, record.pathname, last.removeprefix(_COMMAND)))


_handler = _Handler()


def listen() -> None:
    """Begin to keep them, also those of other ranks than rank 0, which have level DEBUG."""
    logger = logging.getLogger("legacy_ddp")
    logger.addHandler(_handler)
    logger.setLevel(logging.DEBUG)


def take() -> list[str]:
    """The texts since the last call of this function, or of :func:`take_all`."""
    return [told.text for told in take_all()]


def take_all() -> list[Told]:
    told, _handler.told = _handler.told, []
    return told


def assert_nothing_left() -> None:
    """Fail for a warning that the test did not take: a warning that nobody expects is an error in a test."""
    if texts := take():
        raise AssertionError(f"warned of, and not expected: {texts}")

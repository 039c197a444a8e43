"""How does a rank's trace get onto the disk? Whole lines at a time, so that a SIGKILL leaves whole lines."""

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import RANK_FILE, encode
from legacy_ddp.debug._trace.records import CallFacts, Environment, Names, Section, end_members


class Writer:
    """One rank's file, from the environment line on. Overwrites nothing.

    Raises:
        TraceError: the folder cannot be made or written, or it holds a trace of this rank.
    """

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.path = folder / RANK_FILE.format(environment.rank)
        self._numbers: dict[Names, int] = {}
        self._lines: list[bytes] = []
        self._count = 0  # of all lines so far
        self._whole = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Not buffered: what was written is the kernel's, and survives the process.
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError as error:
            if error.filename != str(self.path):
                raise TraceError(f"{folder} is no folder; name another one, or one that does not exist yet") from error
            raise TraceError(
                f"{self.path} exists, expected no trace of this rank there; name another folder, or remove that one"
            ) from error
        except OSError as error:
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; name another folder") from error
        try:
            self._add(environment.members())
            self.flush()
        except OSError as error:
            self.abandon()
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; name another folder") from error

    def section(self, step: int, section: Section) -> None:
        """Take what was held in one phase of a step."""
        number = self._numbers.get(section.names)
        if number is None:
            number = len(self._numbers)
            self._add(section.names.members(number))
            self._numbers[section.names] = number
        self._add(section.values.members(step, section.names.phase, number))

    def sections(self, step: int, sections: Iterable[Section]) -> None:
        for section in sections:
            self.section(step, section)

    def call(self, step: int, facts: CallFacts) -> None:
        """Take the host's side of a call."""
        self._add(facts.members(step))

    def flush(self) -> None:
        """Hand over what was taken, whole lines in one piece.

        Raises:
            OSError: it cannot be written, or an earlier one could not: what is torn stays the end of the file.
        """
        pending = memoryview(b"".join(self._lines))
        self._lines.clear()
        if not self._whole:
            raise OSError(errno.EIO, "an earlier line of the trace was not written whole", str(self.path))
        self._whole = False
        while pending:
            pending = pending[os.write(self._file, pending) :]
        self._whole = True

    def close(self, step: int, reason: str) -> None:
        """Say how it ended; the writer is of no use afterwards.

        Raises:
            OSError: as :meth:`flush`; the file is closed all the same.
        """
        try:
            self._add(end_members(step, reason))
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Write nothing more; may be called again."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def discard(self) -> None:
        """Write nothing more, and take away what was written."""
        self.abandon()
        self.path.unlink(missing_ok=True)

    def _add(self, members: Mapping[str, Any]) -> None:
        self._lines.append(encode(members, self._count + 1))
        self._count += 1

"""Writer of the file of one rank. Writes whole lines, so that a SIGKILL leaves whole lines."""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._trace.operation_lines import (
    Declaration,
    by_micro_batch,
    declaration_of,
    digests_of,
    sequence_to_json,
)
from legacy_ddp.debug._trace.records import (
    RANK_FILE,
    CallFacts,
    Environment,
    Names,
    Section,
    encode,
    end_to_json,
    log_to_json,
)


class Writer:
    """The file of one rank, from the environment line on. Overwrites nothing.

    Raises:
        TraceError: the folder cannot be made or written, or holds a trace of this rank.
    """

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.path = folder / RANK_FILE.format(environment.rank)
        self._numbers: dict[Names, int] = {}
        self._declared: dict[Declaration, int] = {}
        self._lines: list[bytes] = []
        self._line_count = 0
        self._is_whole = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Not buffered: the kernel has the written bytes, so they survive the process.
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        # The texts have all that the errors of the system tell.
        except FileExistsError as error:
            if error.filename != str(self.path):
                raise TraceError(
                    f"{folder} is no folder; name another folder, or a path that does not exist yet"
                ) from None
            raise TraceError(
                f"{self.path} exists, expected no trace of this rank there; name another folder, or remove that one"
            ) from None
        except OSError as error:
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; name another folder") from None
        try:
            self._add(environment.to_json())
            self.flush()
        except OSError as error:
            self.abandon()
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; name another folder") from None

    def section(self, step: int, section: Section) -> None:
        """Add the state in one phase of a step."""
        number = self._numbers.get(section.names)
        if number is None:
            number = len(self._numbers)
            self._add(section.names.to_json(number))
            self._numbers[section.names] = number
        self._add(section.values.to_json(step, section.names.phase, number))

    def sections(self, step: int, sections: Iterable[Section]) -> None:
        for section in sections:
            self.section(step, section)

    def call(self, step: int, facts: CallFacts) -> None:
        """Add the facts about the call of a step."""
        self._add(facts.to_json(step))

    def operations(self, step: int, operations: Sequence[Operation]) -> None:
        """Add the operations of a step."""
        for micro_batch, found in by_micro_batch(operations):
            numbers = [self._declare(declaration_of(operation)) for operation in found]
            self._add(sequence_to_json(step, micro_batch, numbers, "".join(map(digests_of, found))))

    def log_now(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write values of this rank alone, and all lines before.

        Raises:
            OSError: as :meth:`flush`.
        """
        self._add(log_to_json(step, values))
        self.flush()

    def flush(self) -> None:
        """Write all added lines to the file, in one piece.

        Raises:
            OSError: this write or an earlier write failed, and a torn line stays the end of the file; the file was
                deleted, and the kernel would take the lines nevertheless.
        """
        if os.fstat(self._file).st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was deleted", str(self.path))
        pending = memoryview(b"".join(self._lines))
        self._lines.clear()
        if not self._is_whole:
            raise OSError(errno.EIO, "an earlier line of the trace was not written whole", str(self.path))
        self._is_whole = False
        while pending:
            pending = pending[os.write(self._file, pending) :]
        self._is_whole = True

    def close(self, step: int, reason: str) -> None:
        """Write the end line and close the file.

        Raises:
            OSError: as :meth:`flush`; the file is closed nevertheless.
        """
        try:
            self._add(end_to_json(step, reason))
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without an end line; may be called again."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def discard(self) -> None:
        """Close and remove the file."""
        self.abandon()
        self.path.unlink(missing_ok=True)

    def _declare(self, declaration: Declaration) -> int:
        """The number of an operation, after its declaration at the first use."""
        number = self._declared.get(declaration)
        if number is None:
            number = self._declared[declaration] = len(self._declared)
            self._add(declaration.to_json(number))
        return number

    def _add(self, values: Mapping[str, Any]) -> None:
        self._lines.append(encode(values, self._line_count + 1))
        self._line_count += 1

"""Writer of the file of one rank. Writes whole lines, so that a SIGKILL leaves whole lines.

A step has lines for its operations. A declaration has all that is equal from step to step; a sequence has the numbers
of the declarations, and the digests.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._operations.operation import Operation, Stage, Value
from legacy_ddp.debug._trace.records import (
    RANK_FILE,
    CallFacts,
    Environment,
    Names,
    Section,
    encode,
    end_to_json,
    log_to_json,
    read_record,
)

_DIGITS = 16


@dataclass(frozen=True)
class Declaration:
    """An :class:`Operation` without digests, micro-batch and number.

    ``parameters``: one for each input. ``inputs``, ``outputs``: kind and layout of tensors. ``digested``: for all of
    them in order, whether there is a digest. ``is_random``: whether there is a digest of the generator, after these.
    """

    name: str
    stage: Stage
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    digested: tuple[bool, ...]
    is_random: bool
    settings: str

    def to_json(self, number: int) -> dict[str, Any]:
        return {"line": "operation", "number": number, **vars(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Declaration":
        return read_record(Declaration, values)

    def with_digests(self, digests: Iterator[str], micro_batch: int, number: int) -> Operation:
        """The operation with the next of ``digests``."""
        found = [next(digests) if is_digested else None for is_digested in self.digested]
        values = [Value(*item, digest) for item, digest in zip((*self.inputs, *self.outputs), found, strict=True)]
        return Operation(
            name=self.name,
            stage=self.stage,
            micro_batch=micro_batch,
            module=self.module,
            parameters=self.parameters,
            inputs=tuple(values[: len(self.inputs)]),
            outputs=tuple(values[len(self.inputs) :]),
            settings=self.settings,
            generator=next(digests) if self.is_random else "",
            number=number,
        )


def declaration_of(operation: Operation) -> Declaration:
    values = (*operation.inputs, *operation.outputs)
    return Declaration(
        name=operation.name,
        stage=operation.stage,
        module=operation.module,
        parameters=operation.parameters,
        inputs=tuple([(value.kind, value.layout) for value in operation.inputs]),
        outputs=tuple([(value.kind, value.layout) for value in operation.outputs]),
        digested=tuple([value.digest is not None for value in values]),
        is_random=bool(operation.generator),
        settings=operation.settings,
    )


def digests_of(operation: Operation) -> str:
    """The digests of an operation, end to end: of inputs, outputs and generator."""
    values = (*operation.inputs, *operation.outputs)
    return "".join([value.digest or "" for value in values]) + operation.generator


def sequence_to_json(step: int, micro_batch: int, numbers: Sequence[int], digests: str) -> dict[str, Any]:
    # The order of keys is part of the format: a reader counts operations without parsing the line.
    return {"line": "operations", "step": step, "micro_batch": micro_batch, "numbers": numbers, "digests": digests}


def sequence_from_json(values: Mapping[str, Any], declared: Sequence[Declaration], before: int = 0) -> list[Operation]:
    """The operations of one line. ``before``: the number of operations of the step in earlier lines."""
    digests = values["digests"]
    words = (digests[start : start + _DIGITS] for start in range(0, len(digests), _DIGITS))
    held = [declared[number] for number in values["numbers"]]
    return [
        item.with_digests(words, values["micro_batch"], number) for number, item in enumerate(held, start=before + 1)
    ]


class Writer:
    """The file of one rank, from the environment line on. Overwrites nothing."""

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
        for micro_batch, group in groupby(operations, key=lambda operation: operation.micro_batch):
            found = list(group)
            numbers = [self._declare(declaration_of(operation)) for operation in found]
            self._add(sequence_to_json(step, micro_batch, numbers, "".join(map(digests_of, found))))

    def log_now(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write values of this rank alone, and all lines before."""
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
        """Write the end line and close the file, also if the line cannot be written."""
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

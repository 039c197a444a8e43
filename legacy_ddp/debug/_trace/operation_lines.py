"""Lines of a trace for the operations of a step: declarations of operations, and sequences of them. Pure.

A declaration has all that is equal from step to step; a sequence has the numbers of the declarations, and the digests.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._operations.operation import Operation, Stage, Value
from legacy_ddp.debug._trace import records

_DIGITS = 16
_DIGESTS = re.compile(r"[0-9a-f]*")


def _as_stage(value: Any) -> Stage:
    if value not in ("forward", "backward"):
        raise ValueError
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Declaration:
    """An :class:`Operation` without digests, micro-batch and number.

    ``parameters``: one for each input. ``inputs``, ``outputs``: kind and layout of tensors. ``digested``: for all of
    them in order, whether there is a digest. ``is_random``: whether there is a digest of the generator, after these.
    """

    name: str
    stage: Annotated[Stage, _as_stage]
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
    def from_json(values: Mapping[str, Any]) -> tuple[int, "Declaration"]:
        found = Declaration(**records.read_fields(Declaration, values))
        if len(found.digested) != len(found.inputs) + len(found.outputs):
            raise TraceError(f"{records.FOREIGN}: key 'digested' has not one entry per tensor")
        if len(found.parameters) != len(found.inputs):
            raise TraceError(f"{records.FOREIGN}: key 'parameters' has not one entry per input")
        return records.read_field(values, "number", records.as_count), found

    @property
    def count(self) -> int:
        """The number of digests of one such operation."""
        return sum(self.digested) + self.is_random

    def with_digests(self, digests: Iterator[str], micro_batch: int, number: int) -> Operation:
        """The operation with the next :attr:`count` of ``digests``."""
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


def by_micro_batch(operations: Sequence[Operation]) -> Iterator[tuple[int, list[Operation]]]:
    """The operations of each micro-batch, in order."""
    for micro_batch, found in groupby(operations, key=lambda operation: operation.micro_batch):
        yield micro_batch, list(found)


def sequence_to_json(step: int, micro_batch: int, numbers: Sequence[int], digests: str) -> dict[str, Any]:
    # The order of keys is part of the format: a reader counts operations without parsing the line.
    return {"line": "operations", "step": step, "micro_batch": micro_batch, "numbers": numbers, "digests": digests}


def sequence_from_json(values: Mapping[str, Any], declared: Sequence[Declaration], before: int = 0) -> list[Operation]:
    """The operations of one line. ``before``: the number of operations of the step in earlier lines.

    Raises:
        TraceError: the line has contents that no recorder writes.
    """
    numbers = records.read_field(values, "numbers", records.sequence_of(records.count_below(len(declared))))
    micro_batch = records.read_field(values, "micro_batch", records.as_count)
    digests = records.read_field(values, "digests", records.as_text)
    held = [declared[number] for number in numbers]
    if len(digests) != _DIGITS * sum(item.count for item in held) or not _DIGESTS.fullmatch(digests):
        raise TraceError(f"{records.FOREIGN}: key 'digests' has not {_DIGITS} hexadecimal digits per tensor")
    words = _words(digests)
    return [item.with_digests(words, micro_batch, number) for number, item in enumerate(held, start=before + 1)]


def _words(digests: str) -> Iterator[str]:
    return (digests[start : start + _DIGITS] for start in range(0, len(digests), _DIGITS))

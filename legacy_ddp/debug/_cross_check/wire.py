"""Operations and their first difference as JSON values, for other ranks. Pure."""

from dataclasses import asdict
from typing import Any

from legacy_ddp.debug._operations.operation import Gap, Operation, OperationDifference, Origin, Value


def to_json(record: Operation | OperationDifference) -> dict[str, Any]:
    """The fields; tuples become lists on the way."""
    return asdict(record)


def operation_from(row: dict[str, Any]) -> Operation:
    """The inverse of :func:`to_json` for an operation."""
    values = {name: tuple(Value(**value) for value in row[name]) for name in ("inputs", "outputs")}
    return Operation(**{**row, **values, "parameters": tuple(row["parameters"])})


def difference_from(row: dict[str, Any]) -> OperationDifference:
    """The inverse of :func:`to_json` for a difference."""
    return OperationDifference(
        **{
            **row,
            **_sides(row),
            "differing": tuple(row["differing"]),
            "origin": Origin(**{**row["origin"], **_writers(row["origin"])}),
            **{name: tuple(Gap(**{**gap, **_sides(gap)}) for gap in row[name]) for name in ("earlier", "later")},
        }
    )


def _sides(row: dict[str, Any]) -> dict[str, tuple[Operation, ...]]:
    return {side: tuple(map(operation_from, row[side])) for side in ("a", "b")}


def _writers(row: dict[str, Any]) -> dict[str, Operation | None]:
    return {name: row[name] and operation_from(row[name]) for name in ("operation_a", "operation_b", "operation_read")}

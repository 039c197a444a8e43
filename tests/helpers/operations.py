"""Small sequences of operations made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from legacy_ddp.debug._operations.operation import Operation, Value

KIND = "float32 (4, 8)"


def value(digest: str | None, kind: str = KIND, layout: str = "") -> Value:
    return Value(kind, layout, digest)


def operation(name: str, reads: Sequence[str] = (), writes: Sequence[str] = (), **changes: Any) -> Operation:
    """An operation on values named by short texts in place of digests; ``changes``: other fields."""
    given = {
        "name": name if "::" in name else f"aten::{name}",
        "stage": "forward",
        "micro_batch": 1,
        "module": "",
        "parameters": ("",) * len(reads),
        "inputs": tuple(map(value, reads)),
        "outputs": tuple(map(value, writes)),
        "settings": "",
        "generator": "",
    }
    return Operation(**{**given, **changes})


def layer(path: str, reads: str, writes: str, weight: str = "w") -> list[Operation]:
    """The operations of a linear layer: its transposed weight, and the product."""
    return [
        operation("t", [weight], [f"{weight}.T"], module=path, parameters=(f"{path}.weight",)),
        operation("mm", [reads, f"{weight}.T"], [writes], module=path, parameters=("", f"{path}.weight")),
    ]


def model(data: str = "x") -> list[Operation]:
    """A step: three layers with a ReLU after each, a sum, and a backward pass of two operations for each layer."""
    found, last = [], data
    for index in range(3):
        found += layer(f"{index}", last, f"h{index}({data})", weight=f"w{index}")
        found.append(operation("relu", [f"h{index}({data})"], [f"r{index}({data})"], module=f"{index}.act"))
        last = f"r{index}({data})"
    found.append(operation("sum", [last], [f"loss({data})"]))
    gradient = f"loss({data})"
    for index in reversed(range(3)):
        for name in ("threshold_backward", "mm"):
            new = f"{name}{index}({gradient[-12:]})"
            found.append(operation(name, [gradient], [new], module=f"{index}", stage="backward"))
            gradient = new
    return found


def recordable(operations: Sequence[Operation]) -> list[Operation]:
    """The sequence with digests of 16 hexadecimal digits in place of short texts."""

    def words(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(item if item.digest is None else replace(item, digest=_word(item.digest)) for item in values)

    return [replace(item, inputs=words(item.inputs), outputs=words(item.outputs)) for item in operations]


def _word(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def changed(operations: Sequence[Operation], position: int, **changes: Any) -> list[Operation]:
    return [replace(item, **changes) if index == position else item for index, item in enumerate(operations)]


def rewritten(operations: Sequence[Operation], position: int, old: str, new: str) -> list[Operation]:
    """The sequence in which a value has other bits from ``position`` on, and with it all that is computed from it."""
    other = {old: new}
    found = list(operations[:position])
    for index, item in enumerate(operations[position:]):
        inputs = tuple(value(other.get(given.digest or "", given.digest), given.kind) for given in item.inputs)
        if inputs != item.inputs or index == 0:
            other.update(
                {given.digest or "": other.get(given.digest or "", f"{given.digest}'") for given in item.outputs}
            )
        outputs = tuple(value(other.get(given.digest or "", given.digest), given.kind) for given in item.outputs)
        found.append(replace(item, inputs=inputs, outputs=outputs))
    return found

"""Phrases about an operation and about the first difference of two sequences. Pure."""

from collections.abc import Iterator, Sequence

from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.operation import Operation

Labels = tuple[str, str]
"""The names of the two sides in texts: ``A`` and ``B``, or ``rank 0`` and ``rank 1``."""

_MAX_SETTINGS = 120  # characters


def place(operation: Operation) -> str:
    """``backward of encoder.layers.3.linear1 (aten::mm)``."""
    where = f"of {operation.module}" if operation.module else "outside of submodules"
    return f"{operation.stage} {where} ({short(operation)})"


def short(operation: Operation) -> str:
    """The name without the overload ``default``."""
    return operation.name.removesuffix(".default")


def module_of(operation: Operation) -> str:
    return operation.module or "the code outside of submodules"


def summary(found: OperationDifference, labels: Labels) -> str:
    """The difference in one phrase: place, and what agrees and differs there."""
    here = place(found.operation)
    if found.kind == "output":
        return f"{here}: inputs agree, {_positions(found.differing, len(found.a[0].outputs), 'output')}"
    if found.kind == "input":
        return f"{here}: all operations before agree, {_inputs(found)}"
    if found.kind == "form":
        return f"{here}: {' and '.join(aspects(found.a[0], found.b[0]))} differ"
    return _sequence(found, labels)


def _inputs(found: OperationDifference) -> str:
    if found.origin.parameter:
        return f"{found.origin.parameter!r} differs"
    return _positions(found.differing, max(len(found.a[0].inputs), len(found.b[0].inputs)), "input")


def _positions(differing: Sequence[int], number: int, noun: str) -> str:
    """``output differs``, ``output 2 of 3 differs`` or ``outputs 1 and 3 of 3 differ``."""
    if number == 1:
        return f"{noun} differs"
    more = [f"{len(differing) - 3} more"] if len(differing) > 3 else []
    *first, last = [*(str(index + 1) for index in differing[:3]), *more]
    numbers = f"{', '.join(first)} and {last}" if first else last
    return f"{noun}s {numbers} of {number} differ" if len(differing) > 1 else f"{noun} {numbers} of {number} differs"


def _sequence(found: OperationDifference, labels: Labels) -> str:
    texts = [
        f"{count(len(operations))} only in {label}{', first' if len(operations) > 1 else ':'} {place(operations[0])}"
        for label, operations in zip(labels, (found.a, found.b), strict=True)
        if operations
    ]
    return "; ".join(texts)


def count(number: int) -> str:
    return f"{number:,} operation{'s' * (number != 1)}"


def both(texts: Sequence[str], labels: Labels) -> str:
    """``1 in A, 2 in B``."""
    return ", ".join(f"{text} in {label}" for text, label in zip(texts, labels, strict=True))


def aspects(a: Operation, b: Operation) -> list[str]:
    """Nouns for the differences of two operations besides their bits."""
    tensors = (*a.inputs, *a.outputs), (*b.inputs, *b.outputs)
    dtypes, shapes = ([[value.kind.partition(" ")[part] for value in side] for side in tensors] for part in (0, 2))
    layouts = [[value.layout for value in side] for side in tensors]
    found = {
        "settings": a.settings != b.settings,
        "number of tensors": len(tensors[0]) != len(tensors[1]),
        "dtypes": dtypes[0] != dtypes[1],
        "parameters": a.parameters != b.parameters,
        "shapes": shapes[0] != shapes[1],
        "strides": layouts[0] != layouts[1],
        "random generators": a.generator != b.generator,
    }
    return [noun for noun, differs in found.items() if differs]


def details(found: OperationDifference, labels: Labels) -> Iterator[str]:
    """A phrase for each differing value and setting."""
    noun = "output" if found.kind == "output" else "input"
    for index, (a, b) in zip(found.differing[:3], found.differing_values, strict=False):
        kinds = [a.kind, b.kind] if a.kind != b.kind else ["", ""]
        texts = [
            " ".join(filter(None, (kind, value.digest or "no digest")))
            for kind, value in zip(kinds, (a, b), strict=True)
        ]
        kind = "" if a.kind != b.kind else f", {a.kind}"
        yield f"{noun} {index + 1}{kind}: {both(texts, labels)}"
    if found.kind != "sequence":
        yield from _other_aspects(found.a[0], found.b[0], labels)


def _other_aspects(a: Operation, b: Operation, labels: Labels) -> Iterator[str]:
    if a.settings != b.settings:
        yield f"settings: {both([(text or 'none')[:_MAX_SETTINGS] for text in (a.settings, b.settings)], labels)}"
    if a.generator != b.generator:
        yield f"random generator: {both([a.generator or 'none', b.generator or 'none'], labels)}"
    for index, (left, right) in enumerate(zip(a.inputs, b.inputs, strict=False)):
        if left.layout != right.layout:
            texts = [value.layout or "contiguous" for value in (left, right)]
            yield f"strides of input {index + 1}: {both(texts, labels)}"

"""Phrases about an operation and about the first difference of two sequences. Pure."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from legacy_ddp.debug._operations.operation import Gap, Operation, OperationDifference, Value

Labels = tuple[str, str]
"""The names of the two sides in texts: ``A`` and ``B``, or ``rank 0`` and ``rank 1``."""

_MAX_SETTINGS = 120  # characters
_MAX_NAMES = 3  # of operations that only one side has
_KEPT = "; p is the probability of keeping an element, 0.5 by default, and dropout has 1 - p"
_MAX_LATER = 3  # gaps behind a difference


def place(operation: Operation, names: Sequence[str] = ()) -> str:
    """``backward of encoder.layers.3.linear1 (aten::mm)``; ``names``: of several operations there."""
    return f"{_where(operation)} ({', '.join(names) or short(operation)})"


def _where(operation: Operation) -> str:
    if operation.stage == "after backward":
        return "outside of modules, after the backward pass"
    return f"{operation.stage} {f'of {operation.module}' if operation.module else 'outside of submodules'}"


def short(operation: Operation) -> str:
    """The name without the overload ``default``."""
    return operation.name.removesuffix(".default")


def numbered(number: int) -> str:
    """``operation 94``, for the number of an :class:`Operation`."""
    return f"operation {number:,}" if number else "an operation before the first forward pass"


def numbers(pair: Sequence[int | None], labels: Labels) -> str:
    """``operation 8``, or ``operation 8 in A, operation 9 in B``; None for a side without the operation."""
    known = [(number, label) for number, label in zip(pair, labels, strict=True) if number is not None]
    if len(known) == 2 and pair[0] == pair[1]:
        return numbered(known[0][0])
    return ", ".join(f"{numbered(number)} {at(label)}" for number, label in known)


def module_of(operation: Operation) -> str:
    outside = "the code after backward()" if operation.stage == "after backward" else "the code outside of submodules"
    return operation.module or outside


def code_of(operation: Operation) -> str:
    """``the code of encoder``, or ``the code outside of submodules``."""
    return f"the code of {operation.module}" if operation.module else module_of(operation)


def summary(found: OperationDifference, labels: Labels) -> str:
    """The difference in one phrase: place, and what agrees and differs there."""
    here = place(found.operation)
    if found.kind == "output":
        return f"{here}: inputs agree, {_positions(found.differing, len(found.a[0].outputs), 'output')}"
    if found.kind == "input":
        return f"{here}: all operations before agree, {_inputs(found)}"
    if found.passed:
        return f"{here}: input {found.passed[0] + 1} is another tensor with equal bits"
    if found.kind == "form":
        return f"{here}: {listed(aspects_of(found))} differ"
    if found.kind == "order":
        return _order(found, labels)
    return "; ".join(alone(found.a, found.b, labels))


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


def _order(found: OperationDifference, labels: Labels) -> str:
    """``the same 4 operations in another order: forward of a (mm) first in A, forward of b (mm) first in B``."""
    first = [f"{_first_place(side)[0]} first" for side in (found.a, found.b)]
    return f"the same {count(len(found.a))} in another order: {both(first, labels)}"


def alone(a: Sequence[Operation], b: Sequence[Operation], labels: Labels) -> Iterator[str]:
    """``2 operations only in A: forward of b2 (aten::relu, aten::detach)``, for each side with operations."""
    for label, operations in zip(labels, (a, b), strict=True):
        if operations:
            text, is_only = _first_place(operations)
            yield f"{count(len(operations))} only {at(label)}{':' if is_only else ', the first:'} {text}"


def before(gap: Gap, labels: Labels) -> str:
    """A gap before the difference."""
    return f"before{'' if gap.has_influence else ', without influence'}: {_of_gap(gap, labels)}"


def _of_gap(gap: Gap, labels: Labels) -> str:
    return " and ".join(alone(gap.a, gap.b, labels))


def _first_place(operations: Sequence[Operation]) -> tuple[str, bool]:
    """The first place with the first names there, and whether there is no other place."""
    first = operations[0]
    here = [*takewhile(lambda item: (item.stage, item.module) == (first.stage, first.module), operations)]
    names = [*dict.fromkeys(map(short, here))]
    named = names[:_MAX_NAMES] if len(names) <= _MAX_NAMES else [*names[:_MAX_NAMES], "..."]
    return place(first, named), len(here) == len(operations)


def count(number: int) -> str:
    return f"{number:,} operation{'s' * (number != 1)}"


def at(label: str) -> str:
    """``in A``, ``on rank 1``."""
    return f"{'on' if label.startswith('rank') else 'in'} {label}"


def both(texts: Sequence[str], labels: Labels) -> str:
    """``1 in A, 2 in B``."""
    return ", ".join(f"{text} {at(label)}" for text, label in zip(texts, labels, strict=True))


def listed(nouns: Sequence[str]) -> str:
    """``settings, dtypes and shapes``."""
    *others, last = nouns
    return f"{', '.join(others)} and {last}" if others else last


def aspects(a: Operation, b: Operation) -> list[str]:
    """Nouns for the differences of two operations besides their bits.

    With other numbers of tensors their dtypes, shapes and strides are not compared.
    """
    tensors = (*a.inputs, *a.outputs), (*b.inputs, *b.outputs)
    is_more = (len(a.inputs), len(a.outputs)) != (len(b.inputs), len(b.outputs))
    parameters = [names[: min(len(a.inputs), len(b.inputs))] for names in (a.parameters, b.parameters)]
    if is_more:
        tensors = (), ()
    dtypes, shapes = ([[value.kind.partition(" ")[part] for value in side] for side in tensors] for part in (0, 2))
    layouts = [[value.layout for value in side] for side in tensors]
    found = {
        "settings": a.settings != b.settings,
        "number of tensors": is_more,
        "dtypes": dtypes[0] != dtypes[1],
        "parameters": parameters[0] != parameters[1],
        "shapes": shapes[0] != shapes[1],
        "strides": layouts[0] != layouts[1],
        "random generators": a.generator != b.generator,
    }
    return [noun for noun, differs in found.items() if differs]


def aspects_of(found: OperationDifference) -> list[str]:
    """The aspects of a difference in form."""
    return aspects(found.a[0], found.b[0])


def details(found: OperationDifference, labels: Labels) -> Iterator[str]:
    """A phrase for each differing value and setting, and for further operations that only one side has."""
    noun = "output" if found.kind == "output" else "input"
    for index, (a, b) in zip(found.differing[:3], found.differing_values, strict=False):
        yield _value(f"{noun} {index + 1}", a, b, labels)
    if found.kind not in ("sequence", "order"):
        yield from _arguments(found.a[0], found.b[0], labels)
        yield from _circumstances(found.a[0], found.b[0], labels)
    for gap in found.later[:_MAX_LATER]:
        yield f"later: {_of_gap(gap, labels)}"


def _value(noun: str, a: Value, b: Value, labels: Labels) -> str:
    digests = [value.digest or "no digest" for value in (a, b)]
    if a.kind == b.kind:
        return f"{noun}, {a.kind}: {both(digests, labels)}"
    return f"{noun}: {both([f'{value.kind} {digest}' for value, digest in zip((a, b), digests, strict=True)], labels)}"


def _arguments(a: Operation, b: Operation, labels: Labels) -> Iterator[str]:
    if a.settings != b.settings:
        texts = [(text or "none given")[:_MAX_SETTINGS] for text in (a.settings, b.settings)]
        yield f"settings: {both(texts, labels)}{_KEPT if a.name.startswith('aten::bernoulli_') else ''}"
    for index, names in enumerate(zip(a.parameters, b.parameters, strict=False)):
        if names[0] != names[1]:
            yield f"input {index + 1}: {both([repr(name) if name else 'no parameter' for name in names], labels)}"


def _circumstances(a: Operation, b: Operation, labels: Labels) -> Iterator[str]:
    if a.generator != b.generator:
        yield f"random generator: {both([a.generator or 'none', b.generator or 'none'], labels)}"
    for index, (left, right) in enumerate(zip(a.inputs, b.inputs, strict=False)):
        if left.layout != right.layout:
            texts = [value.layout or "contiguous" for value in (left, right)]
            yield f"strides of input {index + 1}: {both(texts, labels)}"

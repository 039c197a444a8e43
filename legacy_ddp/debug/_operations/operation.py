"""Operations as they ran, the first difference of two sequences of operations, and phrases about both. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from legacy_ddp._text import listed

Stage = Literal["forward", "backward", "after backward"]
"""``after backward`` is no stage of a trace: :func:`with_after_backward` sets it."""


@dataclass(frozen=True)
class Value:
    """A tensor that an operation read or wrote.

    ``kind``: dtype and shape, as ``float32 (8, 10)``. ``layout``: empty for a contiguous tensor on the CPU, otherwise
    strides and device as text. ``digest``: 16 hexadecimal digits (:func:`legacy_ddp.debug.digest`), None for a tensor
    without a digest: see :class:`OperationCapture`.
    """

    kind: str
    layout: str
    digest: str | None


@dataclass(frozen=True)
class Operation:
    """An operation of forward or backward, as it ran on one rank.

    ``name``: with the overload, as ``aten::add.Tensor``. ``stage``: ``backward`` inside of autograd's backward pass,
    otherwise ``forward``. ``micro_batch``: number of the forward pass of the model in this step, from 1; 0 before the
    first. ``module``: path of the innermost module of the model, as ``encoder.layers.3.linear1``; for the backward pass
    the module whose forward pass made the node; empty outside of modules (the loss) and in the model itself.
    ``parameters``: for each input the name of the parameter or buffer that it is, or is a view of; empty for another
    tensor. ``inputs``: tensors in the order of arguments, before the operation. ``outputs``: returned tensors, and
    inputs that the operation changed. ``settings``: all other arguments as text. ``generator``: 16 hexadecimal digits
    for the random generator's state before a random operation, otherwise empty.

    ``number``: the place in the order of execution, for texts. 1 is the first operation of the step in a forward pass
    of the model, or the first of all if none is in a forward pass. 0 stands for all operations before (the preparation
    of a batch); a trace does not hold these.
    """

    name: str
    stage: Stage
    micro_batch: int
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    settings: str
    generator: str
    number: int = field(default=0, compare=False, repr=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for operations at the same place in the code."""
        return self.stage, self.module, self.name

    @property
    def base_name(self) -> str:
        """The name without namespace and overload: ``bernoulli_``."""
        return self.name.rpartition("::")[2].partition(".")[0]

    @property
    def writes_in_place(self) -> bool:
        """Whether the name says that an input is written: ``aten::add_.Tensor``."""
        return self.name.partition(".")[0].endswith("_")

    @property
    def may_write(self) -> bool:
        """Whether the operation writes in place, or to running statistics."""
        return self.writes_in_place or "batch_norm" in self.name


def with_after_backward(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a step, with the stage ``after backward`` for those of the code after ``backward()``.

    These are operations outside of modules, behind the last backward operation of their micro-batch.
    """
    last = {item.micro_batch: index for index, item in enumerate(operations) if item.stage == "backward"}
    found = list(operations)
    for index, item in enumerate(operations):
        if item.stage == "forward" and not item.module and index > last.get(item.micro_batch, index):
            found[index] = replace(item, stage="after backward")
    return tuple(found)


Kind = Literal["output", "input", "sequence", "order", "form"]


@dataclass(frozen=True)
class Gap:
    """Operations without a counterpart: ``a`` at ``start_a`` of A, ``b`` at ``start_b`` of B; either may be empty.

    Positions count from 0. ``has_influence``: see :func:`with_influence`.
    """

    start_a: int
    start_b: int
    a: tuple[Operation, ...]
    b: tuple[Operation, ...]
    has_influence: bool = False


@dataclass(frozen=True)
class Origin:
    """Where a differing input comes from.

    ``parameter``: name of the parameter or buffer that the input is, or empty. ``writer_a``, ``writer_b``: position of
    the last earlier operation with this output, in A and in B; None if no operation of the step returned the input.
    ``operation_a``, ``operation_b``: the operations at these positions. ``operation_read``: of A, the last earlier
    operation that read the parameter, if both sides have one. ``is_argument``: on both sides, the input is a recorded
    argument of the model's forward passes.
    """

    parameter: str = ""
    writer_a: int | None = None
    writer_b: int | None = None
    operation_a: Operation | None = field(default=None, compare=False)
    operation_b: Operation | None = field(default=None, compare=False)
    operation_read: Operation | None = field(default=None, compare=False)
    is_argument: bool = False


@dataclass(frozen=True)
class OperationDifference:
    """The first difference of two sequences of operations, A and B.

    ``kind``:

    - ``output``: the inputs agree in dtype, shape and bits, and an output differs: this operation is the cause.
    - ``input``: an input differs, although all operations before agree; see ``origin``.
    - ``sequence``: operations that only one sequence has.
    - ``order``: the same operations in another order.
    - ``form``: settings, layout, parameters or generator of an operation differ, and no value.

    ``start_a``, ``start_b``: positions of ``a`` and ``b`` in their sequences, from 0. ``a``, ``b``: the operations, one
    each unless the kind is ``sequence`` or ``order``. ``differing``: positions of the differing outputs or inputs.
    ``earlier``: gaps before; none of them wrote a differing input. ``later``: gaps behind, without effect.
    ``has_effect``: values of operations of both sides differ. ``tensors_differ``: no such values differ, but tensors of
    the step (gradients, parameters, buffers) do.
    """

    kind: Kind
    start_a: int
    start_b: int
    a: tuple[Operation, ...]
    b: tuple[Operation, ...]
    differing: tuple[int, ...] = ()
    origin: Origin = Origin()
    earlier: tuple[Gap, ...] = ()
    later: tuple[Gap, ...] = ()
    has_effect: bool = True
    tensors_differ: bool = False

    @property
    def operation(self) -> Operation:
        """The operation to name: of A, or of B if only B has operations here."""
        return (self.a or self.b)[0]

    @property
    def numbers(self) -> tuple[int | None, int | None]:
        """The numbers of :attr:`operation` in A and in B; None for a side without it."""
        a, b = (side[0].number if side else None for side in (self.a, self.b))
        return (a, None if self.a else b) if self.kind in ("sequence", "order") else (a, b)

    @property
    def passed(self) -> tuple[int, ...]:
        """Positions of inputs with equal bits that are another parameter, or a parameter on only one side."""
        return other_parameters(self.a[0], self.b[0]) if self.kind == "form" else ()

    @property
    def differing_values(self) -> tuple[tuple[Value, Value], ...]:
        """The differing outputs or inputs, each of A and of B."""
        if not self.differing:
            return ()
        left, right = self.a[0], self.b[0]
        sides = (left.outputs, right.outputs) if self.kind == "output" else (left.inputs, right.inputs)
        return tuple((sides[0][index], sides[1][index]) for index in self.differing if index < min(map(len, sides)))


def other_parameters(a: Operation, b: Operation) -> tuple[int, ...]:
    """Positions of inputs with equal bits and other names of parameters. A view has no bits."""
    values = zip(a.parameters, b.parameters, a.inputs, b.inputs, strict=False)
    return tuple(
        index
        for index, (left, right, of_a, of_b) in enumerate(values)
        if left != right and of_a.digest is not None and of_a.digest == of_b.digest
    )


Labels = tuple[str, str]
"""The names of the two sides in texts: ``A`` and ``B``, or ``rank 0`` and ``rank 1``."""

_MAX_SETTINGS = 120  # characters
_MAX_NAMES = 3  # of operations that only one side has
_KEPT = "; p is the probability of keeping an element, 0.5 by default, and dropout has 1 - p"
_MAX_LATER = 3  # gaps after a difference


def place(operation: Operation, names: Sequence[str] = ()) -> str:
    """``backward of encoder.layers.3.linear1 (aten::mm)``; ``names``: of several operations there."""
    return f"{_where(operation)} ({', '.join(names) or short(operation)})"


def _where(operation: Operation) -> str:
    if operation.stage == "after backward":
        return "outside of modules, after the backward pass"
    return f"{operation.stage} {f'of {operation.module}' if operation.module else 'outside of submodules'}"


def short(operation: Operation) -> str:
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
    """One phrase: the place of the difference, and what agrees and differs there."""
    here = place(found.operation)
    if found.kind == "output":
        return f"{here}: inputs agree, {_positions(found.differing, len(found.a[0].outputs), 'output')}"
    if found.kind == "input":
        return f"{here}: all operations before agree, {_inputs(found)}"
    if found.passed:
        return f"{here}: input {found.passed[0] + 1} is another tensor with equal bits"
    if found.kind == "form":
        return f"{here}: {listed(aspects(found.a[0], found.b[0]))} differ"
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
    numbers = listed([*(str(index + 1) for index in differing[:3]), *more])
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
    return f"before{'' if gap.has_influence else ', without influence'}: {_of_gap(gap, labels)}"


def _of_gap(gap: Gap, labels: Labels) -> str:
    return " and ".join(alone(gap.a, gap.b, labels))


def _first_place(operations: Sequence[Operation]) -> tuple[str, bool]:
    """The first place with the first names there, and whether all operations are there."""
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


def aspects(a: Operation, b: Operation) -> list[str]:
    """Nouns for the differences of two operations whose tensors agree in number, dtype, shape and bits."""
    layouts = [[value.layout for value in (*operation.inputs, *operation.outputs)] for operation in (a, b)]
    found = {
        "settings": a.settings != b.settings,
        "parameters": a.parameters != b.parameters,
        "strides": layouts[0] != layouts[1],
        "random generators": a.generator != b.generator,
    }
    return [noun for noun, differs in found.items() if differs]


def details(found: OperationDifference, labels: Labels) -> Iterator[str]:
    """A phrase for each differing value and setting, and for later operations that only one side has."""
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

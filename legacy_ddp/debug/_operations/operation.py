"""Records of operations as they ran, and of the first difference of two sequences of operations. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Stage = Literal["forward", "backward", "after backward"]
"""``after backward`` is no stage of a trace: :func:`with_after_backward` tells it from the operations before."""


@dataclass(frozen=True)
class Value:
    """A tensor that an operation read or wrote.

    ``kind``: dtype and shape, as ``float32 (8, 10)``. ``layout``: empty for a contiguous tensor on the CPU, otherwise
    strides and device as text. ``digest``: 16 hexadecimal digits of the bits in row-major order
    (:func:`legacy_ddp.debug.digest`); None without defined content (the output of ``aten::empty``), or for a
    tensor without a digest.
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
    tensor. ``inputs``: tensors in the order of arguments, as they were before the operation. ``outputs``: returned
    tensors, and inputs that the operation changed. ``settings``: all other arguments as text. ``generator``: 16
    hexadecimal digits for the random generator's state before a random operation, otherwise empty.

    ``number``: the place in the order of execution, in every text about operations. 1 is the first operation of the
    step in a forward pass of the model, or the first of all if none is in a forward pass. 0 stands for all operations
    before (the preparation of a batch), which a trace does not hold.
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
        """What operations at the same place in the code have in common."""
        return self.stage, self.module, self.name

    @property
    def base_name(self) -> str:
        """The name without namespace and overload: ``bernoulli_``."""
        return self.name.rpartition("::")[2].partition(".")[0]

    @property
    def writes_in_place(self) -> bool:
        """Whether the name tells of a write to an input: ``aten::add_.Tensor``."""
        return self.name.partition(".")[0].endswith("_")

    @property
    def may_write(self) -> bool:
        """Whether the operation writes in place, or to running statistics."""
        return self.writes_in_place or "batch_norm" in self.name

    @property
    def is_view(self) -> bool:
        """Whether no tensor has a digest, and the operation is no allocation."""
        values = (*self.inputs, *self.outputs)
        return bool(values) and not _digests(values) and "empty" not in self.name

    @property
    def keeps_bits(self) -> bool:
        """Whether the results are views, or have the bits of an input (``clone``, a sum over a single row)."""
        outputs = _digests(self.outputs)
        return self.is_view or (bool(outputs) and outputs <= _digests(self.inputs))


def with_after_backward(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a step, with the stage ``after backward`` for the code after ``backward()``: operations outside
    of modules, behind the last backward operation of their micro-batch.
    """
    last = {item.micro_batch: index for index, item in enumerate(operations) if item.stage == "backward"}
    found = list(operations)
    for index, item in enumerate(operations):
        if item.stage == "forward" and not item.module and index > last.get(item.micro_batch, index):
            found[index] = replace(item, stage="after backward")
    return tuple(found)


def _digests(values: Iterable[Value]) -> set[str]:
    return {value.digest for value in values if value.digest is not None}


Kind = Literal["output", "input", "sequence", "order", "form"]


@dataclass(frozen=True)
class Gap:
    """Operations without a counterpart: ``a`` at ``start_a`` of A, ``b`` at ``start_b`` of B; either may be empty.

    Positions count from 0. ``has_influence``: later operations or values depend on them.
    """

    start_a: int
    start_b: int
    a: tuple[Operation, ...]
    b: tuple[Operation, ...]
    has_influence: bool = False


@dataclass(frozen=True)
class Origin:
    """The way of a differing input into its operation.

    ``parameter``: name of the parameter or buffer that the input is, or empty. ``writer_a``,
    ``writer_b``: position of the last earlier operation with this output, in A and in B; None if no operation of the
    step wrote the input. ``reader``: position in A of the last earlier operation with the parameter's bits, or None.
    ``operation_a``, ``operation_b``, ``operation_read``: the operations of the positions ``writer_a``, ``writer_b`` and
    ``reader``. ``is_argument``: the bits of both sides are arguments of the model's forward passes, as far as recorded.
    """

    parameter: str = ""
    writer_a: int | None = None
    writer_b: int | None = None
    reader: int | None = None
    operation_a: Operation | None = field(default=None, compare=False)
    operation_b: Operation | None = field(default=None, compare=False)
    operation_read: Operation | None = field(default=None, compare=False)
    is_argument: bool = False


@dataclass(frozen=True)
class OperationDifference:
    """The first difference of two sequences of operations, A and B.

    ``kind``:

    - ``output``: the inputs agree in dtype, shape and bits, and an output differs: the culprit.
    - ``input``: an input differs, although all operations before agree; see ``origin``.
    - ``sequence``: operations that only one sequence has.
    - ``order``: the same operations in another order.
    - ``form``: settings, layout, dtype, dimensions or generator of an operation differ, and no value, as far as values
      can be compared (ranks have data of their own).

    ``start_a``, ``start_b``: positions of ``a`` and ``b`` in their sequences, from 0. ``a``, ``b``: the operations, one
    each unless the kind is ``sequence`` or ``order``. ``differing``: positions of the differing outputs or inputs.
    ``earlier``: gaps before, none of which wrote a differing input. ``later``: gaps behind, without effect.
    ``has_effect``: values of operations of both sides differ; None if values were not compared. ``tensors_differ``:
    without effect, and tensors of the step (gradients, parameters, buffers) differ nevertheless.
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
    has_effect: bool | None = True
    tensors_differ: bool = False

    @property
    def operation(self) -> Operation:
        """The operation to name: of A, or of B if only B has operations here."""
        return (self.a or self.b)[0]

    @property
    def numbers(self) -> tuple[int | None, int | None]:
        """The numbers of the operation to name, in A and in B; None for a side without it."""
        a, b = (side[0].number if side else None for side in (self.a, self.b))
        return (a, None if self.a else b) if self.kind in ("sequence", "order") else (a, b)

    @property
    def passed(self) -> tuple[int, ...]:
        """Positions of inputs with equal bits that are another parameter, or a parameter on only one side."""
        if self.kind != "form" or self.has_effect is None:
            return ()
        return other_parameters(self.a[0], self.b[0])

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

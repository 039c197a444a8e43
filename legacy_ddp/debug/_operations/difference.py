"""Records of the first difference of two sequences of operations. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from legacy_ddp.debug._operations.operation import Operation, Value

Kind = Literal["output", "input", "sequence", "order", "form"]


@dataclass(frozen=True)
class Gap:
    """Operations of a single sequence: ``a`` at ``start_a`` of A, ``b`` at ``start_b`` of B; either may be empty.

    Positions count from 0. ``has_influence``: later operations or values depend on them, see :func:`with_influence`.
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
    - ``sequence``: operations of one sequence alone.
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
        """Positions of inputs with equal bits that are another parameter, or a parameter on one side alone."""
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

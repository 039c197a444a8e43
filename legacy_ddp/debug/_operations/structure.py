"""The first difference between two ranks that ran the same step, each on data of its own. Pure."""

from collections.abc import Callable, Iterator, Sequence

from legacy_ddp.debug._operations.align import agree, aligned, gap_of, last_reader, sequence_difference
from legacy_ddp.debug._operations.bits import is_view, keeps_bits, passes_on
from legacy_ddp.debug._operations.describe import aspects
from legacy_ddp.debug._operations.difference import Gap, OperationDifference, Origin
from legacy_ddp.debug._operations.flow import Flow, Influence
from legacy_ddp.debug._operations.form import form, has_other_sizes
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._operations.passes import after_read_number, common_micro_batches, of_model
from legacy_ddp.debug._operations.turns import Turns


class Structure:
    """The comparison of the operations of two ranks, as far as data leave them equal.

    Compared are the sequence of operations, the dtypes and dimensions of their tensors, their settings (see
    :func:`~legacy_ddp.debug._operations.form.form`), and the bits of weights: inputs that are parameters or buffers
    with ``is_shared(name)``. Not compared are sizes, strides, all other bits and random generators.

    ``a``, ``b``: the operations of the common micro-batches, in which positions count. ``difference``: the first
    difference without an explanation by other data, or None. ``unused``: operations of a single side without influence,
    before the difference.
    """

    def __init__(self, a: Sequence[Operation], b: Sequence[Operation], is_shared: Callable[[str], bool]) -> None:
        self.a, self.b = sides = common_micro_batches(a, b)
        self.unused: list[Gap] = []
        self._is_shared = is_shared
        self._other_paths: set[str] = set()  # modules with a forward pass in which data led to other operations
        self._loops: set[str] = set()  # modules with several loops of other lengths
        self._blocks = [*aligned(*sides)]
        self._flows = [*map(Flow, sides)]
        self._turns = [*map(Turns, sides)]
        # Operations by identity: many are equal.
        self._of_model = {id(item) for side in sides for item in of_model(side)}
        self._after_number = {id(item) for side in sides for item in after_read_number(side)}
        self._after_other_sizes = {id(item) for item in self._find_after_other_sizes()}
        self.difference = self._first_difference()

    def judge(self, a: Operation, b: Operation) -> str:
        """The comparison of two operations at the same place, in words."""
        if self._forms_differ(a, b):
            return f"{' and '.join(aspects(a, b, of_ranks=True))} differ"
        return "weights differ" if self._differing_weights(a, b) else "agrees"

    def _first_difference(self) -> OperationDifference | None:
        state: Gap | None = None
        for block in self._blocks:
            if block.is_common:
                found = next(filter(None, (self._pair_difference(i, j) for i, j in block.pairs)), None)
                if found:
                    return found
                continue
            gap = gap_of(self.a, self.b, block)
            if self._follows_from_data(gap):
                continue
            influences = self._influences(gap)
            if "values" in influences:
                return sequence_difference(self._forward_part(gap), has_effect=None)
            if "state" in influences:
                state = state or gap
            else:
                self.unused.append(gap)
        return sequence_difference(state, has_effect=None) if state else None

    def _pair_difference(self, i: int, j: int) -> OperationDifference | None:
        a, b = self.a[i], self.b[j]
        if self._is_unpaired(a):
            return None
        if self._forms_differ(a, b):
            return OperationDifference("form", i, j, (a,), (b,), has_effect=None)
        if weights := self._differing_weights(a, b):
            name = a.parameters[weights[0]]
            reader = last_reader(self.a, i, name)
            origin = Origin(name, reader=reader, operation_read=None if reader is None else self.a[reader])
            return OperationDifference("input", i, j, (a,), (b,), weights, origin)
        return None

    def _forms_differ(self, a: Operation, b: Operation) -> bool:
        both = {id(a), id(b)}
        has_dimensions = not both & self._after_other_sizes
        has_fractions = both <= self._of_model and not both <= self._after_number
        left, right = (
            form(item, other, has_dimensions=has_dimensions, has_fractions=has_fractions)
            for item, other in ((a, b), (b, a))
        )
        return left != right

    def _is_unpaired(self, operation: Operation) -> bool:
        """Whether the operation need not have a counterpart at the same place."""
        is_back = operation.stage == "backward" and operation.module in self._other_paths
        return is_back or operation.module in self._loops

    def _differing_weights(self, a: Operation, b: Operation) -> tuple[int, ...]:
        """Positions of inputs that are the same shared parameter, with other bits."""
        inputs = enumerate(zip(a.parameters, b.parameters, a.inputs, b.inputs, strict=False))
        return tuple(
            index
            for index, (name, other, *values) in inputs
            if name and name == other and self._is_shared(name) and not agree(*values)
        )

    def _influences(self, gap: Gap) -> set[Influence]:
        starts = (gap.start_a, gap.a), (gap.start_b, gap.b)
        return {flow.influence(start, start + len(own)) for flow, (start, own) in zip(self._flows, starts, strict=True)}

    def _forward_part(self, gap: Gap) -> Gap:
        """The operations of the forward pass that a gap in the backward pass belongs to, or else the gap.

        Without other bits, as of ``h + 0 * x``, operations of the forward pass seem to be unused.
        """
        back = {(item.micro_batch, item.module) for item in (*gap.a, *gap.b) if item.stage == "backward"}
        for unused in self.unused:
            own = [item for item in (*unused.a, *unused.b) if passes_on(item) and not is_view(item)]
            if back & {(item.micro_batch, item.module) for item in own} and bool(unused.a) == bool(gap.a):
                self.unused.remove(unused)
                return unused
        return gap

    def _find_after_other_sizes(self) -> Iterator[Operation]:
        """The operations of both sides after the first with tensors of other sizes."""
        pairs = (pair for block in self._blocks if block.is_common for pair in block.pairs)
        first = next(((i, j) for i, j in pairs if has_other_sizes(self.a[i], self.b[j])), None)
        if first:
            yield from (*self.a[first[0] + 1 :], *self.b[first[1] + 1 :])

    def _follows_from_data(self, gap: Gap) -> bool:
        """Whether other data explain operations of a single side.

        After tensors of other sizes, data explain operations that keep all bits (``reshape`` may need a view) and
        further turns of a loop. After a read of a number on both sides, data explain further turns of a loop. The
        backward pass of the module then has other operations, too, which cannot be paired.
        """
        own = (*gap.a, *gap.b)
        if all(map(self._is_unpaired, own)):
            return True
        before = [side[start - 1] for side, start in ((self.a, gap.start_a), (self.b, gap.start_b)) if start]
        has_other_sizes = id(own[0]) in self._after_other_sizes
        has_numbers = len(before) == 2 and {*map(id, before)} <= self._after_number
        follows = (has_other_sizes and all(map(keeps_bits, own))) or (
            (has_other_sizes or has_numbers) and self._is_further_turn(gap)
        )
        if follows:
            self._other_paths.update(item.module for item in own)
        elif has_other_sizes and self._is_of_loops(gap):
            self._loops.update(item.module for item in own)
            return True
        return follows

    def _is_of_loops(self, gap: Gap) -> bool:
        """Whether both sides run the operations of a gap, in modules with a loop: several loops in a row (layers)."""
        modules = {item.module for item in (*gap.a, *gap.b)}
        has_loops = all(turns.has_loop(module) for turns in self._turns for module in modules)
        return has_loops and self._turns[0].holds(gap.b) and self._turns[1].holds(gap.a)

    def _is_further_turn(self, gap: Gap) -> bool:
        """Whether a single side runs operations once more, directly after the same operations."""
        turns, start, own = (self._turns[0], gap.start_a, gap.a) if gap.a else (self._turns[1], gap.start_b, gap.b)
        return not (gap.a and gap.b) and turns.repeats(start, start + len(own))

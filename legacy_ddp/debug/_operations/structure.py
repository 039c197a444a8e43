"""The first difference between two ranks that ran the same step, each on data of its own. Pure."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from legacy_ddp.debug._operations.align import agree, aligned, gap_of, last_reader, sequence_difference
from legacy_ddp.debug._operations.describe import aspects, sizes
from legacy_ddp.debug._operations.flow import Flow, Influence
from legacy_ddp.debug._operations.operation import Gap, Operation, OperationDifference, Origin, Value

_ARGUMENT = re.compile(r", (?=\w+=)")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\w.+-]*|inf\b|nan\b)")
_INTEGER = re.compile(r"(?<![\w.])(?<!e[-+])-?\d+(?![\w.])")
_DEVICE_INDEX = re.compile(r"\b([a-z]+):\d+")
# An argument without any word: a number, or a list of numbers.
_NUMBERS_ALONE = re.compile(r"(?:\w+=)?[\[\]#, ]*")
_DIMENSION = re.compile(r"dims?\d?=")
# The operation of item(), int() and if on a tensor: later code may depend on data.
_READ_NUMBER = "aten::_local_scalar_dense"
# A loop has at least as many computing operations in a turn, and at most.
_SHORTEST, _LONGEST = 3, 200


class Structure:
    """The comparison of the operations of two ranks, as far as data leave them equal.

    Compared are the sequence of operations, the dtypes and dimensions of their tensors, their settings (see ``_form``),
    and the bits of weights: inputs that are parameters or buffers with ``is_shared(name)``. Not compared are sizes,
    strides, all other bits and random generators.

    ``a``, ``b``: the operations of the common micro-batches, in which positions count. ``difference``: the first
    difference without an explanation by other data, or None. ``unused``: operations of a single side without influence,
    before the difference.
    """

    def __init__(self, a: Sequence[Operation], b: Sequence[Operation], is_shared: Callable[[str], bool]) -> None:
        self.a, self.b = sides = _common_micro_batches(a, b)
        self.unused: list[Gap] = []
        self._is_shared = is_shared
        self._other_paths: set[str] = set()  # modules with a forward pass in which data led to other operations
        self._loops: set[str] = set()  # modules with several loops of other lengths
        self._blocks = [*aligned(*sides)]
        self._flows = [*map(Flow, sides)]
        self._turns = [*map(_Turns, sides)]
        # Operations by identity: many are equal.
        self._of_model = {id(item) for side in sides for item in _of_model(side)}
        self._after_number = {id(item) for side in sides for item in _after_read_number(side)}
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
            _form(item, other, has_dimensions=has_dimensions, has_fractions=has_fractions)
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

        If they change no bits, as in ``h + 0 * x``, operations of the forward pass seem to be unused.
        """
        back = {(item.micro_batch, item.module) for item in (*gap.a, *gap.b) if item.stage == "backward"}
        for unused in self.unused:
            own = [item for item in (*unused.a, *unused.b) if item.passes_on and not item.is_view]
            if back & {(item.micro_batch, item.module) for item in own} and bool(unused.a) == bool(gap.a):
                self.unused.remove(unused)
                return unused
        return gap

    def _find_after_other_sizes(self) -> Iterator[Operation]:
        """The operations of both sides after the first with tensors of other sizes."""
        pairs = (pair for block in self._blocks if block.is_common for pair in block.pairs)
        first = next(((i, j) for i, j in pairs if _has_other_sizes(self.a[i], self.b[j])), None)
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
        follows = (has_other_sizes and all(item.keeps_bits for item in own)) or (
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


def _form(operation: Operation, other: Operation, *, has_dimensions: bool, has_fractions: bool) -> tuple[object, ...]:
    """The parts of an operation without influence of data; ``other``: the operation of the other rank.

    - The parameters, and dtype and number of dimensions (``has_dimensions``) of the tensors. Equal neighbours count as
      a single tensor: the length of a list (``unbind``, ``cat``) is a length of the data.
    - Words among the settings, as ``training=True``.
    - Two kinds of numbers among the settings, only for tensors of equal shapes in both operations: the
      arguments named ``dim``, which code chooses, and fractions (``has_fractions``), which are no sizes, positions or
      numbers of items. An operation without an input has no fractions here: ``arange`` may end with a fraction.
    """
    has_equal_shapes = _kinds(operation) == _kinds(other)
    has_fractions = has_fractions and has_equal_shapes and bool(operation.inputs)
    settings = _DEVICE_INDEX.sub(r"\1", operation.settings)
    arguments = _arguments(settings, has_equal_shapes=has_equal_shapes, has_fractions=has_fractions)
    inputs = [*zip(operation.parameters, _tensors(operation.inputs, has_dimensions=has_dimensions), strict=True)]
    outputs = _tensors(operation.outputs, has_dimensions=has_dimensions)
    return [*arguments], _merged(inputs), _merged(outputs)


def _has_other_sizes(a: Operation, b: Operation) -> bool:
    """Whether tensors or lists of tensors have other sizes, and tensors as many dimensions."""
    sides = ((a.inputs, b.inputs), (a.outputs, b.outputs))
    return _kinds(a) != _kinds(b) and all(_merged(_tensors(left)) == _merged(_tensors(right)) for left, right in sides)


def _kinds(operation: Operation) -> list[list[str]]:
    return [[value.kind for value in side] for side in (operation.inputs, operation.outputs)]


def _arguments(settings: str, *, has_equal_shapes: bool, has_fractions: bool) -> Iterator[str]:
    """The arguments that are compared, without the others."""
    numbers = _INTEGER if has_fractions else _NUMBER
    for argument in _ARGUMENT.split(settings):
        is_dimension = has_equal_shapes and _DIMENSION.match(argument)
        text = argument if is_dimension else numbers.sub("#", argument)
        if not _NUMBERS_ALONE.fullmatch(text):
            yield text


def _merged(items: Iterable[object]) -> list[object]:
    """The items; equal neighbours count as one."""
    return [item for item, _ in groupby(items)]


def _tensors(values: Iterable[Value], *, has_dimensions: bool = True) -> list[tuple[str, int]]:
    """Dtype and number of dimensions; without ``has_dimensions`` the dtype, and 0."""
    parts = (value.kind.partition(" ") for value in values)
    return [(dtype, len(sizes(shape)) if has_dimensions else 0) for dtype, _, shape in parts]


def _common_micro_batches(
    a: Sequence[Operation], b: Sequence[Operation]
) -> tuple[Sequence[Operation], Sequence[Operation]]:
    """The operations of both sides in micro-batches of both, without the operations between two micro-batches.

    With other numbers of micro-batches, a forward or backward pass without a counterpart is left out, too: one backward
    pass of several micro-batches counts as a part of the last.
    """
    numbers = [max((item.micro_batch for item in side), default=0) for side in (a, b)]
    if numbers[0] == numbers[1]:
        # Behind the last micro-batch stand the gradients' own operations, as a clipping of their norm.
        return _without_between(a, numbers[0]), _without_between(b, numbers[1])
    passes = {(item.micro_batch, item.stage) for item in a} & {(item.micro_batch, item.stage) for item in b}
    left, right = ([item for item in side if (item.micro_batch, item.stage) in passes] for side in (a, b))
    return _without_between(left, max(numbers)), _without_between(right, max(numbers))


def _without_between(operations: Sequence[Operation], last: int) -> list[Operation]:
    """Without the operations after the model's in all micro-batches before ``last``: a data loader's ``stack``."""
    found: list[Operation] = []
    for number, group in groupby(operations, key=lambda item: item.micro_batch):
        items = [*group]
        while number < last and items and not items[-1].module and items[-1].stage != "backward":
            items.pop()
        found += items
    return found


def _of_model(operations: Sequence[Operation]) -> Iterator[Operation]:
    """The operations of forward passes, in submodules and between them, where the model's own code runs.

    The record does not tell the model's own code from code outside, as the loss. Between the first and the last
    submodule of a single forward pass is only the model. With several forward passes in a micro-batch, the first
    operation in a submodule comes again; then nothing between submodules counts.
    """
    forward = [item for item in operations if item.stage == "forward"]
    for _, group in groupby(forward, key=lambda item: item.micro_batch):
        items = [*group]
        inner = [index for index, item in enumerate(items) if item.module]
        is_single = bool(inner) and [items[index].key for index in inner].count(items[inner[0]].key) == 1
        for index, item in enumerate(items):
            if item.module or (is_single and inner[0] < index < inner[-1]):
                yield item


def _after_read_number(operations: Sequence[Operation]) -> Iterator[Operation]:
    """The operations of each micro-batch after a number was read from a tensor."""
    for _, group in groupby(operations, key=lambda item: item.micro_batch):
        has_read = False
        for item in group:
            if has_read:
                yield item
            has_read = has_read or item.name == _READ_NUMBER


class _Turns:
    """The computing operations of a rank, to find the turns of a loop. Views are left out: those of a packed sequence
    differ from turn to turn.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        computing = [(index, item) for index, item in enumerate(operations) if not item.keeps_bits]
        self._positions = [index for index, _ in computing]
        self._keys = [item.key for _, item in computing]

    def repeats(self, start: int, end: int) -> bool:
        """Whether the operations from ``start`` to ``end`` (exclusive) are copies of the operations directly before.

        Several copies may stand in a row. The alignment pairs the first turns of both sides, and leaves the last
        without a pair.
        """
        first, last = (bisect_left(self._positions, position) for position in (start, end))
        own = self._keys[first:last]
        lengths = (length for length in range(1, min(len(own), first) + 1) if len(own) % length == 0)
        return any(own == self._keys[first - length : last - length] for length in lengths)

    def has_loop(self, module: str) -> bool:
        """Whether the forward pass of the module runs a row of operations twice in succession."""
        names = [name for stage, path, name in self._keys if (stage, path) == ("forward", module)]
        for length in range(_SHORTEST, min(_LONGEST, len(names) // 2) + 1):
            equal = 0
            for name, later in zip(names, names[length:], strict=False):
                equal = equal + 1 if name == later else 0
                if equal == length:
                    return True
        return False

    def holds(self, operations: Iterable[Operation]) -> bool:
        """Whether every computing operation has an equal one here, at any place."""
        known = {*self._keys}
        return all(item.keeps_bits or item.key in known for item in operations)

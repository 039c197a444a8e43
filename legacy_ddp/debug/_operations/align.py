"""Alignment of two sequences of operations on the same data, and their first difference. Pure."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain

from legacy_ddp.debug._operations.operation import (
    Gap,
    Operation,
    OperationDifference,
    Origin,
    Value,
    aspects,
    other_parameters,
)

# Sequences are aligned again where this many keys agree. One key may agree by chance: operations repeat.
_MEETING = 2
# Blocks with more items on a side are not refined, because the time grows with the product of both sides.
_REFINED = 400
# Gaps that are kept, each of those before and of those behind a difference.
_MAX_GAPS = 10


@dataclass(frozen=True)
class Block:
    """Items ``start_a`` to ``end_a`` (exclusive) of A beside items ``start_b`` to ``end_b`` of B.

    ``is_common``: the keys are equal in pairs. Otherwise no item has a counterpart, and one side may be empty.
    """

    start_a: int
    end_a: int
    start_b: int
    end_b: int
    is_common: bool

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(range(self.start_a, self.end_a), range(self.start_b, self.end_b), strict=True)


def aligned(a: Sequence[Operation], b: Sequence[Operation]) -> Iterator[Block]:
    """Blocks of operations with equal stage, module and name, and blocks of operations that only one sequence has."""
    return blocks([item.key for item in a], [item.key for item in b])


def blocks(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[Block]:
    """The blocks in order.

    After a difference, the next common block begins at the nearest place (fewest items skipped) where ``_MEETING`` keys
    agree, or at both ends. Time and memory are linear in the number of items.
    """
    i = j = 0
    meetings: _Meetings | None = None
    while i < len(a) or j < len(b):
        length = _common_length(a, i, b, j)
        if length:
            yield Block(i, i + length, j, j + length, is_common=True)
            i, j = i + length, j + length
        if i < len(a) or j < len(b):
            meetings = meetings or _Meetings(b)
            next_i, next_j = meetings.nearest(a, i, j)
            yield from _refined(a, b, Block(i, next_i, j, next_j, is_common=False))
            i, j = next_i, next_j


def _common_length(a: Sequence[Hashable], i: int, b: Sequence[Hashable], j: int) -> int:
    longest = min(len(a) - i, len(b) - j)
    return next((n for n in range(longest) if a[i + n] != b[j + n]), longest)


class _Meetings:
    """Positions in B by their next keys."""

    def __init__(self, b: Sequence[Hashable]) -> None:
        self._length = len(b)
        self._positions: dict[tuple[Hashable, ...], list[int]] = {}
        for j in range(len(b)):
            self._positions.setdefault(tuple(b[j : j + _MEETING]), []).append(j)

    def nearest(self, a: Sequence[Hashable], i: int, j: int) -> tuple[int, int]:
        """The nearest positions at or after ``i`` and ``j`` with equal next keys; both ends if there are none."""
        best, fewest = (len(a), self._length), len(a) - i + self._length - j
        for p in range(i, len(a)):
            if p - i >= fewest:
                break
            positions = self._positions.get(tuple(a[p : p + _MEETING]), [])
            index = bisect_left(positions, j)
            if index < len(positions) and (skipped := p - i + positions[index] - j) < fewest:
                best, fewest = (p, positions[index]), skipped
        return best


def _refined(a: Sequence[Hashable], b: Sequence[Hashable], block: Block) -> Iterator[Block]:
    """The block, split at its common items if it is small."""
    left, right = a[block.start_a : block.end_a], b[block.start_b : block.end_b]
    if max(len(left), len(right)) > _REFINED or not {*left} & {*right}:
        yield block
        return
    for tag, start_a, end_a, start_b, end_b in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        i, j = block.start_a, block.start_b
        yield Block(i + start_a, i + end_a, j + start_b, j + end_b, is_common=tag == "equal")


def first_difference(a: Sequence[Operation], b: Sequence[Operation]) -> OperationDifference | None:
    """The first difference of A and B in the order of execution; None if all operations agree.

    Operations are aligned by stage, module and name. The first pair with different values is the difference. If its
    inputs are equal, the operation is the cause. A different input comes from the data, from the weights, from
    operations that only one sequence has, or from a write that is no operation. If no values differ, the difference is
    the first of: an operation that takes another parameter with equal bits; operations with influence that only one
    sequence has; other operations that only one sequence has; different settings, layout or generator.

    Time and memory are linear in the number of operations.
    """
    gaps: list[Gap] = []
    forms: list[tuple[int, int]] = []
    waiting = deque(aligned(a, b))
    while waiting:
        block = waiting.popleft()
        if not block.is_common:
            left, right = a[block.start_a : block.end_a], b[block.start_b : block.end_b]
            gaps.append(Gap(block.start_a, block.start_b, tuple(left), tuple(right)))
            continue
        for i, j in block.pairs:
            if a[i] == b[j]:
                continue
            if not _values_differ(a[i], b[j]):
                # Unequal operations without an aspect: other numbers of micro-batches, or a digest on only one side.
                if aspects(a[i], b[j]):
                    forms.append((i, j))
            elif moved := _moved(a, b, i, j, waiting[0]) if waiting else ():
                waiting.popleft()
                waiting.extendleft(reversed(moved))
                break
            else:
                return _value_difference(a, b, i, j, gaps)
    return _without_other_values(a, b, gaps, forms)


def _moved(
    a: Sequence[Operation], b: Sequence[Operation], i: int, j: int, following: Block
) -> tuple[Block, Block] | tuple[()]:
    """The gap ``following``, moved to the pair ``i``, ``j``, and the pairs behind it; empty if it does not fit there.

    If neighbours have equal keys, for example two products of a module, only their values show which of them one
    sequence lacks.
    """
    more_a, more_b = following.end_a - following.start_a, following.end_b - following.start_b
    if following.is_common or (more_a and more_b):
        return ()
    longer, start, end, more = (a, i, following.start_a, more_a) if more_a else (b, j, following.start_b, more_b)
    if any(longer[at].key != longer[at + more].key for at in range(start, end)):
        return ()
    if _values_differ(a[i + more_a], b[j + more_b]):
        return ()
    gap = Block(i, i + more_a, j, j + more_b, is_common=False)
    return gap, Block(gap.end_a, following.end_a, gap.end_b, following.end_b, is_common=True)


def _without_other_values(
    a: Sequence[Operation], b: Sequence[Operation], gaps: Sequence[Gap], forms: Sequence[tuple[int, int]]
) -> OperationDifference | None:
    """The difference of sequences with equal values. ``forms``: positions of pairs that differ in form."""
    gaps = with_influence(gaps, a, b)
    passed = next(((i, j) for i, j in forms if other_parameters(a[i], b[j])), None)
    if gaps and passed is None:
        first = next((index for index, gap in enumerate(gaps) if gap.has_influence), 0)
        found = _gap_difference(a, b, gaps[first], gaps[:first], has_effect=False)
        return found if found.kind == "order" else replace(found, later=tuple(gaps[first + 1 :][:_MAX_GAPS]))
    if not forms:
        return None
    i, j = passed or forms[0]
    number = sum(gap.start_a <= i and gap.start_b <= j for gap in gaps)
    earlier, later = (tuple(part[:_MAX_GAPS]) for part in (gaps[:number], gaps[number:]))
    return OperationDifference("form", i, j, (a[i],), (b[j],), earlier=earlier, later=later, has_effect=False)


def _gap_difference(
    a: Sequence[Operation], b: Sequence[Operation], gap: Gap, earlier: Sequence[Gap], *, has_effect: bool
) -> OperationDifference:
    """The gap as a difference of kind ``order`` or ``sequence``."""
    kept = tuple(earlier[:_MAX_GAPS])
    found = OperationDifference("sequence", gap.start_a, gap.start_b, gap.a, gap.b, earlier=kept, has_effect=has_effect)
    left, right = a[gap.start_a :], b[gap.start_b :]
    count = _reordered(left, right)
    return replace(found, kind="order", a=tuple(left[:count]), b=tuple(right[:count])) if count else found


def _reordered(a: Sequence[Operation], b: Sequence[Operation]) -> int:
    """The number of operations at the beginning of A and of B that are the same in another order; 0 without any.

    Operations are the same if stage, module, name, parameters and settings are equal.
    """

    def items(part: Iterable[Operation]) -> Iterator[Hashable]:
        return ((item.key, item.parameters, item.settings) for item in part)

    surplus: Counter[Hashable] = Counter()  # of A over B
    for block in aligned(a, b):
        if not block.is_common:
            surplus.update(items(a[block.start_a : block.end_a]))
            surplus.subtract(items(b[block.start_b : block.end_b]))
        if not any(surplus.values()):  # up to here, A and B have the same operations
            return 0 if block.is_common else block.end_a  # a common block here is the first: A and B begin alike
    return 0


def _values_differ(a: Operation, b: Operation) -> bool:
    return bool(differing(a.inputs, b.inputs) or differing(a.outputs, b.outputs))


def _value_difference(
    a: Sequence[Operation], b: Sequence[Operation], i: int, j: int, gaps: Sequence[Gap]
) -> OperationDifference:
    """The difference of operation ``i`` of A and operation ``j`` of B. ``gaps``: before them.

    If inputs differ and an earlier gap may be the cause, the gap is the difference.
    """
    gaps = with_influence(gaps, a, b)
    earlier = tuple(gaps[:_MAX_GAPS])
    if inputs := differing(a[i].inputs, b[j].inputs):
        origin = _origin(a, b, i, j, inputs[0])
        found = OperationDifference("input", i, j, (a[i],), (b[j],), inputs, origin, earlier)
        cause = _cause(gaps, found)
        return _gap_difference(a, b, cause, gaps[: gaps.index(cause)], has_effect=True) if cause else found
    outputs = differing(a[i].outputs, b[j].outputs)
    return OperationDifference("output", i, j, (a[i],), (b[j],), outputs, earlier=earlier)


def agree(a: Value, b: Value) -> bool:
    """Whether dtype, shape and bits agree; only dtype and shape if a value has no digest."""
    return a.kind == b.kind and (a.digest == b.digest or a.digest is None or b.digest is None)


def differing(a: Sequence[Value], b: Sequence[Value]) -> tuple[int, ...]:
    """Positions of values that differ, and of values that only one side has."""
    both = min(len(a), len(b))
    found = [index for index in range(both) if not agree(a[index], b[index])]
    return (*found, *range(both, max(len(a), len(b))))


def _cause(gaps: Sequence[Gap], found: OperationDifference) -> Gap | None:
    """The gap that may be the cause of differing inputs; None without one.

    This is the last gap with an operation that returned a differing input. Without one, it is the last gap with an
    operation in place, because this may have written to a part of the tensor. Without such a gap, it is the last gap
    if the origin of the input is unknown. A weight and the output of a common operation have a known origin.
    """
    values = found.differing_values
    for gap in reversed(gaps):
        if any(_holds(item.outputs, a) for item in gap.a for a, _ in values):
            return gap
        if any(_holds(item.outputs, b) for item in gap.b for _, b in values):
            return gap
    origin = found.origin
    is_known = origin.parameter or (origin.writer_a is None) != (origin.writer_b is None)
    possible = [gap for gap in gaps if _may_write(gap, origin)] if is_known else gaps
    return possible[-1] if possible else None


def _may_write(gap: Gap, origin: Origin) -> bool:
    """Whether the gap lies after the write of the tensor, and holds an operation in place."""
    starts = (gap.start_a, origin.writer_a), (gap.start_b, origin.writer_b)
    if any(writer is not None and start <= writer for start, writer in starts):
        return False
    return any(item.writes_in_place for item in (*gap.a, *gap.b))


def _origin(a: Sequence[Operation], b: Sequence[Operation], i: int, j: int, position: int) -> Origin:
    left, right = a[i].inputs, b[j].inputs
    if position >= min(len(left), len(right)):
        return Origin()
    name = a[i].parameters[position] if a[i].parameters[position] == b[j].parameters[position] else ""
    writers = _writer(a, i, left[position]), _writer(b, j, right[position])
    operations = [None if at is None else side[at] for side, at in zip((a, b), writers, strict=True)]
    readers = [_last_reader(side[:before], name) for side, before in ((a, i), (b, j))]
    return Origin(name, *writers, operations[0], operations[1], readers[0] if readers[1] else None)


def _last_reader(operations: Sequence[Operation], name: str) -> Operation | None:
    """The last operation that read the bits of the parameter; None also without a parameter."""
    return next((item for item in reversed(operations) if name and _reads(item, name)), None)


def _reads(operation: Operation, name: str) -> bool:
    """Whether the operation read the bits of the parameter. A view does not."""
    return any(
        held == name and value.digest is not None
        for held, value in zip(operation.parameters, operation.inputs, strict=True)
    )


def _writer(operations: Sequence[Operation], before: int, value: Value) -> int | None:
    """The position of the last operation before ``before`` with this output, or None."""
    return next((index for index in reversed(range(before)) if _holds(operations[index].outputs, value)), None)


def _holds(values: Sequence[Value], value: Value) -> bool:
    """Whether ``values`` hold the bits of ``value``, in any shape."""
    return value.digest is not None and any(held.digest == value.digest for held in values)


def with_influence(gaps: Sequence[Gap], a: Sequence[Operation], b: Sequence[Operation]) -> list[Gap]:
    """The gaps, with ``has_influence`` where an operation of the gap has influence. Time and memory are linear.

    An operation has influence if a later operation reads its output: one of both sequences, or one with influence. It
    also has influence if it draws random numbers, writes in place, makes a view of a parameter or buffer (code may
    write through the view), or computes in the backward pass or after it (the result may be a gradient). A view has no
    bits: it counts as a reader of every output of its shape. A copy has no influence, because it gives no new bits.
    """
    of_a = [range(gap.start_a, gap.start_a + len(gap.a)) for gap in gaps]
    of_b = [range(gap.start_b, gap.start_b + len(gap.b)) for gap in gaps]
    in_a, in_b = _influential(a, {*chain(*of_a)}), _influential(b, {*chain(*of_b)})
    return [
        replace(gap, has_influence=not in_a.isdisjoint(own_a) or not in_b.isdisjoint(own_b))
        for gap, own_a, own_b in zip(gaps, of_a, of_b, strict=True)
    ]


def _influential(operations: Sequence[Operation], alone: Collection[int]) -> set[int]:
    """The positions among ``alone`` of operations with influence."""
    found: set[int] = set()
    read: set[str] = set()  # by later operations: digests, and of views the kinds of inputs
    for position in reversed(range(len(operations))):
        operation = operations[position]
        if position in alone:
            if not _has_influence(operation, read):
                continue
            found.add(position)
        read.update(value.digest or value.kind for value in operation.inputs)
    return found


def _has_influence(operation: Operation, read: Collection[str]) -> bool:
    given = {value.digest for value in operation.inputs}
    new = [value for value in operation.outputs if value.digest is not None and value.digest not in given]
    has_views = any(value.digest is None for value in operation.outputs)
    return (
        bool(operation.generator)
        or operation.may_write
        or (has_views and any(operation.parameters))
        or (operation.stage != "forward" and bool(new))
        or any(value.digest in read or value.kind in read for value in new)
    )

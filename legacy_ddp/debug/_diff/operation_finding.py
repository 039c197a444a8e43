"""The first difference of the operations of a step in words, with a table of the operations around it. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from legacy_ddp._compare import MISSING
from legacy_ddp.debug._diff.result import OperationFinding, OperationRow, Verdict
from legacy_ddp.debug._operations.align import aligned, differing
from legacy_ddp.debug._operations.describe import Labels, at, before, details, short, summary
from legacy_ddp.debug._operations.explain import Facts, explain
from legacy_ddp.debug._operations.operation import Operation, OperationDifference
from legacy_ddp.debug._trace.records import Environment

ROWS_BEFORE, ROWS_AFTER = 6, 8
# Of the operations of one side alone, at the first difference.
MAX_FIRST = 12

Judge = Callable[[Operation, Operation], str]
"""The comparison of two operations at the same place, in words."""


def finding(
    step: int,
    operations: tuple[Sequence[Operation], Sequence[Operation]],
    found: OperationDifference,
    *,
    counts: tuple[int, int],
    labels: Labels,
    ranks: Sequence[int],
    facts: Facts,
    judge: Judge,
) -> OperationFinding:
    """The record of a difference between the operations of both sides.

    ``operations``: those that were compared, of ``counts`` in the step. ``facts``: see :func:`explain`.
    """
    explanation = explain(found, labels, facts)
    first = found.operation
    return OperationFinding(
        step=step,
        labels=labels,
        ranks=tuple(ranks),
        counts=counts,
        kind=found.kind,
        summary=summary(found, labels),
        meaning=explanation.meaning,
        next_step=explanation.next_step,
        stage=first.stage,
        module=first.module,
        name=first.name,
        details=tuple(details(found, labels)),
        earlier=tuple(before(gap, labels) for gap in found.earlier),
        rows=tuple(_Table(*operations, labels, judge).rows(found)),
    )


def agreement(step: int, counts: tuple[int, int], labels: Labels, meaning: str) -> OperationFinding:
    """The record of a step with equal operations."""
    text = f"all {counts[0]:,} operations agree" if counts[0] > 1 else "the only operation agrees"
    return OperationFinding(step, labels, (), counts, "", text, meaning)


def with_operations(headline: str, verdict: Verdict, found: OperationFinding | None) -> str:
    """The headline, which for equal tensors says of differing operations that they differ."""
    return f"{headline}; operations differ, see below" if verdict == "same" and found else headline


def differing_facts(a: Environment, b: Environment) -> Facts:
    """The facts with another value on each side."""
    sides = {
        name: (a.facts.get(name, MISSING), b.facts.get(name, MISSING)) for name in dict.fromkeys([*a.facts, *b.facts])
    }
    return {name: both for name, both in sides.items() if both[0] != both[1]}


def judge_values(a: Operation, b: Operation) -> str:
    """For sequences of the same data."""
    inputs, outputs = differing(a.inputs, b.inputs), differing(a.outputs, b.outputs)
    if inputs:
        return "inputs differ"
    if outputs:
        return "inputs agree, output differs"
    return "agrees" if a == b else "values agree, settings differ"


class _Table:
    """Rows of operations of both sides."""

    def __init__(self, a: Sequence[Operation], b: Sequence[Operation], labels: Labels, judge: Judge) -> None:
        self._a, self._b, self._labels, self._judge = a, b, labels, judge

    def rows(self, found: OperationDifference) -> Iterator[OperationRow]:
        """The operations of the difference, and the nearest before and after."""
        start_a, start_b = found.start_a, found.start_b
        end_a, end_b = start_a + len(found.a), start_b + len(found.b)
        before_a, before_b = (range(max(0, start - ROWS_BEFORE), start) for start in (start_a, start_b))
        yield from self._aligned(before_a, before_b)
        if found.kind in ("sequence", "order"):
            result = "in another order" if found.kind == "order" else ""
            yield from self._single(range(start_a, min(end_a, start_a + MAX_FIRST)), 0, result, is_first=True)
            yield from self._single(range(start_b, min(end_b, start_b + MAX_FIRST)), 1, result, is_first=True)
        else:
            yield self._pair(start_a, start_b, is_first=True)
        after_a, after_b = (
            range(end, min(len(side), end + ROWS_AFTER)) for end, side in ((end_a, self._a), (end_b, self._b))
        )
        yield from self._aligned(after_a, after_b)

    def _aligned(self, a: range, b: range) -> Iterator[OperationRow]:
        for block in aligned(self._a[a.start : a.stop], self._b[b.start : b.stop]):
            if block.is_common:
                for i, j in block.pairs:
                    yield self._pair(a.start + i, b.start + j)
            else:
                yield from self._single(a[block.start_a : block.end_a], 0)
                yield from self._single(b[block.start_b : block.end_b], 1)

    def _pair(self, i: int, j: int, *, is_first: bool = False) -> OperationRow:
        a, b = self._a[i], self._b[j]
        return _row(a, (a.number, b.number), self._judge(a, b), is_first=is_first)

    def _single(
        self, positions: Iterable[int], side: int, result: str = "", *, is_first: bool = False
    ) -> Iterator[OperationRow]:
        result = result or f"only {at(self._labels[side])}"
        for index in positions:
            operation = (self._a, self._b)[side][index]
            numbers = (operation.number, None) if side == 0 else (None, operation.number)
            yield _row(operation, numbers, result, is_first=is_first)


def _row(operation: Operation, numbers: tuple[int | None, int | None], result: str, *, is_first: bool) -> OperationRow:
    return OperationRow(numbers, operation.stage, operation.module, short(operation), result, is_first)

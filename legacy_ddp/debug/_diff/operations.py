"""The first difference of recorded operations between two runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from legacy_ddp._text import compare_rows
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Divergence, OperationFinding, OperationRow
from legacy_ddp.debug._diff.verdict import format_steps
from legacy_ddp.debug._operations.align import aligned, differing, first_difference
from legacy_ddp.debug._operations.meaning import Facts, explain
from legacy_ddp.debug._operations.operation import (
    Labels,
    Operation,
    OperationDifference,
    aspects,
    at,
    before,
    details,
    short,
    summary,
    with_after_backward,
)
from legacy_ddp.debug._trace.read import span
from legacy_ddp.debug._trace.records import Environment

ROWS_BEFORE, ROWS_AFTER = 6, 8
# Of the operations that only one side has, at the first difference.
MAX_FIRST = 12

_LABELS: Labels = ("A", "B")
# Phases with tensors that forward and backward write. The reduction or the optimizer writes those of other phases.
_WRITTEN = ("local_gradients", "parameters", "buffers")
_SAME_COMPUTATION = "Forward and backward computed the same."
_UNSEEN = (
    "Forward and backward computed the same, as far as recorded: gradients were written to after backward, or by "
    "another thread, or inside of a kernel that the record does not see (compiled code)."
)


def finding(
    step: int,
    operations: tuple[Sequence[Operation], Sequence[Operation]],
    found: OperationDifference,
    *,
    ranks: Sequence[int],
    facts: Facts,
) -> OperationFinding:
    """The record of a difference between ``operations``, those of A and those of B. ``facts``: see :func:`explain`."""
    explanation = explain(found, _LABELS, facts)
    first = found.operation
    return OperationFinding(
        step=step,
        labels=_LABELS,
        ranks=tuple(ranks),
        counts=(len(operations[0]), len(operations[1])),
        kind=found.kind,
        summary=summary(found, _LABELS),
        meaning=explanation.meaning,
        next_step=explanation.next_step,
        stage=first.stage,
        module=first.module,
        name=first.name,
        details=tuple(details(found, _LABELS)),
        earlier=tuple(before(gap, _LABELS) for gap in found.earlier),
        rows=tuple(_rows(*operations, found)),
    )


def _agreement(step: int, counts: tuple[int, int], meaning: str) -> OperationFinding:
    text = f"all {counts[0]:,} operations agree" if counts[0] > 1 else "the only operation agrees"
    return OperationFinding(step, _LABELS, (), counts, "", text, meaning)


def _differing_facts(a: Environment, b: Environment) -> Facts:
    differences = compare_rows([a.facts, b.facts]).differences
    return {item.name: (item.holders[0][0], item.holders[1][0]) for item in differences}


def _rows(a: Sequence[Operation], b: Sequence[Operation], found: OperationDifference) -> Iterator[OperationRow]:
    """The operations of the difference, and the nearest before and after."""
    i, j = found.start_a, found.start_b
    yield from _aligned_rows(a[max(0, i - ROWS_BEFORE) : i], b[max(0, j - ROWS_BEFORE) : j])
    if found.kind in ("sequence", "order"):
        result = "in another order" if found.kind == "order" else ""
        for side, operations in enumerate((found.a, found.b)):
            yield from _rows_of_one(operations[:MAX_FIRST], side, result, is_first=True)
    else:
        yield _row_of_both(found.a[0], found.b[0], is_first=True)
    i, j = i + len(found.a), j + len(found.b)
    yield from _aligned_rows(a[i : i + ROWS_AFTER], b[j : j + ROWS_AFTER])


def _aligned_rows(a: Sequence[Operation], b: Sequence[Operation]) -> Iterator[OperationRow]:
    for block in aligned(a, b):
        if block.is_common:
            yield from (_row_of_both(a[i], b[j]) for i, j in block.pairs)
        else:
            yield from _rows_of_one(a[block.start_a : block.end_a], 0)
            yield from _rows_of_one(b[block.start_b : block.end_b], 1)


def _row_of_both(a: Operation, b: Operation, *, is_first: bool = False) -> OperationRow:
    return _row(a, (a.number, b.number), _compared(a, b), is_first=is_first)


def _rows_of_one(
    operations: Iterable[Operation], side: int, result: str = "", *, is_first: bool = False
) -> Iterator[OperationRow]:
    """Rows of operations that only A (``side`` 0) or only B (1) has at their place."""
    for item in operations:
        numbers = (item.number, None) if side == 0 else (None, item.number)
        yield _row(item, numbers, result or f"only {at(_LABELS[side])}", is_first=is_first)


def _row(operation: Operation, numbers: tuple[int | None, int | None], result: str, *, is_first: bool) -> OperationRow:
    return OperationRow(numbers, operation.stage, operation.module, short(operation), result, is_first)


def _compared(a: Operation, b: Operation) -> str:
    if differing(a.inputs, b.inputs):
        return "inputs differ"
    if differing(a.outputs, b.outputs):
        return "inputs agree, output differs"
    return "values agree, settings differ" if aspects(a, b) else "agrees"


class RunOperations:
    """The first different operation of each step and rank of two runs. Ranks are added in ascending order."""

    def __init__(self) -> None:
        self._findings: dict[tuple[int, int], OperationFinding] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._recorded: dict[str, set[int]] = {label: set() for label in _LABELS}

    def add_rank(self, rank: int, pair: Pair, until: int | None) -> None:
        """Compare the operations of a rank in all steps up to ``until``. Memory: the operations of one step."""
        for label, trace in zip(_LABELS, (pair.a, pair.b), strict=True):
            self._recorded[label].update(trace.operation_counts)
        for step in sorted({*pair.a.operation_counts} & {*pair.b.operation_counts}):
            if until is None or step <= until:
                self._compare(rank, pair, step)

    def finding(self, first: Divergence | None) -> OperationFinding | None:
        """The first different operation in the step of the first divergence; without a divergence, in any step.

        None if not both runs recorded operations of that step. None also without any difference.
        """
        if first is None:
            return self._first(min(self._findings, default=(0, 0))[0])
        if first.step not in self._counts:
            return None
        meaning = _UNSEEN if first.phase == "local_gradients" else _SAME_COMPUTATION
        return self._first(first.step, first.ranks) or _agreement(first.step, self._counts[first.step], meaning)

    def notes(self, first: Divergence | None) -> Iterator[str]:
        """Which steps agree; that no step was recorded in both runs; that the step of ``first`` was not recorded."""
        if first is None and self._counts and not self._findings:
            yield f"operations of {format_steps(sorted(self._counts))} agree"
        if first is None or first.phase != "local_gradients":
            yield from self._without_common_steps()
            return
        if first.step in self._counts:
            return
        lacking = [label for label in _LABELS if first.step not in self._recorded[label]]
        yield (
            f"operations of step {first.step} were not recorded in {' and '.join(lacking)}; to find the first that "
            f"differs, record again with operations=range({first.step}, {first.step + 1})"
        )

    def _without_common_steps(self) -> Iterator[str]:
        """A note if both runs have operations of other steps, or only one run has operations."""
        a, b = self._recorded.values()
        if (a or b) and not a & b:
            sides = [f"for {span((min(steps), max(steps))) if steps else 'none'} in" for steps in (a, b)]
            yield f"operations: recorded {sides[0]} A and {sides[1]} B: not compared"

    def _compare(self, rank: int, pair: Pair, step: int) -> None:
        a, b = (with_after_backward(trace.operations(step)) for trace in (pair.a, pair.b))
        self._counts.setdefault(step, (len(a), len(b)))
        if found := first_difference(a, b):
            facts = _differing_facts(pair.a.environment, pair.b.environment)
            completed = _with_tensors(found, pair, step)
            self._findings[step, rank] = finding(step, (a, b), completed, ranks=(rank,), facts=facts)

    def _first(self, step: int, preferred: tuple[int, ...] = ()) -> OperationFinding | None:
        """The finding on the lowest of the preferred ranks, else of all ranks, with all ranks that found the same."""
        found = {rank: item for (of_step, rank), item in self._findings.items() if of_step == step}
        if not found:
            return None
        chosen = found[min([rank for rank in found if rank in preferred] or found)]
        alike = [rank for rank, item in found.items() if _place(item) == _place(chosen)]
        return replace(chosen, ranks=tuple(sorted(alike)))


def _with_tensors(found: OperationDifference, pair: Pair, step: int) -> OperationDifference:
    """``found``, with ``is_argument`` and ``tensors_differ``, which the operations alone do not tell."""
    first_phase = next((phase for of_step, phase in pair.candidates if of_step == step), "")
    return replace(
        found,
        origin=replace(found.origin, is_argument=_is_argument(found, pair, step)),
        tensors_differ=not found.has_effect and first_phase in _WRITTEN,
    )


def _is_argument(found: OperationDifference, pair: Pair, step: int) -> bool:
    """Whether the first differing input is an argument of the forward passes, in both runs."""
    if found.kind != "input" or not found.differing_values:
        return False
    for trace, value in zip((pair.a, pair.b), found.differing_values[0], strict=True):
        call = trace.call(step)
        if call is None or value.digest not in {digest for _, digest in call.inputs}:
            return False
    return True


def _place(found: OperationFinding) -> tuple[str, ...]:
    return found.kind, found.stage, found.module, found.name

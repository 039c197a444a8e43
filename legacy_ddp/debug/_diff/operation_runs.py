"""Comparison of the recorded operations of two runs, rank by rank."""

from collections.abc import Iterator
from dataclasses import replace

from legacy_ddp.debug._diff.coverage import format_steps
from legacy_ddp.debug._diff.operation_finding import agreement, differing_facts, finding, judge_values
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Divergence, OperationFinding
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.describe import Labels
from legacy_ddp.debug._operations.operation import OperationDifference, with_after_backward
from legacy_ddp.debug._trace.coverage import span

_LABELS: Labels = ("A", "B")
# Phases with tensors that operations of forward and backward write. Others follow from the reduction or the optimizer.
_WRITTEN = ("local_gradients", "parameters", "buffers")
_SAME_COMPUTATION = "Forward and backward computed the same."
_UNSEEN = (
    "Forward and backward computed the same, as far as recorded: gradients were written to after backward, or by "
    "another thread, or inside of a kernel that the record does not see (compiled code)."
)


class RunOperations:
    """The first different operation of each step and rank. Ranks are added in ascending order."""

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
        """The first different operation in the step of the first divergence, else in any step.

        None if the step has no operations in both, or if no step of runs without a divergence has a difference.
        """
        if first is None:
            return self._first(min(self._findings, default=(0, 0))[0])
        if first.step not in self._counts:
            return None
        meaning = _UNSEEN if first.phase == "local_gradients" else _SAME_COMPUTATION
        return self._first(first.step, first.ranks) or agreement(first.step, self._counts[first.step], _LABELS, meaning)

    def notes(self, first: Divergence | None) -> Iterator[str]:
        """Notes about steps with equal operations, about steps of one run alone, and about the first different step."""
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
        """A note if both runs have operations of other steps, or one run alone has operations."""
        a, b = self._recorded.values()
        if (a or b) and not a & b:
            sides = [f"for {span((min(steps), max(steps))) if steps else 'none'} in" for steps in (a, b)]
            yield f"operations: recorded {sides[0]} A and {sides[1]} B: not compared"

    def _compare(self, rank: int, pair: Pair, step: int) -> None:
        operations = with_after_backward(pair.a.operations(step)), with_after_backward(pair.b.operations(step))
        counts = len(operations[0]), len(operations[1])
        self._counts.setdefault(step, counts)
        facts = differing_facts(pair.a.environment, pair.b.environment)
        if found := first_difference(*operations):
            self._findings[step, rank] = finding(
                step,
                operations,
                _with_tensors(found, pair, step),
                counts=counts,
                labels=_LABELS,
                ranks=(rank,),
                facts=facts,
                judge=judge_values,
            )

    def _first(self, step: int, preferred: tuple[int, ...] = ()) -> OperationFinding | None:
        """The finding on the lowest of the preferred ranks, or of all ranks; with all ranks of equal findings."""
        found = {rank: item for (of_step, rank), item in self._findings.items() if of_step == step}
        if not found:
            return None
        chosen = found[min([rank for rank in found if rank in preferred] or found)]
        alike = [rank for rank, item in found.items() if _place(item) == _place(chosen)]
        return replace(chosen, ranks=tuple(sorted(alike)))


def _with_tensors(found: OperationDifference, pair: Pair, step: int) -> OperationDifference:
    """The difference, with what the trace tells about arguments of forward passes and about tensors of the step."""
    differs = (
        phase for phase in pair.compared_phases(step) if pair.a.digest(step, phase) != pair.b.digest(step, phase)
    )
    return replace(
        found,
        origin=replace(found.origin, is_argument=_is_argument(found, pair, step)),
        tensors_differ=found.has_effect is False and next(differs, "") in _WRITTEN,
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

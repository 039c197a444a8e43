"""Comparison of the recorded operations of the ranks of one run, which have data of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff.coverage import format_steps
from legacy_ddp.debug._diff.operation_finding import differing_facts, finding
from legacy_ddp.debug._diff.result import OperationFinding
from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._operations.structure import (
    common_micro_batches,
    first_structural_difference,
    judge_structure,
)
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.run import Run

# Groups of ranks with other operations; more are not told apart, because each is kept in memory.
_MAX_GROUPS = 4
_HIDDEN = "other data hide the rest, as a constant in the loss: legacy_ddp.debug.cross_check() compares it"


@dataclass
class _Group:
    """Ranks with the same structure; ``operations``: of its first rank."""

    operations: tuple[Operation, ...]
    ranks: list[int]


class RankOperations:
    """The first step in which ranks ran other operations. Every file is read once more, and again for this step."""

    def __init__(self, run: Run, micro_batches: Mapping[int, Sequence[int]]) -> None:
        """``micro_batches``: of every rank, for the steps with operations on all ranks, ascending."""
        self.finding: OperationFinding | None = None
        self._run = run
        self._micro_batches = micro_batches
        parameters = {*run.environments[0].parameters}
        self._is_shared: Callable[[str], bool] = parameters.__contains__
        first = self._first_difference()
        if first is not None:
            self.finding = self._compare(first, *self._groups(first)[:2])
        self._agreeing = [step for step in micro_batches if first is None or step < first]
        compared = [step for step in micro_batches if first is None or step <= first]
        self._uneven = next((step for step in compared if len({*micro_batches[step]}) > 1), None)

    def notes(self) -> Iterator[str]:
        """A note about the steps with equal operations, and a note about other numbers of micro-batches."""
        if self._agreeing:
            yield (
                f"operations of {format_steps(self._agreeing)} agree between ranks, as far as data leave them equal; "
                f"{_HIDDEN}"
            )
        if self._uneven is not None:
            yield _uneven(self._uneven, self._micro_batches[self._uneven])

    def _first_difference(self) -> int | None:
        """The first step with a rank unlike the rank with most micro-batches. Two files are open at a time."""
        first: int | None = None
        fullest = {step: numbers.index(max(numbers)) for step, numbers in self._micro_batches.items()}
        for reference in sorted({*fullest.values()}):
            steps = [step for step, rank in fullest.items() if rank == reference]
            with self._run.open(reference, until=steps[-1]) as most:
                for rank in range(self._run.world_size):
                    steps = [step for step in steps if first is None or step < first]
                    if rank != reference and steps:
                        with self._run.open(rank, until=steps[-1]) as trace:
                            first = next((step for step in steps if self._differ(most, trace, step)), first)
        return first

    def _differ(self, a: RankTrace, b: RankTrace, step: int) -> bool:
        return self._difference(a.operations(step), b.operations(step)) is not None

    def _groups(self, step: int) -> list[_Group]:
        """The groups of ranks, greatest first. One file is open at a time."""
        groups: list[_Group] = []
        numbers = self._micro_batches[step]
        # Ranks with most micro-batches first: a rank is compared with the first rank of a group.
        for rank in sorted(range(self._run.world_size), key=lambda rank: (-numbers[rank], rank)):
            with self._run.open(rank, until=step) as trace:
                operations = trace.operations(step)
            same = next((group for group in groups if self._difference(group.operations, operations) is None), None)
            if same:
                same.ranks.append(rank)
            elif len(groups) < _MAX_GROUPS:
                groups.append(_Group(operations, [rank]))
        return sorted(groups, key=lambda group: (-len(group.ranks), min(group.ranks)))

    def _difference(self, a: Sequence[Operation], b: Sequence[Operation]) -> OperationDifference | None:
        return first_structural_difference(a, b, self._is_shared)

    def _compare(self, step: int, most: _Group, fewer: _Group) -> OperationFinding | None:
        found = self._difference(most.operations, fewer.operations)
        if found is None:
            return None
        has_majority = 2 * len(most.ranks) > self._run.world_size
        everyone = range(self._run.world_size)
        return finding(
            step,
            common_micro_batches(most.operations, fewer.operations),
            found,
            labels=(name_ranks(most.ranks), name_ranks(fewer.ranks)),
            ranks=[rank for rank in everyone if rank not in most.ranks or not has_majority],
            facts=differing_facts(*(self._run.environments[group.ranks[0]] for group in (most, fewer))),
            judge=judge_structure(self._is_shared),
        )


def _uneven(step: int, micro_batches: Sequence[int]) -> str:
    """A note about other numbers of micro-batches."""
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(micro_batches):
        ranks.setdefault(number, []).append(rank)
    numbers = ", ".join(f"{number} on {name_ranks(ranks[number])}" for number in sorted(ranks))
    return (
        f"ranks took other numbers of micro-batches, first in step {step}: {numbers}; only operations of common "
        "micro-batches were compared"
    )

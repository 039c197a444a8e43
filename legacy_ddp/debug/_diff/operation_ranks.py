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
    micro_batches,
)
from legacy_ddp.debug._trace.run import Run

# Groups of ranks with other operations; more are not told apart, because each is kept in memory.
_MAX_GROUPS = 4
_HIDDEN = "other data hide the rest, as a constant in the loss: legacy_ddp.debug.cross_check() compares it"


@dataclass
class _Group:
    """Ranks with the same structure; ``operations``: of the lowest rank among the ranks with most micro-batches."""

    operations: tuple[Operation, ...]
    ranks: list[int]


class RankOperations:
    """The first step in which ranks ran other operations."""

    def __init__(self, run: Run, steps: Sequence[int]) -> None:
        """``steps``: the steps with operations on all ranks, ascending. Reads all files again for each."""
        self.finding: OperationFinding | None = None
        self._run = run
        self._agreeing: list[int] = []
        self._uneven = ""
        parameters = {*run.environments[0].parameters}
        self._is_shared: Callable[[str], bool] = parameters.__contains__
        for step in steps:
            groups = self._groups(step)
            if len(groups) > 1:
                self.finding = self._compare(step, *groups[:2])
                return
            self._agreeing.append(step)

    def notes(self) -> Iterator[str]:
        """A note about the steps with equal operations, and a note about other numbers of micro-batches."""
        if self._agreeing:
            yield (
                f"operations of {format_steps(self._agreeing)} agree between ranks, as far as data leave them equal; "
                f"{_HIDDEN}"
            )
        if self._uneven:
            yield self._uneven

    def _groups(self, step: int) -> list[_Group]:
        """The groups of ranks, greatest first. One file is open at a time."""
        groups: list[_Group] = []
        ranks_by_number: dict[int, list[int]] = {}
        for rank in range(self._run.world_size):
            with self._run.open(rank, until=step) as trace:
                operations = trace.operations(step)
            ranks_by_number.setdefault(micro_batches(operations), []).append(rank)
            same = next((group for group in groups if self._difference(group.operations, operations) is None), None)
            if same:
                same.ranks.append(rank)
                same.operations = max(same.operations, operations, key=micro_batches)
            elif len(groups) < _MAX_GROUPS:
                groups.append(_Group(operations, [rank]))
        self._uneven = self._uneven or _uneven(step, ranks_by_number)
        return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))

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


def _uneven(step: int, ranks_by_number: Mapping[int, Sequence[int]]) -> str:
    """A note about other numbers of micro-batches; empty for equal numbers."""
    if len(ranks_by_number) < 2:
        return ""
    numbers = ", ".join(f"{number} on {name_ranks(ranks)}" for number, ranks in sorted(ranks_by_number.items()))
    return (
        f"ranks took other numbers of micro-batches, first in step {step}: {numbers}; only operations of common "
        "micro-batches were compared"
    )

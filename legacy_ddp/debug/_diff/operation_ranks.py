"""Comparison of the recorded operations of the ranks of one run, which have data of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from legacy_ddp._compare import MAX_SIDES, name_ranks
from legacy_ddp.debug._diff.coverage import format_steps
from legacy_ddp.debug._diff.operation_finding import differing_facts, finding
from legacy_ddp.debug._diff.result import OperationFinding
from legacy_ddp.debug._operations.describe import alone, summary
from legacy_ddp.debug._operations.operation import Operation, OperationDifference
from legacy_ddp.debug._operations.structure import Structure
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.run import Run

# Groups of ranks with other operations; more are not told apart, because each is kept in memory.
_MAX_GROUPS = 4
_HIDDEN = "other data hide the rest, as a constant in the loss: legacy_ddp.debug.cross_check() compares it"


@dataclass
class _Group:
    """Ranks with the same structure; ``operations``: of ``first``, a rank with the fewest operations of its own."""

    first: int
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
        self._unused: dict[int, str] = {}  # of each rank, the first
        self._further: list[str] = []
        first = self._first_difference()
        groups = self._groups(first) if first is not None else []
        if first is not None and len(groups) > 1:
            self.finding = self._compare(first, *groups[:2])
            self._further = [self._further_difference(groups[:index], groups[index]) for index in range(2, len(groups))]
        elif first is not None:  # agreement as far as data leave it is not transitive
            self._further = [f"operations of step {first} differ between two ranks, and a third agrees with both"]
        self._agreeing = [step for step in micro_batches if first is None or step < first]
        compared = [step for step in micro_batches if first is None or step <= first]
        self._uneven = next((step for step in compared if len({*micro_batches[step]}) > 1), None)

    def notes(self) -> Iterator[str]:
        """Notes about equal operations, further ranks with a difference, and other numbers of micro-batches."""
        if self._agreeing:
            yield (
                f"operations of {format_steps(self._agreeing)} agree between ranks, as far as data leave them equal; "
                f"{_HIDDEN}"
            )
        yield from self._further
        yield from (self._unused[rank] for rank in sorted(self._unused)[:MAX_SIDES])
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
                            first = next(
                                (step for step in steps if self._differ(step, (reference, rank), most, trace)), first
                            )
        return first

    def _differ(self, step: int, ranks: tuple[int, int], a: RankTrace, b: RankTrace) -> bool:
        return self._compared(step, ranks, a.operations(step), b.operations(step)).difference is not None

    def _groups(self, step: int) -> list[_Group]:
        """The groups of ranks, greatest first. One file is open at a time."""
        groups: list[_Group] = []
        numbers = self._micro_batches[step]
        # Ranks with most micro-batches first: a rank is compared with the first rank of a group.
        for rank in sorted(range(self._run.world_size), key=lambda rank: (-numbers[rank], rank)):
            with self._run.open(rank, until=step) as trace:
                operations = trace.operations(step)
            same = next((group for group in groups if self._is_same(step, group, rank, operations)), None)
            if same:
                same.ranks.append(rank)
                if numbers[rank] == numbers[same.first] and len(operations) < len(same.operations):
                    same.first, same.operations = rank, operations
            elif len(groups) < _MAX_GROUPS:
                groups.append(_Group(rank, operations, [rank]))
        return sorted(groups, key=lambda group: (-len(group.ranks), min(group.ranks)))

    def _is_same(self, step: int, group: _Group, rank: int, operations: Sequence[Operation]) -> bool:
        return self._compared(step, (group.first, rank), group.operations, operations).difference is None

    def _compared(self, step: int, ranks: tuple[int, int], a: Sequence[Operation], b: Sequence[Operation]) -> Structure:
        """The comparison of two ranks. Notes the operations that one rank ran alone without influence."""
        found = Structure(a, b, self._is_shared)
        for gap in found.unused:
            for rank, other, own in ((ranks[0], ranks[1], gap.a), (ranks[1], ranks[0], gap.b)):
                if own:
                    self._unused.setdefault(rank, _unused(step, (rank, other), own))
        return found

    def _compare(self, step: int, most: _Group, fewer: _Group) -> OperationFinding | None:
        compared = self._compared(step, (most.first, fewer.first), most.operations, fewer.operations)
        if compared.difference is None:
            return None
        has_majority = 2 * len(most.ranks) > self._run.world_size
        everyone = range(self._run.world_size)
        return finding(
            step,
            (compared.a, compared.b),
            compared.difference,
            counts=(len(most.operations), len(fewer.operations)),
            labels=(name_ranks(most.ranks), name_ranks(fewer.ranks)),
            ranks=[rank for rank in everyone if rank not in most.ranks or not has_majority],
            facts=differing_facts(*(self._run.environments[group.ranks[0]] for group in (most, fewer))),
            judge=compared.judge,
        )

    def _further_difference(self, others: Sequence[_Group], group: _Group) -> str:
        """A note about ranks outside of the finding: their difference to the ranks that they agree with for longest."""

        def difference(other: _Group) -> OperationDifference | None:
            return Structure(other.operations, group.operations, self._is_shared).difference

        found = [(item.start_b, item, other) for other in others if (item := difference(other)) is not None]
        if not found:
            return f"operations of {name_ranks(group.ranks)} differ, too"
        _, item, other = max(found, key=lambda entry: entry[0])
        labels = name_ranks(other.ranks), name_ranks(group.ranks)
        return f"operations of {labels[1]} differ, too, first from {labels[0]}: {summary(item, labels)}"


def _unused(step: int, ranks: tuple[int, int], operations: Sequence[Operation]) -> str:
    """A note about operations without influence, of the first rank alone."""
    labels = f"rank {ranks[0]}", f"rank {ranks[1]}"
    alone_there = next(alone(operations, (), labels))
    return f"operations without influence, first in step {step}, against {labels[1]}: {alone_there}"


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

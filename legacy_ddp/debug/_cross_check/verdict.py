"""The verdict about digests of runs (which ranks compute differently), and the report with the verdict. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from legacy_ddp._compare import MAX_LINES, group_ranks, name_ranks, outside_majority
from legacy_ddp._replicas.element_compare import ElementDifference
from legacy_ddp._text import wrap
from legacy_ddp.debug._operations.operation import OperationDifference

Digests = tuple[int, ...]
Kind = Literal["equal", "differs", "once", "nondeterministic"]
# The runs of a batch: in the ring on its own rank and on the next rank, then two repetitions on every rank.
ON_ITS_RANK, ON_NEXT_RANK, REPEAT, LATER_REPEAT = "on its rank", "on the next rank", "repeat", "later repeat"
RING_RUNS = (ON_ITS_RANK, ON_NEXT_RANK)
_WORDS = {
    "equal": "all ranks compute the same",
    "differs": "{ranks} {compute} differently",
    "once": "{ranks} computed differently once",
    "nondeterministic": "{ranks} {compute} differently from run to run",
}


@dataclass(frozen=True)
class Witness:
    """A run of the examined batch on ``rank``. ``run``: one of :data:`RING_RUNS`, or a repetition."""

    rank: int
    run: str


@dataclass(frozen=True)
class Verdict:
    """``ranks``: the ranks with a different computation; without a majority the ranks of all sides.

    ``groups``: the ranks with equal results, the largest group first. ``odd``, ``reference``: two runs with different
    results, the first on one of ``ranks``.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    odd: Witness | None = None
    reference: Witness | None = None

    @property
    def is_attributed(self) -> bool:
        """Whether ``ranks`` are outside of a majority, or disagree with themselves."""
        return self.kind in ("once", "nondeterministic") or bool(outside_majority(self.groups))

    def group_of(self, witness: Witness) -> tuple[int, ...]:
        """The ranks with the results of a run."""
        return next(group for group in self.groups if witness.rank in group)


def differing_batches(on_its_rank: Sequence[Digests | None], on_next_rank: Sequence[Digests | None]) -> list[int]:
    """The ranks whose batch gave other results on the next rank.

    ``on_its_rank[r]``, ``on_next_rank[r]``: of the batch of rank r, on rank r and on the next rank. None without a
    batch.
    """
    pairs = zip(on_its_rank, on_next_rank, strict=True)
    return [rank for rank, (digests, next_digests) in enumerate(pairs) if digests != next_digests]


def choose_batch(batches: Sequence[int], size: int) -> int:
    """The batch to examine: of a rank common to two disagreements, otherwise the first.

    A rank with a constant fault disagrees about its own batch and about the batch before.
    """
    common = [rank for rank in batches if (rank - 1) % size in batches]
    return common[0] if common else batches[0]


def judge(ring: Mapping[Witness, Digests], repeats: Sequence[tuple[Digests, Digests]]) -> Verdict:
    """The verdict about one batch.

    ``ring``: of the two runs in the ring, which differ. ``repeats[r]``: of two runs of the batch on rank r afterwards.
    """
    values = [first for first, _ in repeats]
    groups = tuple(ranks for _, ranks in group_ranks(values))
    unstable = tuple(rank for rank, (first, second) in enumerate(repeats) if first != second)
    if unstable:
        odd, reference = Witness(unstable[0], REPEAT), Witness(unstable[0], LATER_REPEAT)
        return Verdict("nondeterministic", unstable, groups, odd, reference)
    if len(groups) > 1:
        ranks = outside_majority(groups) or tuple(range(len(repeats)))
        return Verdict("differs", ranks, groups, Witness(groups[1][0], REPEAT), Witness(groups[0][0], REPEAT))
    # The two runs in the ring differ, and all repetitions are equal: at least one run in the ring differs from them.
    changed = sorted((run for run, digests in ring.items() if digests != values[0]), key=lambda run: run.rank)
    ranks = tuple(dict.fromkeys(run.rank for run in changed))  # a rank alone made both runs
    return Verdict("once", ranks, groups, changed[0], Witness(ranks[0], REPEAT))


@dataclass(frozen=True)
class Place:
    """``difference``: of operations; None without a difference. ``elements``: of the first differing output, if known.
    ``count``: of operations of the differing run; ``last``: the number of the last of them. ``note``: the reason for a
    missing difference or for missing elements, empty without a reason. ``is_intermittent``: the output was equal in one
    more run.
    """

    difference: OperationDifference | None = None
    elements: ElementDifference | None = None
    count: int = 0
    last: int = 0
    note: str = ""
    is_intermittent: bool = False


@dataclass(frozen=True, repr=False)
class CrossCheckReport:
    """The result of :func:`cross_check`; equal on all ranks.

    ``call``: operation and number of the call. ``size``: the number of ranks. ``verdict``:

    ====================  ==============================================================================================
    ``equal``             every batch gave the same bits on its own rank and on the next rank
    ``differs``           ``ranks`` compute the batch of rank ``batch`` differently, in every run
    ``once``              ``ranks`` computed differently once, and not in two more runs on every rank
    ``nondeterministic``  two runs of a batch differ on ``ranks``
    ====================  ==============================================================================================

    ``ranks``: empty if equal; all ranks if there is no majority, for example with two ranks. ``batch``: the rank of the
    examined batch. ``compared``: the number of results; ``differing``: names of the results with a difference.
    ``module``, ``operation``, ``stage``: of the first different operation; empty if not known. ``elements``: of its
    output, None if not known. ``settings``: settings with different values on the ranks, as texts (one for more than
    three modules in the same mode); looked at only after a difference. ``who``, ``place``, ``next_step``: phrases for
    a reader.

    Example:
        >>> cross_check(model, lambda model, batch: model(batch).sum(), inputs).verdict
        'equal'
    """

    call: str
    size: int
    verdict: Kind = "equal"
    ranks: tuple[int, ...] = ()
    batch: int | None = None
    differing: tuple[str, ...] = ()
    module: str = ""
    operation: str = ""
    stage: str = ""
    elements: ElementDifference | None = None
    settings: tuple[str, ...] = ()
    compared: int = 0
    who: str = ""
    place: tuple[str, ...] = ()
    next_step: str = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    @property
    def agrees(self) -> bool:
        """Whether all ranks compute the same."""
        return self.verdict == "equal"

    def __str__(self) -> str:
        lines = wrap(self._headline())
        if self.agrees:
            return "\n".join(lines)
        lines += wrap(f"who: {self.who}", "  ")
        lines += wrap(f"results: {self._results()}", "  ")
        where, *why = (wrap(text, "  ") for text in self.place)
        lines += [*where, *(self.elements.lines("    ") if self.elements else []), *chain.from_iterable(why)]
        lines += [line for item in self.settings[:MAX_LINES] for line in wrap(f"setting {item}", "  ")]
        if len(self.settings) > MAX_LINES:
            lines.append(f"  ... {len(self.settings) - MAX_LINES} more settings")
        return "\n".join([*lines, *wrap(f"next: {self.next_step}", "  ")])

    def _headline(self) -> str:
        verb = "compute" if len(self.ranks) > 1 else "computes"
        words = _WORDS[self.verdict].format(ranks=name_ranks(self.ranks), compute=verb)
        counts = f": {self.size} rank{'s' * (self.size > 1)}, {self.compared} results of each batch" * self.agrees
        return f"{self.call}: {words}{counts}"

    def _results(self) -> str:
        count = f"{len(self.differing)} of {self.compared} differ"
        return f"{count}, first {self.differing[0]}" if self.differing else count

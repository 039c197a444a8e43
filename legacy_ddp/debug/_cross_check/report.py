"""The result of a cross-check, as an object and as text of 80 columns. Pure."""

from dataclasses import dataclass
from itertools import chain

from legacy_ddp._compare import MAX_LINES, name_ranks
from legacy_ddp._replicas.element_compare import ElementDifference
from legacy_ddp._text import wrap
from legacy_ddp.debug._cross_check.verdict import Kind

_WORDS = {
    "equal": "all ranks compute the same",
    "differs": "{ranks} {compute} differently",
    "once": "{ranks} computed differently once",
    "nondeterministic": "{ranks} {compute} differently from run to run",
}


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

    ``ranks``: empty if equal; two sides without a majority, as of two ranks, are all listed. ``batch``: the rank of the
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

"""Between the core, which detects a fault, and the folder ``_explain``, which tells what the fault means.

A call without a fault runs no line of ``_explain``. Nevertheless the folder is imported before the first call, and not
after a fault: a process without free file descriptors, or at its end, can import nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from legacy_ddp._call.nonfinite import NonFinite
    from legacy_ddp._check_settings import Nonfinite
    from legacy_ddp._errors import ReplicaDivergenceError
    from legacy_ddp._ranks.call import Call
    from legacy_ddp._replicas.history import StepDigests
    from legacy_ddp._replicas.state import StateItem
    from legacy_ddp._settings import Settings
    from legacy_ddp._watchdog.client import Endpoint, Failure
    from legacy_ddp._watchdog.reports import Report
    from legacy_ddp._watchdog.status import Row


@dataclass(frozen=True)
class DifferingReplicas:
    """What a call knows of replicas with different digests.

    ``items``: what this rank compares. ``digests``: of the compared ranks, by rank. ``left_out``: ranks with replicas
    known to be old. ``moved``: ranks whose parameters have changed since their digests were taken. ``told``: names and
    sides of differences that were reported before, which come last. ``evidence``: returns the digests of the phases of
    this rank; None without a history. ``is_brief``: compare only small tensors by element, beside a training.
    """

    call: "Call"
    items: "Sequence[StateItem]"
    digests: Mapping[int, int]
    left_out: Collection[int]
    moved: Sequence[int]
    told: Collection[tuple[str, str]] = ()
    evidence: "Callable[[], StepDigests] | None" = None
    is_brief: bool = False


class DifferingItem(Protocol):
    """``kind``: as of :class:`StateItem`. ``sides``: the ranks with equal values, as text."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def sides(self) -> str: ...


class ExplainedReplicas(Protocol):
    """The items that differ now; equal on all ranks."""

    @property
    def differences(self) -> "Sequence[DifferingItem]": ...

    def between(self, last: int, number: int, note: str) -> "ExplainedReplicas":
        """The same, of a difference that came about between call ``last``, 0 for none, and call ``number``."""
        ...

    def error(self, notes: Sequence[str]) -> "ReplicaDivergenceError": ...


class Explainer(Protocol):
    """What the core asks after a fault."""

    def replicas(self, found: DifferingReplicas) -> ExplainedReplicas:
        """Collective: exchange and compare the items of all ranks."""
        ...

    def nonfinite(
        self,
        call_name: str,
        ranks: Sequence[int],
        found: "Sequence[NonFinite]",
        settings: "Settings",
        *,
        reaction: "Nonfinite",
        skipped_calls: int = 0,
        found_in: str = "",
    ) -> str:
        """The text of the error or warning, equal on every rank.

        ``found``: of all ranks; ``ranks``: with non-finite gradients. ``skipped_calls``: with the reaction ``"skip"``,
        this call included. ``found_in``: a later call, which found the gradients after they were exchanged.
        """
        ...

    def nonfinite_of_rank(self, details: "NonFinite") -> str: ...

    def poll(self, peers: "Sequence[Endpoint | None]", own: "Endpoint", *, twice: bool) -> "list[Row]":
        """Ask all ranks for their status. ``twice``: again after a pause, to see which ranks are advancing."""
        ...

    def waiting(self, rows: "Sequence[Row]", failure: "Failure | None", *, was_polled: bool) -> "Report":
        """The report on the farthest call, for a failure or for a wait that is longer than expected."""
        ...

    def payload(self, rows: "Sequence[Row]", call: str, serial: int) -> "Report":
        """The report on the payload of ``call``, number ``serial`` on the group, that runs on devices for long."""
        ...

    def stall(self, rows: "Sequence[Row]", global_ranks: Sequence[int], job_size: int) -> "Report | None":
        """The report on ranks that wait outside of calls; None if there is nothing to tell."""
        ...

    def job(
        self,
        rows: "Sequence[Row]",
        global_ranks: Sequence[int],
        job_size: int,
        warn_after_seconds: float,
        *,
        with_stacks: bool,
    ) -> dict[str, Any]:
        """What all ranks do, and who waits for whom, ready for JSON. ``rows``: of ranks that were polled twice."""
        ...

    def loss(self, row: "Row", reason: str, missing: str) -> str:
        """A line on a loss, with the position of the rank in ``row``."""
        ...


_installed: list[Explainer] = []


def install(explainer: Explainer) -> None:
    _installed[:] = [explainer]


def explainer() -> Explainer:
    return _installed[0]

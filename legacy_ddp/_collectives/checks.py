"""The checks of a call, in the order in which they are asked. The longer checks have files of their own."""

from collections.abc import Sequence

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement, Precedence, agreed_error
from legacy_ddp._agreement.header import Flag, Header
from legacy_ddp._collectives.check import Check, CheckList, LocalStep, Subject
from legacy_ddp._collectives.edited import EditedGradients
from legacy_ddp._collectives.nonfinite import NonFiniteGradients
from legacy_ddp._collectives.warn_once import MergedMicroBatches, SameData, UnclearedGradients, UnevenWork
from legacy_ddp._compare import compare_rows
from legacy_ddp._errors import AgreedError, DesyncError
from legacy_ddp._replicas.compare import ReplicaDigests, divergence_error
from legacy_ddp._replicas.history import StepHistory
from legacy_ddp._replicas.rotation import PeriodicDigests, RotatingDigests
from legacy_ddp._step_guard.step_counter import StepCounter


class EqualSteps(Check):
    """Counts the optimizer steps since the last call, and raises if the numbers of the ranks differ.

    Only if every rank knows its number. Counting stops in a call, and begins again at the end of the call: after a
    failed call the number is unknown.
    """

    precedence = Precedence.STEPS

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.counts_steps and subject.wrapper is not None
        self._counter = StepCounter(subject.planner.counter.policy) if self.is_on else None

    def facts(self, step: LocalStep) -> None:
        if self._counter is not None and (count := self._counter.take(step.call.groups)) is not None:
            step.header.steps = count
            step.header.flags |= Flag.STEPS_KNOWN

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        ranks = [rank for rank, row in enumerate(rows) if not row.flags & Flag.JOINED]  # other ranks make no more steps
        if not all(rows[rank].flags & Flag.STEPS_KNOWN for rank in ranks):
            return None
        finding = compare_rows([{"optimizer steps": str(rows[rank].steps)} for rank in ranks], ranks)
        if not finding:
            return None
        advice = (
            "let every rank step after every call, or none: decide by a value that all ranks share, and unscale, clip\n"
            "and look for infinities after all_reduce(); replicas differ now, unless the step changed nothing"
        )
        text = f"ranks made different numbers of optimizer steps since the last call:\n{finding}\n{advice}"
        return agreed_error(DesyncError, rows, text, finding.ranks)

    def end(self, step: LocalStep) -> None:
        if self._counter is not None:
            self._counter.begin(step.call.groups, step.plan.parameters)

    def forget(self) -> None:
        if self._counter is not None:
            self._counter.stop()


_WARNED_ONCE = '(warned once; checks="detail" finds the step; see Checks(divergence=...))'


class Replicas(Check):
    """Compares the replicas of all ranks. ``digests``: of this rank; None if nothing is compared."""

    def __init__(self, subject: Subject) -> None:
        settings, planner, wrapper = subject.settings, subject.planner, subject.wrapper
        checks, policy = settings.checks, planner.counter.policy
        self.digests: ReplicaDigests | None = None
        if checks.compares_replicas and wrapper is not None:
            self.digests = (StepHistory if checks.every == 1 else PeriodicDigests)(wrapper, settings, policy)
        elif checks.rotates_digests and wrapper is not None:
            self.digests = RotatingDigests(wrapper, settings, planner)
        self.is_on = self.digests is not None

    def facts(self, step: LocalStep) -> None:
        if self.digests is not None and (digest := self.digests.digest_of(step.call)) is not None:
            step.header.replica = digest
            step.header.flags |= Flag.SIGNED

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if the digests differ.

        Raises:
            ReplicaDivergenceError: replicas differ, with ``"detail"`` or ``divergence="raise"``.
        """
        call, digests = step.call, self.digests
        if digests is None:
            return None
        # Also of a forward that is not seen: of the module inside, or of a compiled wrapper.
        digests.buffers.has_run |= step.header.micro_batches > 0
        # Checks may be off on some ranks, also on a rank that left, or nothing is due in this call.
        if not agreement.common_flags & Flag.SIGNED:
            return None
        if agreement.is_equal("replica"):
            digests.note_agreement(call)
            return None
        left = agreement.ranks_with(Flag.JOINED)  # ranks that make no more steps
        compared = {rank: digest for rank, digest in enumerate(agreement.column("replica")) if rank not in left}
        report = digests.compare(call, left, compared)
        if report is None:
            return None
        error = divergence_error(call, report)
        if call.checks.compares_replicas or call.checks.divergence == "raise":
            raise error
        return f"{error}\n  {_WARNED_ONCE}"

    def end(self, step: LocalStep) -> None:
        if self.digests is not None:
            self.digests.end_call(step.call)

    def begin_forward(self, *, is_training: bool) -> None:
        # A traced forward would record the operations of the digest.
        if self.digests is not None and torch.is_grad_enabled() and not internals.is_tracing():
            self.digests.begin_forward(is_training=is_training)

    def restart(self) -> None:
        if self.digests is not None:
            self.digests.restart()


CHECKS: tuple[type[Check], ...] = (
    EqualSteps,
    Replicas,
    EditedGradients,
    NonFiniteGradients,
    UnevenWork,
    SameData,
    UnclearedGradients,
    MergedMicroBatches,
)


def make_checks(subject: Subject) -> CheckList:
    """An object of every check."""
    return CheckList([kind(subject) for kind in CHECKS])

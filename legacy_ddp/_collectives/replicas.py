"""Replicas that differ between ranks: an error, or a warning, before any gradient moves."""

from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import PLACES, Flag, is_equal
from legacy_ddp._collectives.check_interface import Check, LocalStep, Subject
from legacy_ddp._replicas.compare import divergence_error
from legacy_ddp._replicas.history import ReplicaDigests, StepHistory
from legacy_ddp._replicas.rotation import PeriodicDigests, RotatingDigests

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
        self._wrapper = subject.wrapper_reference

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
        if is_equal(agreement.packed, PLACES["replica"]):
            digests.note_agreement(call)
            return None
        left = agreement.ranks_with(Flag.JOINED)  # these ranks make no more steps
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

    def restart_buffers(self) -> None:
        wrapper: Any = self._wrapper()
        if self.digests is not None and wrapper is not None:
            with torch.no_grad():
                self.digests.buffers.mark(wrapper.module)

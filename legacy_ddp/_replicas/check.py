"""Comparison of replicas inside a call: the digest in the header, and the report if digests differ."""

from collections.abc import Collection, Mapping
from typing import Protocol

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import Flag, Header
from legacy_ddp._errors import ReplicaDivergenceError
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._replicas.shared_buffers import SharedBuffers
from legacy_ddp._transport.call import Call

_WARNED_ONCE = '(warned once; checks="detail" finds the step; see Checks(divergence=...))'


class ReplicaDigests(Protocol):
    """The digests of a wrapper in its calls: of everything in every call or every Nth call, or in turns."""

    buffers: SharedBuffers

    def begin_forward(self, *, is_training: bool) -> None:
        """A forward of the wrapper with gradients begins. ``is_training``: not in evaluation mode."""

    def digest_of(self, call: Call) -> int | None:
        """The digest for the header of ``call``; None if this call compares nothing."""

    def compare(self, call: Call, left_out: Collection[int], digests: Mapping[int, int]) -> ReplicaReport | None:
        """The report if replicas differ. ``digests``: of the compared ranks. Collective after a difference."""

    def end_call(self, call: Call, /) -> None:
        """A call succeeded."""

    def restart(self) -> None:
        """Discard digests, after a broadcast of parameters."""


def add_digest(call: Call, digests: ReplicaDigests, header: Header) -> None:
    """Write the digest of this rank to the header, if this call compares replicas."""
    digest = digests.digest_of(call)
    if digest is not None:
        header.replica = digest
        header.flags |= Flag.SIGNED


def check(call: Call, digests: ReplicaDigests, agreement: Agreement) -> str:
    """The text of a warning on every rank, empty if replicas agree. Collective only if the digests differ.

    Raises:
        ReplicaDivergenceError: replicas differ, with ``"detail"`` or ``divergence="raise"``. Raised on every rank,
            before any gradient moves.
    """
    # Also of a forward that is not seen: of the module inside, or of a compiled wrapper.
    digests.buffers.has_run |= agreement.own.micro_batches > 0
    # Checks may be off on some ranks, also on a rank that left, or nothing is due in this call.
    if not agreement.common_flags & Flag.SIGNED:
        return ""
    left = agreement.ranks_with(Flag.JOINED)  # ranks that make no more steps
    compared = {rank: digest for rank, digest in enumerate(agreement.column("replica")) if rank not in left}
    report = digests.compare(call, left, compared)
    if report is None:
        return ""
    error = divergence_error(call, report)
    if call.checks.compares_replicas or call.checks.divergence == "raise":
        raise error
    return f"{error}\n  {_WARNED_ONCE}"


def divergence_error(call: Call, report: ReplicaReport) -> ReplicaDivergenceError:
    """The error that carries ``report``, with the next step for the user."""
    parameters = {item.parameter for item in report.differences if item.kind == "parameters"}
    step = (
        "  next: mend the cause, then give every rank the parameters of a good one (of a\n"
        "    wrapper: broadcast_parameters(src=...), broadcast_buffers(src=...)), or go\n"
        "    back to a checkpoint; optimizer state is not broadcast"
    )
    error = ReplicaDivergenceError(
        f"{report}\n{step}",
        ranks=report.ranks,
        call=call.number,
        phase=report.phase,
        parameter=parameters.pop() if len(parameters) == 1 else None,
    )
    error.report, error.minority, error.implicated = report, report.minority, report.implicated
    return error

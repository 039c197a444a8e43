"""The digests of a rank for its calls, and the error for different replicas."""

from collections.abc import Collection, Mapping
from typing import Protocol

from legacy_ddp._errors import ReplicaDivergenceError
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._replicas.shared_buffers import SharedBuffers
from legacy_ddp._transport.call import Call


class ReplicaDigests(Protocol):
    """The digests of a wrapper in its calls: of everything in every call or every Nth call, or in turns."""

    buffers: SharedBuffers

    def begin_forward(self, *, is_training: bool) -> None:
        """A forward of the wrapper with gradients begins. ``is_training``: not in evaluation mode."""

    def digest_of(self, call: Call) -> int | None:
        """The digest for the header of ``call``; None if this call compares nothing."""

    def note_agreement(self, call: Call) -> None:
        """The digests of all ranks are equal in ``call``."""

    def compare(self, call: Call, left_out: Collection[int], digests: Mapping[int, int]) -> ReplicaReport | None:
        """The report if replicas differ. ``digests``: of the compared ranks. Collective after a difference."""

    def end_call(self, call: Call, /) -> None:
        """A call succeeded."""

    def restart(self) -> None:
        """Discard digests, after a broadcast of parameters."""


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

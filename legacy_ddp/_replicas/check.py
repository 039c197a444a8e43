"""Comparison of replicas inside a call: the digest in the header, and the error if digests differ."""

from collections.abc import Sequence

from legacy_ddp._agreement.header import Flag, Header
from legacy_ddp._errors import ReplicaDivergenceError
from legacy_ddp._replicas.compare import compare_items
from legacy_ddp._replicas.history import StepHistory
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._transport.call import Call


def add_digest(call: Call, history: StepHistory, header: Header) -> Header:
    """``header`` with the digest of this rank."""
    with call.phase("digest"):
        return header._replace(state=history.update_digest())


def check(call: Call, history: StepHistory, rows: Sequence[Header]) -> None:
    """Collective only if the digests differ.

    Raises:
        ReplicaDivergenceError: digests differ. Raised on every rank, before any gradient moves.
    """
    left = {rank for rank, row in enumerate(rows) if row.flags & Flag.JOINED}  # ranks that make no more steps
    if len({row.state for rank, row in enumerate(rows) if rank not in left}) > 1:
        error = divergence_error(call, compare_items(call, history.items(), history.snapshot, left_out=left))
        history.restart()  # the difference is reported; an unrepaired difference shows again in the next call
        raise error


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

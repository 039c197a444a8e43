"""What a call does about replicas: it signs what this rank holds, and does not go on if another signed otherwise."""

from collections.abc import Sequence

from legacy_ddp._agreement.header import Flag, Header
from legacy_ddp._errors import ReplicaDivergenceError
from legacy_ddp._replicas.compare import examine
from legacy_ddp._replicas.history import Trail
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._transport.call import Call


def sign(call: Call, trail: Trail | None, header: Header) -> Header:
    """``header`` with the number that stands for the bits of this rank, if anybody follows them."""
    if trail is None:
        return header
    with call.phase("sign"):
        return header._replace(state=trail.sign())


def verify(call: Call, trail: Trail | None, rows: Sequence[Header]) -> None:
    """Collective only if the numbers differ.

    Raises:
        ReplicaDivergenceError: they differ; on every rank, before any gradient moved.
    """
    left = {rank for rank, row in enumerate(rows) if row.flags & Flag.JOINED}  # they do not step any more
    if trail is not None and len({row.state for rank, row in enumerate(rows) if rank not in left}) > 1:
        error = divergence(call, examine(call, trail.holdings(), trail.recall, left_out=left))
        trail.restart()  # told; what is not mended differs in the next call, too
        raise error


def divergence(call: Call, report: ReplicaReport) -> ReplicaDivergenceError:
    """The error that tells ``report``."""
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

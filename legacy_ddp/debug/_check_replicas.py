"""Comparison of the present replica state of all ranks, bit for bit."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._check_settings import as_names
from legacy_ddp._explain.compare import DETAILS, LocalState, compare_headers, divergence_error
from legacy_ddp._explain.replica_report import ReplicaReport
from legacy_ddp._memory.layout import inventory_digest
from legacy_ddp._ranks.agree import agree, announcing_failures
from legacy_ddp._ranks.call import check_can_communicate
from legacy_ddp._ranks.header import Header, Operation
from legacy_ddp._replicas import state as hold
from legacy_ddp._replicas.history import StepHistory
from legacy_ddp._replicas.state import parameter_groups
from legacy_ddp._text import list_some
from legacy_ddp.debug._arguments import Optimizers, Target, as_optimizers, target_of

What = Literal[hold.Kind, "rng"]
EVERYTHING: tuple[What, ...] = get_args(What)


@internals.disable_dynamo
@internals.keeps_grad_mode
def check_replicas(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    what: Iterable[What] = EVERYTHING,
    *,
    local_buffers: Iterable[str] | None = None,
    details: int = DETAILS,
    raises: bool = False,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> ReplicaReport:
    """Compare the bits that replicas should share, and find the differing tensors and ranks.

    Collective: on every rank of the group, with the same arguments, at any moment between two steps. Reads everything
    once and exchanges 128 bytes per rank. Only after a difference the ranks exchange more: 8 bytes per tensor, the
    digests of differing tensors, and the first ``details`` of the differing tensors whole (up to 256 MiB each).

    No rank is assumed to be right. ``report.minority`` has the ranks outside a strict majority. With
    ``checks="detail"`` on the wrapper, ``report.implicated`` has the ranks whose parameters or optimizer state changed
    outside of a step. ``report.ranks`` follows from both, see :class:`legacy_ddp.ReplicaDivergenceError`; it is empty
    if neither decides, or if there is evidence against a rank of the majority. The text shows all sides.

    Args:
        model: a :class:`legacy_ddp.LegacyDistributedDataParallel`, compared on the group of the wrapper, or any module.
        optimizer: one or several optimizers, the same on every rank; needed for ``"optimizer"``.
        what: any of ``"parameters"`` (frozen ones, too), ``"buffers"``, ``"gradients"`` (of trainable parameters),
            ``"optimizer"`` (hyperparameters, state, the group of each parameter) and ``"rng"``. Leaves out local
            gradients of a wrapper, between backward and ``all_reduce()``, and tensors in its ``ignore``. Random
            generators may differ (dropout): the report lists the ranks with equal generators, but this is no
            difference of replicas.
        local_buffers: names, or patterns such as ``"*.running_mean"``, of buffers that may differ; None: the patterns
            of the wrapper's ``Checks(local_buffers=)``.
        details: number of differing tensors to compare element by element.
        raises: whether a difference is an error.
        process_group: of a plain module; None for the default group.

    Raises:
        ReplicaDivergenceError: with ``raises``, replicas differ; its text is the report.
        LayoutError: the arguments differ between ranks.
        TypeError, ValueError: wrong arguments. PeerError, DesyncError, LostPeerError: as for ``all_reduce()``.

    Example:
        >>> check_replicas(model, optimizer).identical
        True
    """
    target = target_of(model, process_group)
    if target.wrapper is not None:
        target.wrapper._refuse_inside_join("check_replicas()")
    synchronizer = target.synchronizer
    with torch.no_grad(), synchronizer.call(Operation.CHECK_REPLICAS, target.group) as call:
        with announcing_failures(call):
            check_can_communicate(call)
            wanted = frozenset(as_names(what, "what"))
            several = as_optimizers(optimizer)
            checks = synchronizer.settings.checks
            local = checks.local_buffers if local_buffers is None else as_names(local_buffers, "local_buffers")
            request = _describe(wanted, several, local, details, raises)
            with call.phase("digest"):
                own = _local_state(target, several, wanted, local)
                header = Header(layout=inventory_digest(request))
                header.micro_batches = synchronizer.planner.counter.micro_batches
                own.add_digests(header)
            header.flags |= synchronizer.checks.late.flush_flag(call.groups)
        agreement = agree(call, header, request)
        synchronizer.flush(call, agreement)
        report = compare_headers(call, agreement.rows, own, details=details)
        report = replace(report, notes=(*report.notes, *_left_out(target, own, wanted)))
        if raises and not report.identical:
            raise divergence_error(call, report)
    synchronizer.warnings.emit()
    return report


def _left_out(target: Target, own: LocalState, what: Collection[str]) -> Iterator[str]:
    unread = hold.unread(own.shared)
    if unread:
        yield f"not compared, because their bits cannot be read: {list_some(unread)}"
    if target.ignore:
        yield f"not compared: what ignore= names ({len(target.ignore)} of them)"
    frozen = [at for at in target.module.parameters() if not at.requires_grad and at.grad is not None]
    if frozen and "gradients" in what:
        yield f"gradients not compared: those of frozen parameters ({len(frozen)} of them)"


def _describe(
    wanted: Collection[str],
    optimizers: Collection[torch.optim.Optimizer],
    local: Collection[str],
    details: int,
    raises: bool,
) -> dict[str, str]:
    """The arguments that must be equal on all ranks, as text."""
    if unknown := sorted(set(wanted) - set(EVERYTHING)):
        raise ValueError(f"what is unknown: got {unknown}, expected some of {EVERYTHING}")
    if not wanted or (wanted == {"optimizer"} and not optimizers):
        raise ValueError(
            f"nothing to compare: got what={sorted(wanted)} and {len(optimizers)} optimizers; ask for more"
        )
    if isinstance(details, bool) or not isinstance(details, int) or details < 0:
        raise ValueError(f"details is not usable: got {details!r}, expected a number of tensors, 0 or more")
    if not isinstance(raises, bool):
        raise TypeError(f"raises is of the wrong type: got {raises!r}, expected True or False")
    return {
        "argument what": ", ".join(sorted(wanted)),
        "argument optimizer": f"{len(optimizers)} of them",
        "argument local_buffers": ", ".join(sorted(local)) or "none",
        "argument details": str(details),
        "argument raises": str(raises),
    }


def _local_state(
    target: Target, optimizers: Sequence[torch.optim.Optimizer], what: Collection[str], local: Sequence[str]
) -> LocalState:
    module = target.module
    if not isinstance(module, nn.Module):
        raise TypeError(f"model is of the wrong type: got {type(module).__name__}, expected torch.nn.Module")
    hold.check_local_buffers(module, local)
    ignore = target.ignore
    digests = target.synchronizer.digests
    history = digests if isinstance(digests, StepHistory) else None
    if history is not None:
        history.update_digest()
    return LocalState(
        shared=[
            *(hold.parameters(module, ignore) if "parameters" in what else ()),
            *(hold.buffers(module, ignore, local) if "buffers" in what else ()),
            *(hold.optimizer_items(optimizers, module) if "optimizer" in what else ()),
            *(parameter_groups(optimizers, module, ignore) if "optimizer" in what else ()),
        ],
        gradients=hold.gradients_in(module, ignore) if "gradients" in what else None,
        generators=hold.digest_generators(module) if "rng" in what else None,
        snapshot=None if history is None else history.snapshot,
    )

"""The one call in which ranks meet: plan → pack → agree → check → reduce → alias → record."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement, agree, announcing_failures
from legacy_ddp._collectives.nonfinite import check_finite
from legacy_ddp._collectives.observers import show_local, show_reduced
from legacy_ddp._collectives.pack import pack
from legacy_ddp._collectives.reduce import Reduced, reduce
from legacy_ddp._collectives.remember import remember
from legacy_ddp._collectives.state import NamedTensors, Synchronizer
from legacy_ddp._log import log_call
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas.check import add_digest, check
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.operation import Operation
from legacy_ddp._transport.process_group import resolve_group


@internals.leaves_compiled_code
def all_reduce(
    synchronizer: Synchronizer,
    named: NamedTensors,
    group: dist.ProcessGroup,
    sample_size: int | None,
    skip: bool,
    *,
    flags: int = 0,
    notice: Callable[[], Any] | None = None,
) -> SyncRecord:
    """The way of a gradient, one step a line; docs/design.md says what each step promises.

    ``flags``: more of them for the header. ``notice``: starts what has to come before it, if anything.
    """
    planner, leaves, history = synchronizer.planner, synchronizer.leaves, synchronizer.history
    with torch.inference_mode(False), torch.no_grad(), synchronizer.call(Operation.ALL_REDUCE, group) as call:
        if notice is not None:
            call.await_notice(notice)
        with announcing_failures(call):
            with call.phase("plan"):
                plan = planner.plan(named)
            packed = pack(call, planner.counter, leaves, plan, sample_size, skip)
            show_local(synchronizer.observers, call, plan, packed)
            header = add_digest(call, history, packed.header._replace(flags=packed.header.flags | flags))
        agreement = agree(call, header, plan.layout.inventory, uneven=synchronizer.settings.checks.uneven)
        check(call, history, agreement.rows)
        synchronizer.note(call, check_finite(call, plan, packed, agreement))
        reduced = reduce(call, leaves, synchronizer.settings.comm_hook, plan, packed, agreement)
        with call.phase("alias"):
            plan.alias(reduced.kinds, reduced.sparse)
        if leaves is not None:
            leaves.end_step()
        planner.counter.reset()
        if history is not None:
            history.end_call()
    synchronizer.note_uneven(call, agreement)
    synchronizer.note_same_data(call, agreement)
    synchronizer.note_joined(call, agreement)
    record = _record(call, agreement, reduced)
    log_call(record.rank, str(call), record.payload_bytes, record.seconds)
    show_reduced(synchronizer.observers, record)
    return record


def _record(call: Call, agreement: Agreement, reduced: Reduced) -> SyncRecord:
    return SyncRecord(
        call=call.number,
        synchronized=True,
        skipped=agreement.divisor == 0,
        sample_size=agreement.sample_size,
        divisor=agreement.divisor,
        skipped_ranks=agreement.skipped_ranks,
        payload_bytes=reduced.payload_bytes,
        seconds=call.seconds,
        rank=call.groups.rank,
        _headers=agreement.headers,
    )


def all_reduce_gradients(
    module_or_params: nn.Module | Iterable[torch.Tensor],
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sample_size: int | None = None,
    skip: bool = False,
) -> SyncRecord:
    """Do what :meth:`LegacyDistributedDataParallel.all_reduce` does, for a loop that wraps its model in something else.

    Collective. What it needs from call to call (flat buffers, counts) is remembered for as long as the module, or the
    first of the parameters, lives. Ranks do not compare anything before the first call. Parameters given without a
    module are named by their position. Checks are the default ones, but for ``unsynchronized_step="allow"``: gradients
    that are not finite are reduced as they are, and ``record.rows`` tells whose they were.

    Raises:
        As :meth:`LegacyDistributedDataParallel.all_reduce`; TypeError: neither a module nor tensors.
    """
    synchronizer, named = remember(module_or_params)
    record = all_reduce(synchronizer, named, resolve_group(process_group), sample_size, skip)
    synchronizer.emit_warning()
    return record

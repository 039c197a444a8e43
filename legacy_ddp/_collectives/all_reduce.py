"""The collective call: plan → pack → agree → check → reduce → alias → record."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement, agree, announcing_failures
from legacy_ddp._agreement.header import Flag
from legacy_ddp._buckets.columns import Columns
from legacy_ddp._collectives.arguments import Arguments, Metrics
from legacy_ddp._collectives.metrics import sum_metrics
from legacy_ddp._collectives.nonfinite import check_finite
from legacy_ddp._collectives.pack import pack
from legacy_ddp._collectives.reduce import Reduced, discarding_after
from legacy_ddp._collectives.registry import synchronizer_of
from legacy_ddp._collectives.state import Synchronizer
from legacy_ddp._log import LOGGER, log_call
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas.check import add_digest, check
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.operation import Operation
from legacy_ddp._transport.process_group import resolve_group


@internals.disable_dynamo
def all_reduce(
    synchronizer: Synchronizer,
    parameters: Callable[[], Columns],
    group: dist.ProcessGroup,
    arguments: Arguments,
    *,
    flags: int = 0,
    notice: Callable[[], Any] | None = None,
) -> SyncRecord:
    """Collective: reduce gradients, a step per line; docs/design.md has the guarantees of each step.

    ``parameters``: all names of every parameter. ``flags``: further flags of the header. ``notice``: starts the
    collective of join() before the header.
    """
    planner, leaves = synchronizer.planner, synchronizer.leaves
    digests, steps, edits = synchronizer.digests, synchronizer.steps, synchronizer.edits
    warnings, observers, settings = synchronizer.warnings, synchronizer.observers, synchronizer.settings
    observers.called.notify()
    with torch.inference_mode(False), torch.no_grad(), synchronizer.call(Operation.ALL_REDUCE, group) as call:
        if notice is not None:
            call.await_notice(notice)
        with announcing_failures(call):
            transport = synchronizer.transport(group)
            transport.before_pack()
            with call.phase("plan"):
                plan = planner.plan(parameters())
            packed = pack(call, planner.counter, leaves, plan, arguments)
            if observers.local:
                with call.phase("observe"):
                    observers.local.notify(dict(packed.grads(plan)))
            header = packed.header._replace(flags=packed.header.flags | flags | _watched(settings))
            header = edits.add_flags(header, planner.counter, plan, packed)
            if steps is not None:
                header = header._replace(random=steps.take(call.groups))
            if digests is not None:
                header = add_digest(call, digests, header)
            call.segments = transport.announce(plan, packed)
        with discarding_after(call, plan, leaves):
            uneven, names = settings.checks.uneven, tuple(packed.metrics)
            agreement = agree(call, header, plan.layout.inventory, uneven=uneven, metrics=names)
            transport.require_host(call)
            if digests is not None and (text := check(call, digests, agreement.rows)):
                warnings.add_everywhere(call, text)
            edits.check(call, plan, agreement, warnings)
            if settings.checks.nonfinite_policy != "ignore":
                check_finite(call, plan, packed, agreement, warnings)
            metrics = sum_metrics(call, agreement, packed.metrics)
            route = transport.settle(call, plan, packed)
            reduced = route.reduce(call, plan, packed, agreement)
            with call.phase("alias"):
                plan.alias(reduced.kinds, reduced.sparse)
        if leaves is not None:
            leaves.end_step()
        planner.counter.reset(plan.parameters)
        if steps is not None:
            steps.begin(call.groups, plan.parameters)
        if digests is not None:
            digests.end_call(call)
    return _finish(synchronizer, call, agreement, reduced, metrics, route.transport)


def _watched(settings: Settings) -> int:
    """The flag of a rank that looks at non-finite gradients: a report needs all ranks."""
    return Flag.WATCHED if settings.checks.nonfinite_policy != "ignore" else 0


def _finish(
    synchronizer: Synchronizer,
    call: Call,
    agreement: Agreement,
    reduced: Reduced,
    metrics: Mapping[str, float],
    transport: str,
) -> SyncRecord:
    """Check for warnings, make the record, log the call and notify the observers."""
    warnings, observers, divisor = synchronizer.warnings, synchronizer.observers, agreement.divisor
    if warnings.open:
        warnings.check(call, agreement)
    record = SyncRecord(
        call=call.number,
        synchronized=True,
        skipped=divisor == 0,
        sample_size=agreement.sample_size,
        divisor=divisor,
        skipped_ranks=agreement.skipped_ranks,
        payload_bytes=reduced.payload_bytes,
        seconds=call.seconds,
        rank=call.groups.rank,
        transport=transport,
        metrics=metrics,
        _headers=agreement.headers,
    )
    if LOGGER.isEnabledFor(logging.DEBUG):
        log_call(record.rank, str(call), record.payload_bytes, record.seconds)
    if observers.reduced:
        observers.reduced.notify(record)
    return record


def all_reduce_gradients(
    module_or_params: nn.Module | Iterable[torch.Tensor],
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sample_size: SupportsIndex | None = None,
    skip: bool = False,
    metrics: Metrics = None,
) -> SyncRecord:
    """The same as :meth:`LegacyDistributedDataParallel.all_reduce`, for a loop with another wrapper around its model.

    Collective. The state between calls (flat buffers, counts) lives as long as the module, or the first of the
    parameters. The ranks compare nothing before the first call. Parameters given without a module are named by their
    position. The checks are the default checks, except for ``unsynchronized_step="allow"``; replicas and steps
    are not compared.

    Args:
        module_or_params: a module, or parameters of any shapes, in the same order on every rank.
        process_group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        sample_size, skip, metrics: as for the wrapper.

    Raises:
        As :meth:`LegacyDistributedDataParallel.all_reduce`; TypeError: neither a module nor tensors.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer(inputs * rank).sum().backward()
        >>> record = all_reduce_gradients(layer)
        >>> layer.weight.grad  # the mean of 0, 3 and 6
        tensor([[3., 3.]])
    """
    synchronizer, parameters = synchronizer_of(module_or_params)
    arguments = Arguments(sample_size, skip, metrics)
    record = all_reduce(synchronizer, parameters, resolve_group(process_group), arguments)
    if synchronizer.warnings.pending:
        synchronizer.warnings.emit()
    if synchronizer.observers.returned:
        synchronizer.notify_returned(record)
    return record

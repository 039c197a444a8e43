"""The collective call: plan → pack → facts → agree → compare → route → reduce → alias → end → record."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement, agree, announcing_failures
from legacy_ddp._buckets.plan import Columns
from legacy_ddp._collectives.check_interface import LocalStep
from legacy_ddp._collectives.metrics import sum_metrics
from legacy_ddp._collectives.pack import Arguments, Metrics, pack
from legacy_ddp._collectives.reduce import Payload, discarding_after, kinds_of_results
from legacy_ddp._collectives.state import Synchronizer, synchronizer_of
from legacy_ddp._log import LOGGER, log_call
from legacy_ddp._record import SyncRecord
from legacy_ddp._transport.private_groups import resolve_group
from legacy_ddp._transport.rows import Operation


@internals.disable_dynamo
@internals.keeps_grad_mode
def all_reduce(
    synchronizer: Synchronizer,
    parameters: Callable[[], Columns],
    group: dist.ProcessGroup,
    arguments: Arguments,
    *,
    flags: int = 0,
    notice: Callable[[], Any] | None = None,
) -> SyncRecord:
    """Collective: reduce gradients. Each line is a step; docs/design.md says what each step guarantees.

    ``parameters``: returns every parameter with all its names. ``flags``: further flags of the header. ``notice``:
    starts the collective of join() before the header.
    """
    planner, leaves = synchronizer.planner, synchronizer.leaves
    synchronizer.policy.clock.begin()
    if synchronizer.observers.called:
        synchronizer.observers.called.notify()
    mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    # torch.no_grad() would do the same as set_grad_enabled(False) in twice the time.
    try:
        with mode, torch.set_grad_enabled(False), synchronizer.call(Operation.ALL_REDUCE, group) as call:
            if notice is not None:
                call.await_notice(notice)
            with announcing_failures(call):
                transport = synchronizer.transport(group)
                transport.before_pack()
                with call.phase("plan"):
                    plan = planner.plan(parameters())
                packed = pack(call, planner.counter, leaves, plan, arguments)
                step = LocalStep(call, plan, packed, planner.counter, packed.header)
                _add_facts(synchronizer, step, flags)
                call.segments = transport.announce(plan, packed)
            with discarding_after(call, plan, leaves):
                agreement = agree(
                    call,
                    packed.header,
                    plan.layout.inventory,
                    mismatches=synchronizer.checks.mismatches,
                    metrics=tuple(packed.metrics),
                    on_device=not plan.layout.is_on_cpu,
                )
                transport.require_host(call)
                _compare(synchronizer, step, agreement)
                has_metrics = packed.metrics or not agreement.is_uniform  # or another rank may have them
                metrics = sum_metrics(call, agreement, packed.metrics) if has_metrics else {}
                route = transport.settle(call, plan, packed)
                reduced = route.reduce(call, plan, packed, agreement)
                with call.phase("alias"):
                    given = planner.counter.given_gradients(plan.parameters)
                    plan.alias(kinds_of_results(call, reduced), reduced.sparse, given)
            _end(synchronizer, step)
    except BaseException:
        planner.counter.note_failed_call()
        raise
    return _record(synchronizer, step, agreement, reduced, metrics, route.transport)


def _add_facts(synchronizer: Synchronizer, step: LocalStep, flags: int) -> None:
    """Let observers see the local gradients, and checks write their facts. ``flags``: of the caller."""
    step.header.flags |= flags
    observers = synchronizer.observers
    if observers.local:
        with step.call.phase("observe"):
            observers.local.notify(dict(step.packed.grads(step.plan)))
    for check in synchronizer.checks.with_facts:
        if check.is_on:
            check.facts(step)


def _compare(synchronizer: Synchronizer, step: LocalStep, agreement: Agreement) -> None:
    """Collective where a check finds a reason: errors and warnings of all ranks."""
    for check in synchronizer.checks.with_compare:
        if check.is_on and (text := check.compare(step, agreement)):
            synchronizer.warnings.add_everywhere(step.call, text, check.section)


def _end(synchronizer: Synchronizer, step: LocalStep) -> None:
    """Begin with the next step: every parameter has its new gradient."""
    if synchronizer.leaves is not None:
        synchronizer.leaves.end_step()
    synchronizer.policy.clock.end_call()
    step.counter.reset(step.plan.parameters)
    step.call.group_state.waited_seconds = step.call.seconds["agree"]
    for check in synchronizer.checks.with_end:
        if check.is_on:
            check.end(step)


def _record(
    synchronizer: Synchronizer,
    step: LocalStep,
    agreement: Agreement,
    reduced: Payload,
    metrics: Mapping[str, float],
    transport: str,
) -> SyncRecord:
    """Ask the checks of rank 0, make the record, log the call and notify the observers."""
    call, divisor = step.call, agreement.divisor
    checks, observers = synchronizer.checks, synchronizer.observers
    if call.groups.rank == 0 and checks.observing:
        for check, text in checks.observe(step, agreement):
            synchronizer.warnings.add(call, text, check.section)
    record = SyncRecord(
        call=call.number,
        synchronized=True,
        skipped=divisor == 0,
        sample_size=agreement.sample_size,
        divisor=divisor,
        skipped_ranks=agreement.skipped_ranks,
        payload_bytes=reduced.size_bytes,
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
    sample_size: SupportsIndex | float | None = None,
    skip: bool = False,
    metrics: Metrics = None,
) -> SyncRecord:
    """The same as :meth:`LegacyDistributedDataParallel.all_reduce`, of a plain module without this wrapper.

    Collective. The state between calls (flat buffers, counts) lives as long as the module, or the first of the
    parameters. The ranks compare nothing before the first call. Parameters given without a module are named by their
    position. The checks are the default checks, except for ``unsynchronized_step="allow"``; replicas and steps
    are not compared.

    Args:
        module_or_params: a module, or parameters (not their gradients) of any shapes, in the same order on every rank.
        process_group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        sample_size, skip, metrics: as for the wrapper.

    Raises:
        As :meth:`LegacyDistributedDataParallel.all_reduce`; TypeError: neither a module nor tensors; ValueError: no
        tensor of the list requires grad.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer(inputs * rank).sum().backward()
        >>> record = all_reduce_gradients(layer)
        >>> layer.weight.grad  # the mean of 0, 3 and 6
        tensor([[3., 3.]])
    """
    synchronizer, parameters = synchronizer_of(module_or_params)
    arguments = Arguments(sample_size, skip, metrics)
    return synchronizer.end_call(all_reduce(synchronizer, parameters, resolve_group(process_group), arguments))

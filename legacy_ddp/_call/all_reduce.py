"""The steps of all_reduce(): plan → pack → facts → agree → compare → route → reduce → alias → end → record."""

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import ALWAYS, LocalStep
from legacy_ddp._call.pack import Arguments, pack, sum_metrics
from legacy_ddp._call.reduce import Payload
from legacy_ddp._call.state import Synchronizer
from legacy_ddp._call.transport_choice import HOST, Transport
from legacy_ddp._errors import AgreedError
from legacy_ddp._log import LOGGER, log_call
from legacy_ddp._memory.flat_buffer import ABSENT, SPARSE, ZEROS
from legacy_ddp._memory.layout import Layout
from legacy_ddp._memory.plan import Columns, Plan
from legacy_ddp._ranks.agree import Agreement, agree, announce_failure
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Operation
from legacy_ddp._record import SyncRecord
from legacy_ddp._reproducible import Leaves


@internals.disable_dynamo
@internals.keeps_grad_mode  # also after an exception at the begin of a try statement in the block below
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

    ``parameters``: returns every parameter with all its names. ``flags``: added to the header. ``notice``: starts the
    collective of join() that comes before the header.
    """
    planner, leaves = synchronizer.planner, synchronizer.leaves
    synchronizer.policy.clock.begin()
    if synchronizer.observers.called:
        synchronizer.observers.called.notify()
    # As torch.no_grad(), but no signal handler runs between the last line and the caller, and in a tenth of the time.
    was_enabled = torch.is_grad_enabled()
    mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else internals.NO_MODE
    try:
        with mode, synchronizer.call(Operation.ALL_REDUCE, group) as call:
            internals.set_grad_mode(False)  # behind inference_mode(False), which turns autograd on
            if notice is not None:
                call.await_notice(notice)
            try:
                transport = synchronizer.on_groups[group].transport
                step = _prepare(synchronizer, transport, call, parameters, arguments, flags)
            except Exception as error:
                announce_failure(call, error)
                raise
            try:
                agreement, metrics, reduced = _exchange(synchronizer, transport, step)
            except AgreedError:
                raise
            except BaseException:
                _discard_gradients(call, step.plan, leaves)
                raise
            _end(synchronizer, step)
    except BaseException:
        planner.counter.note_failed_call()
        raise
    finally:
        internals.set_grad_mode(was_enabled)
    return _record(synchronizer, step, agreement, reduced, metrics)


def _prepare(
    synchronizer: Synchronizer,
    transport: Transport,
    call: Call,
    parameters: Callable[[], Columns],
    arguments: Arguments,
    flags: int,
) -> LocalStep:
    """Local: plan, pack, show the local gradients to observers, and write the facts of this rank."""
    if not call.groups.endpoints_exchanged:
        call.prepare_watchdog()
    planner, local, checks = synchronizer.planner, synchronizer.observers.local, synchronizer.checks
    transport.before_pack()
    with call.phase("plan"):
        plan = planner.plan(parameters())
    packed = pack(call, planner.counter, synchronizer.leaves, plan, arguments)
    step = LocalStep(call, plan, packed, planner.counter, packed.header)
    packed.header.flags |= flags
    if local:
        with call.phase("observe"):
            local.notify(dict(packed.grads(plan)))
    for check in checks.with_facts_on_cpu if plan.layout.is_on_cpu else checks.with_facts:
        if check.is_on:
            check.facts(step)
    call.segments = transport.announce(plan, packed)
    return step


def _exchange(
    synchronizer: Synchronizer, transport: Transport, step: LocalStep
) -> tuple[Agreement, Mapping[str, float], Payload]:
    """Collective: agree, compare, sum over the ranks, and give every parameter its new gradient."""
    call, plan, packed, checks = step.call, step.plan, step.packed, synchronizer.checks
    is_on_cpu = plan.layout.is_on_cpu
    agreement = agree(
        call,
        packed.header,
        plan.layout.inventory,
        mismatches=checks.mismatches,
        metrics=tuple(packed.metrics),
        on_device=not is_on_cpu,
    )
    if call.settings.transport == HOST:
        transport.require_host(call)
    flags = agreement.some_flags | ALWAYS
    for check in checks.with_compare_on_cpu if is_on_cpu else checks.with_compare:
        if check.is_on and check.awaits & flags and (text := check.compare(step, agreement)):
            synchronizer.warnings.add(call, text, check.section, is_everywhere=True)
    has_metrics = packed.metrics or not agreement.is_uniform  # or another rank may have them
    metrics = sum_metrics(call, agreement, packed.metrics) if has_metrics else {}
    reduced = transport.settle(call, plan, packed).reduce(call, plan, packed, agreement)
    with call.phase("alias"):
        given = step.counter.given_gradients(was_edited=packed.was_edited)
        kinds = reduced.kinds
        if call.settings.absent_gradients == "zeros" and reduced.divisor:
            kinds = _with_zeros(call, plan.layout, kinds)
        plan.alias(kinds, reduced.sparse, given)
    return agreement, metrics, reduced


def _end(synchronizer: Synchronizer, step: LocalStep) -> None:
    if synchronizer.leaves is not None:
        synchronizer.leaves.end_step()
    synchronizer.policy.clock.mark = perf_counter()  # the time of a call counts for no step
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
) -> SyncRecord:
    call, divisor = step.call, agreement.divisor
    checks, observers = synchronizer.checks, synchronizer.observers
    if call.groups.rank == 0:
        flags = agreement.some_flags | ALWAYS
        for check in tuple(checks.observing):
            if check.awaits & flags and (text := check.observe(step, agreement)) is not None:
                checks.observing.remove(check)
                if text:
                    synchronizer.warnings.add(call, text, check.section, is_everywhere=False)
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
        transport=reduced.transport,
        metrics=metrics,
        _headers=agreement.headers,
    )
    if LOGGER.isEnabledFor(logging.DEBUG):
        log_call(record.rank, str(call), record.payload_bytes, record.seconds)
    if observers.reduced:
        observers.reduced.notify(record)
    return record


def _with_zeros(call: Call, layout: Layout, kinds: Sequence[int]) -> Sequence[int]:
    """``kinds`` of reduced gradients, with ZEROS in place of ABSENT, except for a parameter that has had a sparse
    gradient."""
    # The names of sparse gradients are kept by group, whose ranks have made the same calls. The plan of a rank may be
    # newer than that of another, or have sparse gradients from another group.
    slots, sparse = layout.slots, call.group_state.sparse
    if max(kinds, default=ABSENT) >= SPARSE:
        sparse.update(slot.name for slot, kind in zip(slots, kinds, strict=True) if kind >= SPARSE)
    return [
        ZEROS if kind == ABSENT and slot.name not in sparse else kind for slot, kind in zip(slots, kinds, strict=True)
    ]


def _discard_gradients(call: Call, plan: Plan, leaves: Leaves | None) -> None:
    """After an error that is no :class:`AgreedError`, drop all gradients if some may be half reduced.

    Drops their memory, too: an unfinished collective, or another rank or thread, may still write to it.
    """
    # Without shared memory gradients change from the hook or the payload on. With shared memory, other ranks may write
    # to the flat tensors of this rank from the header on, also after a failure here.
    if any(call.segments.serials) or call.phase_name in ("hook", "payload", "alias"):
        plan.discard_gradients()
        if leaves is not None:
            leaves.release_memory()

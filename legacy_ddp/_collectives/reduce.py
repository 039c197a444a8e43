"""Reduction of packed gradients: the same flat tensors on every rank. Collective (payload)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from legacy_ddp._agreement.agree import Agreement, agree_on_kinds
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.gradient import ABSENT, SPARSE
from legacy_ddp._buckets.layout import cut_runs
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.comm_hook import HookResult, copy_results, run_hook
from legacy_ddp._collectives.dense import fill_missing, merged_runs, reduce_dense, reduce_sparse
from legacy_ddp._collectives.host_sum import sum_between_hosts, sum_on_host
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._errors import AgreedError
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._reproducible.tree_reduce import TreeInput, tree_reduce
from legacy_ddp._settings import CommHook, Settings
from legacy_ddp._transport.call import Call


@dataclass(frozen=True)
class Reduced:
    """Result of the payload phase: every slot's kind of gradient, sparse gradients by slot, and the bytes sent."""

    kinds: Sequence[int]
    sparse: Mapping[int, torch.Tensor]
    payload_bytes: int


def reduce(
    call: Call,
    leaves: Leaves | None,
    settings: Settings,
    plan: Plan,
    packed: Packed,
    agreement: Agreement,
    *,
    on_host: bool,
) -> Reduced:
    """Sum the packed gradients over the ranks and divide; afterwards the buffers hold the same bits on every rank.

    ``leaves``: the micro-batches behind ``packed``, if a tree gives the order of the sum. ``settings``: a hook there
    replaces the sum of dense gradients. ``on_host``: the host transport carries the dense gradients on CPU.

    Raises:
        CommHookError: the hook's result cannot be a gradient; no gradient changed.
        LostPeerError: a rank was lost. The content of the buffers is then undefined, as after an interrupt, and every
            gradient is dropped.
    """
    divisor, hook = agreement.divisor, settings.comm_hook
    if divisor == 0:
        return Reduced([ABSENT] * len(packed.kinds), {}, 0)
    kinds = agree_on_kinds(call, agreement, packed.kinds)
    try:
        results = _run_hook(call, hook, plan, packed, kinds) if hook is not None else []
        with call.phase("payload"):
            size_bytes, rest = 0, plan.slot_ranges
            if on_host:
                total = sum_on_host if call.groups.between is None else sum_between_hosts
                size_bytes = total(call, settings, plan, packed, kinds, agreement)
                rest = [(buffer, share) for buffer, share in rest if buffer.segment is None]
            if hook is not None:
                size_bytes += copy_results(call, hook, results, divisor)
            elif leaves is not None:
                size_bytes += sum(tree_reduce(call, _tree_inputs(call, leaves, plan, rest, packed, kinds), divisor))
            else:
                size_bytes += reduce_dense(call, plan, rest, packed, kinds, divisor)
            if max(kinds, default=ABSENT) < SPARSE:
                return Reduced(kinds, {}, size_bytes)
            sparse, sparse_bytes = reduce_sparse(call, plan, packed, kinds, divisor)
            return Reduced(kinds, sparse, size_bytes + sparse_bytes)
    except AgreedError:
        raise
    except BaseException:
        discard(plan, leaves)
        raise


def discard(plan: Plan, leaves: Leaves | None) -> None:
    """Drop every gradient and the memory behind: other ranks or threads may still write there."""
    plan.discard_gradients()
    if leaves is not None:
        leaves.release_memory()


def _tree_inputs(
    call: Call,
    leaves: Leaves,
    plan: Plan,
    slot_ranges: Sequence[tuple[FlatBuffer, slice]],
    packed: Packed,
    kinds: Sequence[int],
) -> list[TreeInput]:
    """The input for the buffers in ``slot_ranges``."""
    inputs = []
    for index, (buffer, share) in enumerate(plan.slot_ranges):
        if (buffer, share) in slot_ranges:
            own = packed.flats[index]
            recv_buffer = leaves.sums.recv_buffer(index, own) if call.groups.size > 1 else own
            runs = cut_runs(merged_runs(buffer, kinds[share]), max_numel=plan.layout.buffer_size)
            group = call.groups.payload(buffer.bucket.device)
            inputs.append(TreeInput(group, own, recv_buffer, buffer.flat, runs))
    return inputs


def _run_hook(call: Call, hook: CommHook, plan: Plan, packed: Packed, kinds: Sequence[int]) -> list[HookResult]:
    """Give the hook copies of the flat tensors: if the hook fails, every ``.grad`` is unchanged."""
    with call.phase("hook"):
        for buffer, share in plan.slot_ranges:
            buffer.payload.copy_(buffer.flat)
            fill_missing(buffer, packed, kinds, share, [(0, buffer.bucket.numel)], buffer.payload)
        return run_hook(call, hook, plan)

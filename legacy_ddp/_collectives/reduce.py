"""Reduction of packed gradients: the same flat tensors on every rank. Collective (payload)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from legacy_ddp._agreement.agree import Agreement, agree_on_kinds
from legacy_ddp._buckets.gradient import ABSENT, SPARSE
from legacy_ddp._buckets.layout import cut_runs
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.comm_hook import HookResult, copy_results, run_hook
from legacy_ddp._collectives.dense import fill_missing, merged_runs, reduce_dense
from legacy_ddp._collectives.host_sum import sum_on_host
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.sparse import reduce_sparse
from legacy_ddp._errors import AgreedError
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._reproducible.tree_reduce import TreeInput, tree_reduce
from legacy_ddp._settings import CommHook
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
    hook: CommHook | None,
    plan: Plan,
    packed: Packed,
    agreement: Agreement,
    *,
    on_host: bool,
) -> Reduced:
    """Sum the packed gradients over the ranks and divide; afterwards the buffers hold the same bits on every rank.

    ``leaves``: the micro-batches behind ``packed``, if a tree gives the order of the sum. ``hook``: replaces the sum of
    dense gradients. ``on_host``: the host transport carries the dense gradients on CPU.

    Raises:
        CommHookError: the hook's result cannot be a gradient; no gradient changed.
        LostPeerError: a rank was lost. The content of the buffers is then undefined, as after an interrupt, and every
            gradient is dropped.
    """
    divisor = agreement.divisor
    if divisor == 0:
        return Reduced([ABSENT] * len(packed.kinds), {}, 0)
    kinds = agree_on_kinds(call, agreement, packed.kinds)
    try:
        results = _run_hook(call, hook, plan, packed, kinds) if hook is not None else []
        with call.phase("payload"):
            if leaves is not None:
                recv_buffers = leaves.sums.recv_buffers(packed.flats) if call.groups.size > 1 else packed.flats
                inputs = list(_tree_inputs(plan, recv_buffers, packed, kinds))
                return Reduced(kinds, {}, tree_reduce(call, inputs, divisor))
            if hook is not None:
                size_bytes = copy_results(call, hook, results, divisor)
            else:
                size_bytes = _reduce_dense(call, plan, packed, kinds, agreement, on_host=on_host)
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


def _reduce_dense(
    call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], agreement: Agreement, *, on_host: bool
) -> int:
    if not on_host:
        return reduce_dense(call, plan, plan.slot_ranges, packed, kinds, agreement.divisor)
    elsewhere = [(buffer, share) for buffer, share in plan.slot_ranges if buffer.segment is None]
    size_bytes = sum_on_host(call, plan, packed, kinds, agreement.divisor, same_mask=agreement.has_same_mask)
    return size_bytes + reduce_dense(call, plan, elsewhere, packed, kinds, agreement.divisor)


def _tree_inputs(
    plan: Plan, recv_buffers: Sequence[torch.Tensor], packed: Packed, kinds: Sequence[int]
) -> Iterator[TreeInput]:
    for (buffer, share), own, recv_buffer in zip(plan.slot_ranges, packed.flats, recv_buffers, strict=True):
        runs = merged_runs(buffer, kinds[share])
        yield TreeInput(own, recv_buffer, buffer.flat, cut_runs(runs, max_numel=plan.layout.buffer_size))


def _run_hook(call: Call, hook: CommHook, plan: Plan, packed: Packed, kinds: Sequence[int]) -> list[HookResult]:
    """Give the hook copies of the flat tensors: if the hook fails, every ``.grad`` is unchanged."""
    with call.phase("hook"):
        for buffer, share in plan.slot_ranges:
            buffer.payload.copy_(buffer.flat)
            fill_missing(buffer, packed, kinds, share, [(0, buffer.bucket.numel)], buffer.payload)
        return run_hook(call, hook, plan)

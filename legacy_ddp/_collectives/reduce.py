"""Flat tensors of all ranks -> the same reduced flat tensor on every rank. Collective (payload).

Division comes after the sum. Only where half precision travels is it split: see :func:`split_divisor`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp._agreement.agree import Agreement, agree_on_kinds
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.gradient import ABSENT, DENSE, SPARSE
from legacy_ddp._buckets.inventory import gradient_dtype
from legacy_ddp._buckets.layout import Run, cut_runs
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import as_real
from legacy_ddp._collectives.comm_hook import Shown, accept_results, show_to_hook
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._errors import AgreedError
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._reproducible.tree_reduce import TreeInput, tree_reduce
from legacy_ddp._settings import CommHook
from legacy_ddp._transport.call import Call

# Below it, a second collective costs more than is gained. More than two gain nothing: a gloo group has two threads.
SMALLEST_PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Reduced:
    """What the payload brought: every slot's kind of gradient, the sparse ones by slot, and the bytes handed over."""

    kinds: Sequence[int]
    sparse: Mapping[int, torch.Tensor]
    payload_bytes: int


def reduce(
    call: Call, leaves: Leaves | None, hook: CommHook | None, plan: Plan, packed: Packed, agreement: Agreement
) -> Reduced:
    """Sum what the participants packed and divide it; the buffers then hold the same bits on every rank.

    ``leaves``: what they were packed from, if they are to be added in the order of a tree. ``hook``: what brings the
    dense gradients together instead.

    Raises:
        CommHookError: the hook's result is of no use; nothing changed.
        LostPeerError: a rank was lost on the way. What the buffers hold after that, or after an interrupt, is
            undefined, so every gradient is dropped.
    """
    if agreement.divisor == 0:
        return Reduced([ABSENT] * len(packed.kinds), {}, 0)
    kinds = agree_on_kinds(call, agreement, packed.kinds)
    try:
        shown = _show_to_hook(call, hook, plan, packed, kinds) if hook is not None else []
        with call.phase("payload"):
            if leaves is not None:
                inboxes = leaves.sums.recv_buffers(packed.flats) if call.groups.size > 1 else packed.flats
                trunks = list(_trunks(plan, inboxes, packed, kinds))
                return Reduced(kinds, {}, tree_reduce(call, trunks, agreement.divisor))
            if hook is not None:
                dense_bytes = accept_results(call, hook, shown, agreement.divisor)
            else:
                dense_bytes = _reduce_all_dense(call, plan, packed, kinds, agreement.divisor)
            sparse, sparse_bytes = _reduce_all_sparse(call, plan, packed, kinds, agreement.divisor)
    except AgreedError:
        raise
    except BaseException:
        plan.discard_gradients()
        if leaves is not None:
            leaves.release_memory()
        raise
    return Reduced(kinds, sparse, dense_bytes + sparse_bytes)


def split_divisor(divisor: int, size: int, wire: torch.dtype) -> tuple[float, float]:
    """(before, after): what to divide by before and after the sum over ``size`` ranks.

    fp16 is divided by about the square root of ``size`` on either side of the sum (the split that PyTorch's FSDP2 uses,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), and by a sample count before it. Both are powers of
    two but the remainder, so that the first division is exact where it does not underflow.
    """
    if wire != torch.float16 or size == 1:
        return 1.0, float(divisor)
    samples_per_rank = 2 ** max(0, (divisor // size).bit_length() - 1)
    before = float(samples_per_rank * 2 ** (((size - 1).bit_length() + 1) // 2))
    return before, divisor / before


def reduce_dense(call: Call, buffers: Sequence[tuple[FlatBuffer, list[Run]]], divisor: int) -> int:
    """Replace ``runs`` of each buffer by the sum over the ranks divided by ``divisor``; return the bytes handed over.

    All collectives are started before the first is waited for.
    """
    started = []
    for buffer, runs in buffers:
        with call.profiled(f"start {buffer.bucket.label}"):
            started += [(buffer, run, _start(call, buffer, run, divisor)) for run in runs]
    size_bytes = 0
    for buffer, (start, stop), work in started:
        with call.profiled(f"finish {buffer.bucket.label}"):
            if work is not None:
                call.wait(call.groups.payload(buffer.bucket.device), work)
                size_bytes += (stop - start) * buffer.payload.itemsize
            _finish(call, buffer, (start, stop), divisor)
    return size_bytes


def reduce_sparse(call: Call, grad: torch.Tensor, lengths: Sequence[int], divisor: int) -> tuple[torch.Tensor, int]:
    """Sum of every rank's coalesced sparse ``grad``, in rank order, divided; and the bytes handed over.

    ``lengths[r]`` is the number of rank r's entries; equal lists on all ranks.
    """
    group, longest = call.groups.payload(grad.device), max(lengths)
    indices = grad.indices().new_zeros((grad.sparse_dim(), longest))
    indices[:, : lengths[call.groups.rank]] = grad.indices()
    values = grad.values().new_zeros((longest, *grad.values().shape[1:]))
    values[: lengths[call.groups.rank]] = grad.values()
    all_indices = _gather(call, group, indices)
    all_values = _gather(call, group, values)
    total = torch.sparse_coo_tensor(
        torch.cat([part[:, :length] for part, length in zip(all_indices, lengths, strict=True)], dim=1),
        torch.cat([part[:length] for part, length in zip(all_values, lengths, strict=True)]).to(_wide(grad.dtype)),
        grad.shape,
        check_invariants=False,
    ).coalesce()
    reduced = torch.sparse_coo_tensor(
        total.indices(),
        (total.values() / divisor if divisor != 1 else total.values()).to(grad.dtype),
        grad.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return reduced, indices.nbytes + values.nbytes


def _trunks(plan: Plan, inboxes: Sequence[torch.Tensor], packed: Packed, kinds: Sequence[int]) -> Iterator[TreeInput]:
    for (buffer, share), own, inbox in zip(plan.slot_ranges, packed.flats, inboxes, strict=True):
        joined = _joined_runs(buffer, kinds[share])
        yield TreeInput(own, inbox, buffer.flat, cut_runs(joined, max_numel=plan.layout.buffer_size))


def _show_to_hook(call: Call, hook: CommHook, plan: Plan, packed: Packed, kinds: Sequence[int]) -> list[Shown]:
    with call.phase("hook"):
        for (
            buffer,
            share,
        ) in plan.slot_ranges:  # the copy: a hook that fails may leave every .grad as it was
            buffer.payload.copy_(buffer.flat)
            _fill(buffer, packed, kinds, share, [(0, buffer.bucket.numel)], buffer.payload)
        return show_to_hook(call, hook, plan)


def _reduce_all_dense(call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], divisor: int) -> int:
    runs = []
    for buffer, share in plan.slot_ranges:
        joined = _joined_runs(buffer, kinds[share])
        _fill(buffer, packed, kinds, share, joined, buffer.flat)
        runs.append((buffer, _cut(call, buffer, joined, plan.layout.buffer_size)))
    return reduce_dense(call, runs, divisor)


def _joined_runs(buffer: FlatBuffer, kinds: Sequence[int]) -> list[Run]:
    return buffer.bucket.runs([kind == DENSE for kind in kinds], max_gap=buffer.bucket.max_gap)


def _fill(
    buffer: FlatBuffer, packed: Packed, kinds: Sequence[int], share: slice, runs: Sequence[Run], flat: torch.Tensor
) -> None:
    """Put into the runs of ``flat`` that will travel what packing left out: zeros, and sparse gradients that became
    dense."""
    buffer.zero(packed.kinds[share], runs=runs, flat=flat)
    for index, grad in packed.sparse.items():
        if kinds[index] == DENSE and share.start <= index < share.stop:
            slot = buffer.bucket.slots[index - share.start]
            flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(grad.to_dense())


def _cut(call: Call, buffer: FlatBuffer, joined: Sequence[Run], buffer_size: int) -> list[Run]:
    """What each collective carries: on gloo halves, so that the first is divided while the second is under way."""
    piece = buffer_size
    if call.groups.is_private(call.groups.payload(buffer.bucket.device)):
        half = (sum(stop - start for start, stop in joined) + 1) // 2
        piece = min(piece, max(half, SMALLEST_PIECE_BYTES // buffer.payload.itemsize))
    return cut_runs(joined, max_numel=piece)


def _reduce_all_sparse(
    call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], divisor: int
) -> tuple[dict[int, torch.Tensor], int]:
    indices = [index for index, kind in enumerate(kinds) if kind >= SPARSE]
    if not indices:
        return {}, 0
    own = [packed.sparse.get(index, _no_entries(plan.parameters[index], kinds[index] - SPARSE)) for index in indices]
    lengths = call.gather(torch.tensor([grad._nnz() for grad in own], device="cpu")).T.tolist()
    results = [reduce_sparse(call, grad, counts, divisor) for grad, counts in zip(own, lengths, strict=True)]
    return {index: grad for index, (grad, _) in zip(indices, results, strict=True)}, sum(size for _, size in results)


def _no_entries(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    dtype = gradient_dtype(parameter)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=dtype, device=parameter.device)
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)


def _start(call: Call, buffer: FlatBuffer, run: Run, divisor: int) -> Any:
    if call.groups.size == 1:
        return None
    start, stop = run
    flat, wire = buffer.flat[start:stop], buffer.payload[start:stop]
    before, _ = split_divisor(divisor, call.groups.size, wire.dtype)
    if before != 1.0:
        torch.div(flat, before, out=wire)
    elif buffer.wire is not None:
        wire.copy_(flat)
    options = call.options("Allreduce")
    options.reduceOp = dist.ReduceOp.SUM
    return call.start(call.groups.payload(flat.device), lambda group: group.allreduce([as_real(wire)], options))


def _finish(call: Call, buffer: FlatBuffer, run: Run, divisor: int) -> None:
    start, stop = run
    flat = buffer.flat[start:stop]
    if call.groups.size == 1:
        after = float(divisor)
    else:
        wire = buffer.payload[start:stop]
        _, after = split_divisor(divisor, call.groups.size, wire.dtype)
        if buffer.wire is not None:
            # A sum may need the wider range of the two, its quotient not.
            if torch.finfo(wire.dtype).max > torch.finfo(flat.dtype).max:
                wire.div_(after)
                after = 1.0
            flat.copy_(wire)
    if after != 1.0:
        flat.div_(after)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _gather(call: Call, group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    if call.groups.size == 1:
        return [tensor]
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    parts = [torch.empty_like(real) for _ in range(call.groups.size)]
    options = call.options("Allgather")
    call.run(group, lambda carrier: carrier.allgather([parts], [real.contiguous()], options))
    return [torch.view_as_complex(part) for part in parts] if tensor.is_complex() else parts

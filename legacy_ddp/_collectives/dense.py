"""Sums of gradients by collectives of a process group: dense, then sparse gradients. Collective (payload).

Division comes after the sum. Only fp16 on the wire is divided before and after the sum: see :func:`split_divisor`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.gradient import DENSE, SPARSE
from legacy_ddp._buckets.inventory import gradient_dtype
from legacy_ddp._buckets.layout import Run, cut_runs
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import as_real
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._transport.call import Call

# A smaller second collective costs more than it gains. More than two gain nothing: a gloo group has two threads.
SMALLEST_PIECE_BYTES = 8 * 2**20


def reduce_dense(
    call: Call,
    plan: Plan,
    slot_ranges: Sequence[tuple[FlatBuffer, slice]],
    packed: Packed,
    kinds: Sequence[int],
    divisor: int,
) -> int:
    """Replace every run of dense gradients by its sum over the ranks divided by ``divisor``; return the bytes sent.

    ``slot_ranges``: the buffers to reduce, with their slots. All collectives are started before the first wait.
    """
    started = []
    for buffer, share in slot_ranges:
        runs = merged_runs(buffer, kinds[share])
        fill_missing(buffer, packed, kinds, share, runs, buffer.flat)
        with call.profiled(f"start {buffer.bucket.label}"):
            pieces = _cut(call, buffer, runs, plan.layout.buffer_size)
            started += [(buffer, run, _start(call, buffer, run, divisor)) for run in pieces]
    size_bytes = 0
    for buffer, (start, stop), work in started:
        with call.profiled(f"finish {buffer.bucket.label}"):
            if work is not None:
                call.wait(call.groups.payload(buffer.bucket.device), work)
                size_bytes += (stop - start) * buffer.payload.itemsize
            _finish(call, buffer, (start, stop), divisor)
    return size_bytes


def merged_runs(buffer: FlatBuffer, kinds: Sequence[int]) -> list[Run]:
    """The runs of slots with a dense gradient on any rank; runs with a small gap between them are merged."""
    return buffer.bucket.runs([kind == DENSE for kind in kinds], max_gap=buffer.bucket.max_gap)


def fill_missing(
    buffer: FlatBuffer, packed: Packed, kinds: Sequence[int], share: slice, runs: Sequence[Run], flat: torch.Tensor
) -> None:
    """Fill the slots left out by packing: zeros for absent gradients, and sparse gradients converted to dense."""
    buffer.zero(packed.kinds[share], runs=runs, flat=flat)
    for index, grad in packed.sparse.items():
        if kinds[index] == DENSE and share.start <= index < share.stop:
            slot = buffer.bucket.slots[index - share.start]
            flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(grad.to_dense())


def split_divisor(divisor: int, size: int, wire: torch.dtype) -> tuple[float, float]:
    """(before, after): divisors before and after the sum over ``size`` ranks.

    fp16 is divided by about the square root of ``size`` on either side of the sum (the split that PyTorch's FSDP2 uses,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), and by a sample count before the sum. The divisor
    before the sum is a power of two: an exact division, unless it underflows.
    """
    if wire != torch.float16 or size == 1:
        return 1.0, float(divisor)
    samples_per_rank = 2 ** max(0, (divisor // size).bit_length() - 1)
    before = float(samples_per_rank * 2 ** (((size - 1).bit_length() + 1) // 2))
    return before, divisor / before


def _cut(call: Call, buffer: FlatBuffer, runs: Sequence[Run], buffer_size: int) -> list[Run]:
    """The piece of each collective. On gloo a bucket is cut in halves: the first half is divided while the second
    half is in flight."""
    piece = buffer_size
    if call.groups.is_private(call.groups.payload(buffer.bucket.device)):
        half = (sum(stop - start for start, stop in runs) + 1) // 2
        piece = min(piece, max(half, SMALLEST_PIECE_BYTES // buffer.payload.itemsize))
    return cut_runs(runs, max_numel=piece)


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
    flat = as_real(buffer.flat[start:stop])  # divided as complex numbers, inf + 0 j would become inf + nan j
    if call.groups.size == 1:
        after = float(divisor)
    else:
        wire = as_real(buffer.payload[start:stop])
        _, after = split_divisor(divisor, call.groups.size, wire.dtype)
        if buffer.wire is not None:
            # The sum may need the wider range of the two dtypes, the quotient does not.
            if torch.finfo(wire.dtype).max > torch.finfo(flat.dtype).max:
                wire.div_(after)
                after = 1.0
            flat.copy_(wire)
    if after != 1.0:
        flat.div_(after)


def reduce_sparse(
    call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], divisor: int
) -> tuple[dict[int, torch.Tensor], int]:
    """The reduced sparse gradients by slot, and the bytes sent."""
    indices = [index for index, kind in enumerate(kinds) if kind >= SPARSE]
    own = [packed.sparse.get(index, _no_entries(plan.parameters[index], kinds[index] - SPARSE)) for index in indices]
    lengths = call.gather(torch.tensor([grad._nnz() for grad in own], device="cpu")).T.tolist()
    results = [_reduce_sparse(call, grad, counts, divisor) for grad, counts in zip(own, lengths, strict=True)]
    return {index: grad for index, (grad, _) in zip(indices, results, strict=True)}, sum(size for _, size in results)


def _reduce_sparse(call: Call, grad: torch.Tensor, lengths: Sequence[int], divisor: int) -> tuple[torch.Tensor, int]:
    """Sum of every rank's coalesced ``grad``, divided; and the bytes sent.

    ``lengths[r]``: number of entries on rank r.
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
        torch.cat([part[:length] for part, length in zip(all_values, lengths, strict=True)]).to(_sum_dtype(grad.dtype)),
        (*grad.shape, 2) if grad.is_complex() else grad.shape,
        check_invariants=False,
    ).coalesce()
    mean = total.values() / divisor if divisor != 1 else total.values()
    reduced = torch.sparse_coo_tensor(
        total.indices(),
        torch.view_as_complex(mean) if grad.is_complex() else mean.to(grad.dtype),
        grad.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return reduced, indices.nbytes + values.nbytes


def _no_entries(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    dtype = gradient_dtype(parameter)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=dtype, device=parameter.device)
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype.to_real()


def _gather(call: Call, group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Collective: the tensors of all ranks, of equal shape; complex numbers as pairs, which are added and divided
    apart."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if call.groups.size == 1:
        return [real]
    parts = [torch.empty_like(real) for _ in range(call.groups.size)]
    options = call.options("Allgather")
    call.run(group, lambda carrier: carrier.allgather([parts], [real.contiguous()], options))
    return parts

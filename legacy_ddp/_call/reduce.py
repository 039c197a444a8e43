"""The reducers that use the collectives of a process group, of dense and of sparse gradients. Collective (payload).

The sum is divided afterwards. Only sums sent as fp16 are divided before and after, see :func:`split_divisor`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp import _torch as internals
from legacy_ddp._call.pack import Packed
from legacy_ddp._memory.flat_buffer import DENSE, SPARSE, FlatBuffer
from legacy_ddp._memory.layout import Run, as_real, cut_runs, gradient_dtype
from legacy_ddp._memory.plan import Plan
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.tree_reduce import TreeInput, tree_reduce
from legacy_ddp._reproducible import LeafSums

# A smaller second collective costs more than it gains. More than two gain nothing: a gloo group has two threads.
SMALLEST_PIECE_BYTES = 8 * 2**20

Runs = tuple[tuple[Run, ...], ...]  # of each bucket


@dataclass
class Payload:
    """Packed gradients of a call, what the ranks agreed on, and the result: dense gradients in the flat tensors."""

    plan: Plan
    packed: Packed
    transport: str  # of the route
    kinds: Sequence[int]  # of the reduced gradient of every slot
    has_same_mask: bool  # every rank has gradients of these kinds
    divisor: int
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)  # the sparse results, by slot
    size_bytes: int = 0  # sent
    prepared: Any = None  # left by Reducer.prepare() for Reducer.reduce()


class Reducer(ABC):
    """One way to reduce gradients. ``buckets``: numbers of the buckets of a layout whose dense gradients it reduces."""

    def __init__(self, buckets: Sequence[int]) -> None:
        self.buckets = buckets
        self._runs: tuple[Sequence[int], Runs] = ((), ())  # of the kinds of the last call

    def prepare(self, call: Call, payload: Payload) -> None:  # noqa: B027 - most reducers prepare nothing
        """Collective: run functions of the user, before the payload phase. No flat tensor changes."""

    @abstractmethod
    def reduce(self, call: Call, payload: Payload) -> int:
        """Collective: replace the gradients by their sum over the ranks, divided by ``payload.divisor``.

        The result has the same bits on every rank. Returns the number of bytes summed.
        """

    def buffers_of(self, payload: Payload) -> list[tuple[FlatBuffer, slice]]:
        """The buffers of :attr:`buckets`, each with the range of its slots among all slots."""
        ranges = payload.plan.slot_ranges
        return [ranges[index] for index in self.buckets]

    def dense_runs(self, payload: Payload) -> Runs:
        """Per bucket the runs of slots with a dense gradient on any rank, with small gaps between them."""
        kinds, runs = self._runs
        if payload.kinds == kinds:
            return runs
        are_dense = [kind == DENSE for kind in payload.kinds]
        runs = tuple(
            tuple(buffer.bucket.runs(are_dense[share], max_gap=buffer.bucket.max_gap))
            for buffer, share in self.buffers_of(payload)
        )
        self._runs = payload.kinds, runs
        return runs


class GroupReducer(Reducer):
    """All-reduce of dense gradients on the group of each device, in stretches of at most ``buffer_size`` elements."""

    def reduce(self, call: Call, payload: Payload) -> int:
        started, divisor = [], payload.divisor
        for (buffer, share), runs in zip(self.buffers_of(payload), self.dense_runs(payload), strict=True):
            fill_missing(payload, buffer, share, runs, buffer.flat)
            with call.profiled(f"start {buffer.bucket.label}"):
                pieces = _cut(call, buffer, runs, payload.plan.layout.buffer_size)
                started += [(buffer, run, _start(call, buffer, run, divisor)) for run in pieces]
        size_bytes = 0
        for buffer, (start, stop), work in started:
            with call.profiled(f"finish {buffer.bucket.label}"):
                if work is not None:
                    call.wait(call.groups.payload(buffer.bucket.device), work)
                    size_bytes += (stop - start) * buffer.payload.itemsize
                _finish(call, buffer, (start, stop), divisor)
        return size_bytes


class GroupTreeReducer(Reducer):
    """Sums of micro-batches in the order of the tree, on the group of each device. ``sums``: of this rank."""

    def __init__(self, buckets: Sequence[int], sums: LeafSums) -> None:
        super().__init__(buckets)
        self._sums = sums

    def reduce(self, call: Call, payload: Payload) -> int:
        return sum(tree_reduce(call, self._inputs(call, payload), payload.divisor))

    def _inputs(self, call: Call, payload: Payload) -> list[TreeInput]:
        inputs, ranges = [], self.buffers_of(payload)
        for index, (buffer, _), runs in zip(self.buckets, ranges, self.dense_runs(payload), strict=True):
            own = payload.packed.flats[index]
            recv_buffer = self._sums.recv_buffer(index, own) if call.groups.size > 1 else own
            group = call.groups.payload(buffer.bucket.device)
            pieces = cut_runs(runs, max_numel=payload.plan.layout.buffer_size)
            inputs.append(TreeInput(group, own, recv_buffer, buffer.flat, pieces))
        return inputs


def fill_missing(payload: Payload, buffer: FlatBuffer, share: slice, runs: Sequence[Run], flat: torch.Tensor) -> None:
    """Fill the slots left out by packing, so that all ranks bring the same slots.

    An absent gradient becomes zeros inside ``runs``, the parts of the flat tensor that are sent. A sparse gradient
    becomes dense if the ranks have agreed on a dense result. ``flat``: the flat tensor of ``buffer``, or a tensor like
    it. ``share``: the slots of ``buffer`` among all slots.
    """
    packed = payload.packed
    own_kinds = packed.kinds[share]
    if own_kinds.count(DENSE) < len(own_kinds):
        buffer.zero(own_kinds, runs=runs, flat=flat)
    for index, grad in packed.sparse.items():
        if payload.kinds[index] == DENSE and share.start <= index < share.stop:
            slot = buffer.bucket.slots[index - share.start]
            flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(grad.to_dense())


def split_divisor(divisor: int, size: int, wire: torch.dtype) -> tuple[float, float]:
    """(before, after): divisors before and after the sum over ``size`` ranks.

    fp16 is divided by about the square root of ``size`` before and after the sum (the split of PyTorch's FSDP2,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), and by a sample count before the sum. The divisor
    before the sum is a power of two, so that this division is exact unless it underflows.
    """
    if wire != torch.float16 or size == 1:
        return 1.0, float(divisor)
    samples_per_rank = 2 ** max(0, (divisor // size).bit_length() - 1)
    before = float(samples_per_rank * 2 ** (((size - 1).bit_length() + 1) // 2))
    return before, divisor / before


def _cut(call: Call, buffer: FlatBuffer, runs: Sequence[Run], buffer_size: int) -> list[Run]:
    piece = buffer_size
    # On gloo a bucket is cut in halves: the first half is divided while gloo sends the second.
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
    flat = as_real(buffer.flat[start:stop])  # a division of complex numbers would turn inf + 0 j into inf + nan j
    if call.groups.size == 1:
        after = float(divisor)
    else:
        wire = as_real(buffer.payload[start:stop])
        _, after = split_divisor(divisor, call.groups.size, wire.dtype)
        if buffer.wire is not None:
            # Divide in the dtype of the wider range: the sum may overflow the other, the quotient does not.
            if torch.finfo(wire.dtype).max > torch.finfo(flat.dtype).max:
                wire.div_(after)
                after = 1.0
            flat.copy_(wire)
    if after != 1.0:
        flat.div_(after)


def reduce_sparse(call: Call, payload: Payload) -> int:
    """Collective: sum the sparse gradients in rank order, and divide. Returns the bytes sent."""
    kinds, found, parameters = payload.kinds, payload.packed.sparse, payload.plan.parameters
    slots = [index for index, kind in enumerate(kinds) if kind >= SPARSE]
    own = [found.get(index, _no_entries(parameters[index], kinds[index] - SPARSE)) for index in slots]
    lengths = call.gather(torch.tensor([grad._nnz() for grad in own], device="cpu")).T.tolist()
    size_bytes = 0
    for index, grad, counts in zip(slots, own, lengths, strict=True):
        payload.sparse[index], sent_bytes = _reduce_sparse(call, grad, counts, payload.divisor)
        size_bytes += sent_bytes
    return size_bytes


def _reduce_sparse(call: Call, grad: torch.Tensor, lengths: Sequence[int], divisor: int) -> tuple[torch.Tensor, int]:
    """The sum of the coalesced ``grad`` of all ranks, divided, and the bytes sent. ``lengths``: entries by rank."""
    group, longest = call.groups.payload(grad.device), max(lengths)
    indices = grad.indices().new_zeros((grad.sparse_dim(), longest))
    indices[:, : lengths[call.groups.rank]] = grad.indices()
    values = grad.values().new_zeros((longest, *grad.values().shape[1:]))
    values[: lengths[call.groups.rank]] = grad.values()
    all_indices = _gather(call, group, indices)
    all_values = _gather(call, group, values)
    sum_dtype = torch.float32 if grad.dtype == torch.float16 else grad.dtype.to_real()
    total = internals.sparse_tensor(
        torch.cat([part[:, :length] for part, length in zip(all_indices, lengths, strict=True)], dim=1),
        torch.cat([part[:length] for part, length in zip(all_values, lengths, strict=True)]).to(sum_dtype),
        (*grad.shape, 2) if grad.is_complex() else grad.shape,
    ).coalesce()
    mean = total.values() / divisor if divisor != 1 else total.values()
    reduced = internals.sparse_tensor(
        total.indices(),
        torch.view_as_complex(mean) if grad.is_complex() else mean.to(grad.dtype),
        grad.shape,
        is_coalesced=True,
    )
    return reduced, indices.nbytes + values.nbytes


def _no_entries(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    dtype = gradient_dtype(parameter)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=dtype, device=parameter.device)
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    return internals.sparse_tensor(indices, values, parameter.shape, is_coalesced=True)


def _gather(call: Call, group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Collective: the tensors of all ranks, of equal shape; complex numbers as pairs of real numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if call.groups.size == 1:
        return [real]
    parts = [torch.empty_like(real) for _ in range(call.groups.size)]
    options = call.options("Allgather")
    call.run(group, lambda carrier: carrier.allgather([parts], [real.contiguous()], options))
    return parts

"""Sum of dense gradients in memory that the ranks of a host have mapped, and gloo between hosts. Collective (payload).

Every rank owns an equal part of every run. On one host the owner adds the parts of all ranks, divides, and writes the
result to the flat tensor of every rank. The order of addition is the order of the ranks, whatever the size of a chunk or
of a bucket. With ``reproducible=True`` the sums of micro-batches are added instead of gradients, in the order of the
tree.

On several hosts the owner adds its part over the ranks of its host in the same way, gloo adds the sums of all owners of
the part, and each owner divides and writes the result to the flat tensors of its host. Between hosts gradients have
the dtype of the gloo transport: ``reduce_dtype``, else fp32 for fp16 gradients, and their own dtype for all others.
With ``reproducible=True`` the sum over a host is a node of the tree, and the owners of a part add their nodes in the
order of the tree.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.layout import Bucket, Run, cut_runs
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import as_real, sum_dtype, wire_dtype
from legacy_ddp._collectives.dense import SMALLEST_PIECE_BYTES, fill_missing, merged_runs, split_divisor
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.transport_choice import host_buffers
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._reproducible.tree_reduce import TreeInput, add_in_tree_order, tree_reduce
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call

# The grain of torch's parallel loops: larger chunks would wake the threads of every rank at the same time. On two
# cores, with two threads per rank, a call with chunks of 65,536 elements took 1.2 times as long.
CHUNK_NUMEL = 32_768
_LINE_NUMEL = 64  # parts end at multiples of cache lines, so that no two ranks write to one line


def sum_on_host(
    call: Call, settings: Settings, plan: Plan, packed: Packed, kinds: Sequence[int], agreement: Agreement
) -> int:
    """Replace every run of dense gradients by its sum over the ranks, divided; return the bytes summed.

    If ranks have gradients in different slots, they fill the other slots now, and wait for each other before the sum.
    """
    buffers = host_buffers(plan)
    runs = fill_runs(call, settings, plan, packed, kinds, agreement)
    for work in _work_of(call, buffers, runs, settings):
        with call.profiled(f"sum {work.label}"):
            _sum_chunks(work, agreement.divisor)
    call.barrier()
    return size_bytes(buffers, runs)


def fill_runs(
    call: Call, settings: Settings, plan: Plan, packed: Packed, kinds: Sequence[int], agreement: Agreement
) -> tuple[tuple[Run, ...], ...]:
    """The runs to sum, per host buffer. Afterwards every rank of the host has gradients or zeros there.

    Sums of micro-batches have no empty slots.
    """
    buffers = host_buffers(plan)
    shares = [share for buffer, share in plan.slot_ranges if buffer in buffers]
    runs = [tuple(merged_runs(buffer, kinds[share])) for buffer, share in zip(buffers, shares, strict=True)]
    if not (agreement.has_same_mask or settings.reproducible):
        for buffer, share, own_runs in zip(buffers, shares, runs, strict=True):
            fill_missing(buffer, packed, kinds, share, own_runs, buffer.flat)
        call.barrier()
    return tuple(runs)


def size_bytes(buffers: Sequence[FlatBuffer], runs: Sequence[Sequence[Run]]) -> int:
    """Bytes of the runs of all buffers."""
    return sum(
        (stop - start) * buffer.bucket.dtype.itemsize
        for buffer, own_runs in zip(buffers, runs, strict=True)
        for start, stop in own_runs
    )


T = TypeVar("T")
Add = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Chunk:
    """A stretch of at most :data:`CHUNK_NUMEL` elements.

    ``parts``: of the gradients, or of the sums of micro-batches, of all ranks in order. ``own``: of the flat tensor of
    this rank. ``others``: of the flat tensors of the other ranks.
    """

    parts: Sequence[torch.Tensor]
    own: torch.Tensor
    others: Sequence[torch.Tensor]


@dataclass(frozen=True)
class HostMemory:
    """The memory of one buffer on all ranks of the host in order, as real numbers; ``width`` of them per element.

    ``parts``: to add; the flat tensors, or the sums of micro-batches. ``flats``: the flat tensors, for the result.
    ``own``: place of this rank.
    """

    parts: Sequence[torch.Tensor]
    flats: Sequence[torch.Tensor]
    own: int
    width: int

    def own_parts(self, runs: Sequence[Run]) -> list[Run]:
        """The part of this rank in each run, in elements."""
        return [part_of(run, self.own, len(self.flats)) for run in runs]

    def stretch(self, part: Run) -> slice:
        """The place of ``part`` in a tensor."""
        start, stop = part
        return slice(self.width * start, self.width * stop)

    def chunks(self, part: Run) -> Iterator[Chunk]:
        """The chunks of a part."""
        whole = self.stretch(part)
        for place in range(whole.start, whole.stop, CHUNK_NUMEL):
            stretch = slice(place, min(place + CHUNK_NUMEL, whole.stop))
            others = [flat[stretch] for rank, flat in enumerate(self.flats) if rank != self.own]
            yield Chunk([part[stretch] for part in self.parts], self.flats[self.own][stretch], others)


@dataclass(frozen=True)
class Work:
    """The chunks to add on this rank for one buffer.

    ``add``: the sum of parts, in ``memory``: tensors as large as a chunk, in the dtype of the sum.
    """

    label: str
    chunks: Sequence[Chunk]
    add: Add
    memory: Sequence[torch.Tensor]


def _work_of(
    call: Call, buffers: Sequence[FlatBuffer], runs: tuple[tuple[Run, ...], ...], settings: Settings
) -> list[Work]:
    """The work per buffer."""

    def work(buffer: FlatBuffer, memory: HostMemory, own_runs: Sequence[Run]) -> Work:
        chunks = [chunk for part in memory.own_parts(own_runs) for chunk in memory.chunks(part)]
        return work_on(buffer.bucket, chunks, settings)

    return kept_views(call, buffers, runs, work)


def kept_views(
    call: Call,
    buffers: Sequence[FlatBuffer],
    runs: tuple[tuple[Run, ...], ...],
    make: Callable[[FlatBuffer, HostMemory, Sequence[Run]], T],
) -> list[T]:
    """``make(buffer, memory, runs)`` per buffer. Kept from call to call: making the views takes a seventh of a call."""
    memory, segments, ranks = call.group_state.peer_memory, call.peer_segments, call.groups.host_ranks
    if memory is None or segments is None:
        raise LegacyDDPError(f"{call}: no shared memory is mapped")
    key = (tuple((rank, segments[rank]) for rank in ranks), runs)
    views: list[T] | None = memory.views.get(key)
    if views is None:
        views, own = [], ranks.index(call.groups.rank)
        for index, (buffer, own_runs) in enumerate(zip(buffers, runs, strict=True)):
            dtype, flats, parts = buffer.bucket.dtype, [], []
            for rank in ranks:
                serials = segments[rank].serials
                flats.append(as_real(memory[rank, serials[index]].view(dtype)))
                sums = serials[len(buffers) + index]
                parts.append(as_real(memory[rank, sums].view(wire_dtype(dtype, None))) if sums else flats[-1])
            views.append(make(buffer, HostMemory(parts, flats, own, 2 if dtype.is_complex else 1), own_runs))
        memory.keep_views(key, views)
    return views


def work_on(bucket: Bucket, chunks: Sequence[Chunk], settings: Settings) -> Work:
    """The work for the chunks of a bucket, in the order and the dtype of the settings."""
    if not chunks:
        return Work(bucket.label, chunks, _add_in_rank_order, ())
    parts = chunks[0].parts
    if settings.reproducible:
        dtype, count = parts[0].dtype, len(parts) // 2
    else:
        dtype, count = sum_dtype(bucket.dtype, settings.reduce_dtype), 1
    numel = max(chunk.own.numel() for chunk in chunks)
    memory = [torch.empty(numel, dtype=dtype, device="cpu") for _ in range(count)]
    return Work(bucket.label, chunks, add_in_tree_order if settings.reproducible else _add_in_rank_order, memory)


def part_of(run: Run, rank: int, size: int) -> Run:
    """The part of ``rank`` in a run. The parts of all ranks are disjoint and cover the run."""
    start, stop = run

    def border(index: int) -> int:
        place = start + (stop - start) * index // size
        return min(stop, -(-place // _LINE_NUMEL) * _LINE_NUMEL) if 0 < index < size else place

    return border(rank), border(rank + 1)


def _sum_chunks(work: Work, divisor: int) -> None:
    """Add, divide into the own chunk, and copy it to the other ranks."""
    for chunk in work.chunks:
        divide(chunk, total_of(work, chunk), divisor)
        give_out(chunk)


def total_of(work: Work, chunk: Chunk) -> torch.Tensor:
    """The sum of the parts of a chunk, in the memory of ``work``."""
    return work.add(chunk.parts, [memory[: chunk.own.numel()] for memory in work.memory])


def divide(chunk: Chunk, total: torch.Tensor, divisor: float) -> None:
    """Divide ``total``, which may be the own chunk, into the own chunk. Overwrites ``total``.

    The sum may need the wider range of the two dtypes, the quotient does not.
    """
    own = chunk.own
    if total.dtype == own.dtype:
        _divide(total, divisor, own)
    elif torch.finfo(total.dtype).max > torch.finfo(own.dtype).max:
        own.copy_(total.div_(float(divisor)))
    else:
        _divide(own.copy_(total), divisor, own)


def give_out(chunk: Chunk) -> None:
    """Copy the own chunk to the other ranks."""
    for part in chunk.others:
        part.copy_(chunk.own)


def _add_in_rank_order(parts: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``parts`` in ``memory[0]``, which may have a wider dtype."""
    total, (first, second, *others) = memory[0], parts
    if total.dtype != first.dtype:
        total.copy_(first).add_(second)
    else:
        torch.add(first, second, out=total)
    for part in others:
        total.add_(part)
    return total


def _divide(sums: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    mantissa, _ = math.frexp(divisor)
    if mantissa == 0.5:  # a power of two: the product with its reciprocal has the same bits, and is quicker
        torch.mul(sums, 1 / divisor, out=out)
    else:
        torch.div(sums, float(divisor), out=out)


def sum_between_hosts(
    call: Call, settings: Settings, plan: Plan, packed: Packed, kinds: Sequence[int], agreement: Agreement
) -> int:
    """Replace every run of dense gradients by its sum over all ranks, divided; return the bytes summed.

    If ranks have gradients in different slots, they fill the other slots now, and wait for the ranks of their host
    before the sum.
    """
    buffers = host_buffers(plan)
    runs = fill_runs(call, settings, plan, packed, kinds, agreement)
    pieces = [piece for of_buffer in _pieces_of(call, settings, buffers, runs) for piece in of_buffer]
    reduced = _reduced_in_tree_order if settings.reproducible else _reduced
    for chunk in reduced(call, pieces, agreement.divisor):
        give_out(chunk)
    call.barrier()
    return size_bytes(buffers, runs)


@dataclass(frozen=True)
class _Piece:
    """A stretch of the own part, summed between hosts by one collective.

    ``work``: the sum over the host. ``stretch``: of the own flat tensor. ``carried``: memory for the collective: the
    stretch, or a copy if the dtype between hosts is another. ``recv_buffer``: for nodes of the tree, else empty.
    """

    work: Work
    stretch: torch.Tensor
    carried: torch.Tensor
    recv_buffer: torch.Tensor

    def add_on_host(self, divisor: float = 1.0) -> None:
        """Put the sum over the ranks of the host, divided by ``divisor``, into ``carried``."""
        for chunk, carried in self.with_carried():
            total = total_of(self.work, chunk)
            carried.copy_(total if divisor == 1.0 else total.div_(divisor))

    def with_carried(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Every chunk, with its part of ``carried``."""
        numels = [chunk.own.numel() for chunk in self.work.chunks]
        yield from zip(self.work.chunks, torch.split(self.carried, numels), strict=True)


def _pieces_of(
    call: Call, settings: Settings, buffers: Sequence[FlatBuffer], runs: tuple[tuple[Run, ...], ...]
) -> list[list[_Piece]]:
    """The pieces per buffer, equal on the owners of a part."""

    def pieces(buffer: FlatBuffer, memory: HostMemory, own_runs: Sequence[Run]) -> list[_Piece]:
        return [_piece(settings, buffer, memory, part) for part in _cut(settings, buffer, memory.own_parts(own_runs))]

    return kept_views(call, buffers, runs, pieces)


def _cut(settings: Settings, buffer: FlatBuffer, parts: Sequence[Run]) -> list[Run]:
    """The stretch of each collective. The parts are cut in halves: one half is added while the other is in flight."""
    half = (sum(stop - start for start, stop in parts) + 1) // 2
    smallest = SMALLEST_PIECE_BYTES // wire_dtype(buffer.bucket.dtype, settings.reduce_dtype).itemsize
    return cut_runs(parts, max_numel=min(settings.buffer_size, max(half, smallest)))


def _piece(settings: Settings, buffer: FlatBuffer, memory: HostMemory, part: Run) -> _Piece:
    work = work_on(buffer.bucket, list(memory.chunks(part)), settings)
    stretch = memory.flats[memory.own][memory.stretch(part)]
    dtype = buffer.bucket.dtype
    wire = wire_dtype(dtype, settings.reduce_dtype)
    carried = stretch if wire == dtype else torch.empty_like(stretch, dtype=wire)
    return _Piece(work, stretch, carried, carried.new_empty(carried.numel() if settings.reproducible else 0))


def _reduced(call: Call, pieces: Sequence[_Piece], divisor: int) -> Iterator[Chunk]:
    """Every chunk, when it holds the sum over all ranks, divided. All collectives are started before the first wait."""
    started = []
    for piece in pieces:
        with call.profiled(f"start {piece.work.label}"):
            before, after = split_divisor(divisor, call.groups.size, piece.carried.dtype)
            started.append((piece, after, _start(call, piece, before)))
    for piece, after, work in started:
        with call.profiled(f"finish {piece.work.label}"):
            call.wait(call.groups.between, work)
            for chunk, carried in piece.with_carried():
                divide(chunk, carried, after)
                yield chunk


def _start(call: Call, piece: _Piece, divisor: float) -> Any:
    """Add over the ranks of the host, divide by ``divisor``, and start the sum over the hosts."""
    piece.add_on_host(divisor)
    options = call.options("Allreduce")
    options.reduceOp = dist.ReduceOp.SUM
    return call.start(call.groups.between, lambda group: group.allreduce([piece.carried], options))


def _reduced_in_tree_order(call: Call, pieces: Sequence[_Piece], divisor: int) -> Iterator[Chunk]:
    """As :func:`_reduced`, with the sums of micro-batches: a host is a rank of the tree over the hosts."""
    for piece, _ in zip(pieces, tree_reduce(call, _tree_inputs(call, pieces), divisor), strict=True):
        yield from piece.work.chunks


def _tree_inputs(call: Call, pieces: Sequence[_Piece]) -> Iterator[TreeInput]:
    for piece in pieces:
        with call.profiled(f"start {piece.work.label}"):
            piece.add_on_host()
        runs = [(0, piece.carried.numel())]
        yield TreeInput(call.groups.between, piece.carried, piece.recv_buffer, piece.stretch, runs)

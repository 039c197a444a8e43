"""Sum of dense gradients over the ranks of one host, in memory that all ranks have mapped. Collective (payload).

Every rank owns an equal part of every run. It adds the parts of all ranks, divides, and writes the result to the flat
tensor of every rank. The order of addition is the order of the ranks, whatever the size of a chunk or of a bucket. With
``reproducible=True`` the sums of micro-batches are added instead of gradients, in the order of the tree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.layout import Bucket, Run
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import as_real, sum_dtype, wire_dtype
from legacy_ddp._collectives.dense import fill_missing, merged_runs
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.transport_choice import host_buffers
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._reproducible.tree_reduce import add_in_tree_order
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
    Sums of micro-batches have no empty slots.
    """
    buffers = host_buffers(plan)
    runs = fill_runs(call, plan, packed, kinds, is_filled=agreement.has_same_mask or settings.reproducible)
    for work in _work_of(call, buffers, runs, settings):
        with call.profiled(f"sum {work.label}"):
            _sum_chunks(work, agreement.divisor)
    call.barrier()
    return size_bytes(buffers, runs)


def fill_runs(
    call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], *, is_filled: bool
) -> tuple[tuple[Run, ...], ...]:
    """The runs to sum, per host buffer. Afterwards every rank of the host has gradients or zeros there.

    ``is_filled``: no rank has an empty slot there.
    """
    buffers = host_buffers(plan)
    shares = [share for buffer, share in plan.slot_ranges if buffer in buffers]
    runs = [tuple(merged_runs(buffer, kinds[share])) for buffer, share in zip(buffers, shares, strict=True)]
    if not is_filled:
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
    """The work per buffer. Kept from call to call: making the views takes a seventh of a call."""
    memory, segments = call.group_state.peer_memory, call.peer_segments
    if memory is None or segments is None:
        raise LegacyDDPError(f"{call}: no shared memory is mapped")
    key = (tuple(segments), runs)
    work: list[Work] | None = memory.views.get(key)
    if work is None:
        work = []
        for index, (buffer, own_runs) in enumerate(zip(buffers, runs, strict=True)):
            dtype = buffer.bucket.dtype
            flats = [as_real(memory[rank, ids.serials[index]].view(dtype)) for rank, ids in enumerate(segments)]
            parts = list(flats)
            for rank, ids in enumerate(segments):
                if serial := ids.serials[len(buffers) + index]:
                    parts[rank] = as_real(memory[rank, serial].view(wire_dtype(dtype, None)))
            width = 2 if dtype.is_complex else 1
            own_parts = [part_of(run, call.groups.rank, len(flats)) for run in own_runs]
            chunks = [chunk for part in own_parts for chunk in cut_chunks(parts, flats, part, call.groups.rank, width)]
            work.append(work_on(buffer.bucket, chunks, settings))
        memory.keep_views(key, work)
    return work


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


def cut_chunks(
    parts: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], part: Run, own: int, width: int
) -> Iterator[Chunk]:
    """The chunks of a part. ``own``: place of this rank in ``flats``. ``width``: real numbers per element."""
    start, stop = (width * border for border in part)
    for place in range(start, stop, CHUNK_NUMEL):
        stretch = slice(place, min(place + CHUNK_NUMEL, stop))
        first, *others = [flat[stretch] for flat in (flats[own], *flats[:own], *flats[own + 1 :])]
        yield Chunk([part[stretch] for part in parts], first, others)


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
        give_out(chunk, total_of(work, chunk), divisor)


def total_of(work: Work, chunk: Chunk) -> torch.Tensor:
    """The sum of the parts of a chunk, in the memory of ``work``."""
    return work.add(chunk.parts, [memory[: chunk.own.numel()] for memory in work.memory])


def give_out(chunk: Chunk, total: torch.Tensor, divisor: int) -> None:
    """Divide ``total``, which may be the own chunk, into the own chunk, and copy it to the other ranks."""
    if total.dtype != chunk.own.dtype:
        chunk.own.copy_(total.div_(float(divisor)))
    else:
        _divide(total, divisor, chunk.own)
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


def _divide(sums: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    if divisor & (divisor - 1):
        torch.div(sums, float(divisor), out=out)
    else:  # a power of two: the product with its reciprocal has the same bits, and is quicker
        torch.mul(sums, 1 / divisor, out=out)

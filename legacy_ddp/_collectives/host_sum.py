"""Sum of dense gradients over the ranks of a host, in memory that all ranks have mapped. Collective (payload).

Every rank owns an equal part of every run. It adds the parts of all ranks, divides, and writes the result to the flat
tensor of every rank. The order of addition is the order of the ranks, whatever the size of a chunk or of a bucket.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.layout import Run
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import as_real
from legacy_ddp._collectives.dense import fill_missing, merged_runs
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.transport_choice import host_buffers
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._transport.call import Call

# The grain of torch's parallel loops: larger chunks would wake the threads of every rank at the same time. On two
# cores, with two threads per rank, a call with chunks of 65,536 elements took 1.2 times as long.
CHUNK_NUMEL = 32_768
_LINE_NUMEL = 64  # parts end at multiples of cache lines, so that no two ranks write to one line


def sum_on_host(call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], divisor: int, *, same_mask: bool) -> int:
    """Replace every run of dense gradients by its sum over the ranks divided by ``divisor``; return the bytes summed.

    ``same_mask``: every rank has gradients in the same slots. Otherwise ranks fill slots now, and wait for each other
    before the sum.
    """
    buffers = host_buffers(plan)
    shares = [share for buffer, share in plan.slot_ranges if buffer in buffers]
    runs = [tuple(merged_runs(buffer, kinds[share])) for buffer, share in zip(buffers, shares, strict=True)]
    if not same_mask:
        for buffer, share, own_runs in zip(buffers, shares, runs, strict=True):
            fill_missing(buffer, packed, kinds, share, own_runs, buffer.flat)
        call.barrier()
    for work in _work_of(call, buffers, tuple(runs)):
        with call.profiled(f"sum {work.label}"):
            _sum_chunks(work, divisor)
    call.barrier()
    return sum(
        (stop - start) * buffer.bucket.dtype.itemsize
        for buffer, own_runs in zip(buffers, runs, strict=True)
        for start, stop in own_runs
    )


@dataclass(frozen=True)
class _Chunk:
    """A stretch of at most :data:`CHUNK_NUMEL` elements: in the flat tensor of this rank, and of all ranks in order."""

    own: torch.Tensor
    parts: Sequence[torch.Tensor]
    others: Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Work:
    """The chunks to add on this rank for one buffer. ``sums``: memory for one chunk; fp32 for 16-bit gradients."""

    label: str
    chunks: Sequence[_Chunk]
    sums: torch.Tensor


def _work_of(call: Call, buffers: Sequence[FlatBuffer], runs: tuple[tuple[Run, ...], ...]) -> list[_Work]:
    """The work per buffer. Kept from call to call: making the views takes a seventh of a call."""
    memory, segments = call.group_state.peer_memory, call.peer_segments
    if memory is None or segments is None:
        raise LegacyDDPError(f"{call}: no shared memory is mapped")
    key = (tuple(segments), runs)
    work: list[_Work] | None = memory.views.get(key)
    if work is None:
        work = []
        for index, (buffer, own_runs) in enumerate(zip(buffers, runs, strict=True)):
            dtype = buffer.bucket.dtype
            flats = [as_real(memory[rank, ids.serials[index]].view(dtype)) for rank, ids in enumerate(segments)]
            width = 2 if dtype.is_complex else 1
            chunks = [chunk for run in own_runs for chunk in _cut(flats, run, call.groups.rank, width)]
            wide = torch.float32 if flats[0].dtype in (torch.float16, torch.bfloat16) else flats[0].dtype
            numel = max((chunk.own.numel() for chunk in chunks), default=0)
            work.append(_Work(buffer.bucket.label, chunks, torch.empty(numel, dtype=wide, device="cpu")))
        memory.keep_views(key, work)
    return work


def _cut(flats: Sequence[torch.Tensor], run: Run, rank: int, width: int) -> Iterator[_Chunk]:
    """The chunks of this rank's part of a run. ``width``: real numbers per element."""
    start, stop = (width * border for border in part_of(run, rank, len(flats)))
    for place in range(start, stop, CHUNK_NUMEL):
        parts = [flat[place : min(place + CHUNK_NUMEL, stop)] for flat in flats]
        yield _Chunk(parts[rank], parts, [*parts[:rank], *parts[rank + 1 :]])


def part_of(run: Run, rank: int, size: int) -> Run:
    """The part of ``rank`` in a run. The parts of all ranks are disjoint and cover the run."""
    start, stop = run

    def border(index: int) -> int:
        place = start + (stop - start) * index // size
        return min(stop, -(-place // _LINE_NUMEL) * _LINE_NUMEL) if 0 < index < size else place

    return border(rank), border(rank + 1)


def _sum_chunks(work: _Work, divisor: int) -> None:
    """Add in rank order, divide into the own chunk, and copy it to the other ranks."""
    for chunk in work.chunks:
        sums = work.sums[: chunk.own.numel()]
        first, second, *others = chunk.parts
        is_wider = sums.dtype != first.dtype
        if is_wider:
            sums.copy_(first).add_(second)
        else:
            torch.add(first, second, out=sums)
        for part in others:
            sums.add_(part)
        if is_wider:
            chunk.own.copy_(sums.div_(float(divisor)))
        else:
            _divide(sums, divisor, chunk.own)
        for part in chunk.others:
            part.copy_(chunk.own)


def _divide(sums: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    if divisor & (divisor - 1):
        torch.div(sums, float(divisor), out=out)
    else:  # a power of two: the product with its reciprocal has the same bits, and is quicker
        torch.mul(sums, 1 / divisor, out=out)

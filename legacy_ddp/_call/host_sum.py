"""Sum of dense gradients in memory that the ranks of a host share, and with gloo between hosts. Collective (payload).

The table of mapped segments is equal on all ranks, because it changes only by steps on which they have agreed. It
contains the ranks of all hosts. So a call with known segments needs no exchange but its headers, and all ranks know
whether any rank has a new segment.

Each run is cut into a part for each rank of the host, its owner. On one host the owner adds the part over all ranks,
divides, and writes the result to the flat tensors of all ranks. The order of addition is the order of the ranks,
whatever the size of a chunk or of a bucket. With ``reproducible=True`` the sums of micro-batches are added in place of
gradients, in the order of the tree.

On several hosts the owner adds its part over the ranks of its host in the same way. gloo adds the sums of all owners of
the part, and each owner divides and writes the result to the flat tensors of its host. Between hosts gradients have
the dtype of the gloo transport: ``reduce_dtype``, else fp32 for fp16 gradients, and their own dtype for all others.
With ``reproducible=True`` the sum over a host is a node of the tree, and the owners of a part add their nodes in the
order of the tree.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp._call.reduce import SMALLEST_PIECE_BYTES, Payload, Reducer, Runs, fill_missing, split_divisor
from legacy_ddp._memory.layout import Bucket, Run, as_real, cut_runs, sum_dtype, wire_dtype
from legacy_ddp._memory.segment import Segment, map_segment, no_memory_text
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import SegmentIds, decode_segments
from legacy_ddp._ranks.star import Descriptors
from legacy_ddp._ranks.tree_reduce import TreeInput, add_in_tree_order, tree_reduce
from legacy_ddp._ranks.wait import Gatherer
from legacy_ddp._settings import Settings

_MAX_KEPT_VIEWS = 4


class PeerMemory:
    """The mapped segments of the ranks of a group, for one wrapper."""

    def __init__(self, size: int) -> None:
        self.segments: Sequence[SegmentIds] = ()  # of every rank in this call
        # The segments of all ranks, as exchanged. A call with the same segments maps and unmaps nothing.
        self.settled: bytes | None = None
        # By rank and serial number: uint8 tensors, None for the segments of other hosts.
        self._mapped: list[dict[int, torch.Tensor | None]] = [{} for _ in range(size)]
        self.views: dict[Hashable, Any] = {}  # of the segments, made by the caller

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        rank, serial = key
        memory = self._mapped[rank].get(serial)
        if memory is None:
            raise KeyError(f"segment {serial} of rank {rank} is not mapped")
        return memory

    def settle(self, call: Gatherer, encoded: bytes, own: Callable[[], Sequence[Segment | None]]) -> str:
        """Map the segments ``encoded`` of a call, and unmap old ones. Collective if any of them is not mapped.

        ``own``: gives the segments of this rank, by position. Returns as :meth:`map_new`.
        """
        self.settled, segments = None, decode_segments(encoded)
        self._forget_unused(segments)
        # For every rank the positions of its segments that are not mapped everywhere on its host.
        unknown = [
            [index for index, serial in enumerate(current.serials) if serial and serial not in mapped]
            for mapped, current in zip(self._mapped, segments, strict=True)
        ]
        is_known = not any(unknown)
        if not is_known and (problem := self.map_new(call, segments, unknown, own())):
            return problem
        self.segments, self.settled = segments, encoded if is_known else None
        return ""

    def _forget_unused(self, segments: Sequence[SegmentIds]) -> None:
        """Unmap the segments that no rank will use again. ``segments``: the current segments of every rank.

        If a rank has spare memory, its newest earlier segments stay mapped, too: as many as it has current ones.
        """
        for mapped, current in zip(self._mapped, segments, strict=True):
            used = sum(map(bool, current.serials))
            surplus = len(mapped) - (2 * used if current.has_spare else used)
            if surplus > 0:
                for serial in [serial for serial in mapped if serial not in current.serials][:surplus]:
                    del mapped[serial]
                self.views.clear()

    def map_new(
        self,
        call: Gatherer,
        segments: Sequence[SegmentIds],
        unknown: Sequence[Sequence[int]],
        own: Sequence[Segment | None],
    ) -> str:
        """Collective: map the segments at the ``unknown`` positions of each rank, on all ranks of all hosts or on none.

        ``own``: the segments of this rank, by position. Returns the first problem of any rank; empty after success.
        """
        rank = call.groups.rank
        new = {index: segment for index in unknown[rank] if (segment := own[index]) is not None}
        shared = [segment.descriptor for segment in new.values()]
        counts = {other: len(unknown[other]) for other in call.groups.host_ranks}
        received: Descriptors = call.over_star("share_descriptors", shared, counts)
        found: dict[tuple[int, int], torch.Tensor] = {(rank, index): segment.memory for index, segment in new.items()}
        problem: OSError | None = received.problem
        missing = next((other for other, each in received.descriptors.items() if len(each) < counts[other]), None)
        try:
            for other, descriptors in received.descriptors.items():
                for index, descriptor in zip(unknown[other], descriptors, strict=False):
                    found[other, index] = map_segment(descriptor)
        except OSError as error:
            problem = problem or error
        finally:
            received.close()
        # If a rank could not send its descriptors, the others know only that they are missing.
        symptom = "" if missing is None else f"no shared memory (descriptors of rank {missing} did not arrive)"
        reason = call.first_problem("" if problem is None else no_memory_text(problem), symptom)
        if reason:
            return reason
        for other, indices in enumerate(unknown):
            for index in indices:
                self._mapped[other][segments[other].serials[index]] = found.get((other, index))
        return ""


# The grain of torch's parallel loops: larger chunks would wake the threads of every rank at the same time. On two
# cores, with two threads per rank, a call with chunks of 65,536 elements took 1.2 times as long.
CHUNK_NUMEL = 32_768
_LINE_NUMEL = 64  # parts end at multiples of cache lines, so that no two ranks write to one line


@dataclass(frozen=True)
class Chunk:
    """At most :data:`CHUNK_NUMEL` elements at the same place of several tensors."""

    parts: Sequence[torch.Tensor]  # of gradients, or of sums of micro-batches: of all ranks of the host, in order
    own: torch.Tensor  # of the flat tensor of this rank
    others: Sequence[torch.Tensor]  # of the flat tensors of the other ranks
    scratch: Sequence[torch.Tensor]  # for Order.total_of()


@dataclass(frozen=True)
class Work:
    """The chunks to add on this rank, for one bucket."""

    label: str
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class Piece(Work):
    """A stretch of the part of this rank, summed between hosts by one collective."""

    stretch: torch.Tensor  # of the flat tensor of this rank
    carried: torch.Tensor  # what the collective sends: the stretch, or a copy if the dtype between hosts is different
    recv_buffer: torch.Tensor  # for nodes of the tree, else empty

    def add_on_host(self, order: "Order", divisor: float = 1.0) -> None:
        """Put the sum over the ranks of the host, divided by ``divisor``, into ``carried``."""
        for chunk, carried in self.with_carried():
            total = order.total_of(chunk)
            carried.copy_(total if divisor == 1.0 else total.div_(divisor))

    def with_carried(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Every chunk, with its part of ``carried``."""
        numels = [chunk.own.numel() for chunk in self.chunks]
        yield from zip(self.chunks, torch.split(self.carried, numels), strict=True)


class Order(ABC):
    """The order in which the contributions of the ranks are added, and their dtype."""

    has_gaps: bool  # whether a rank may have left out slots that other ranks have

    @abstractmethod
    def scratch(self, memory: "HostMemory", numel: int) -> list[torch.Tensor]:
        """Tensors of ``numel`` elements, as many as :meth:`total_of` needs for the parts of ``memory``."""

    @abstractmethod
    def total_of(self, chunk: Chunk) -> torch.Tensor:
        """The sum of the parts of a chunk, in its scratch memory."""

    @abstractmethod
    def sum_between_hosts(self, call: Call, pieces: Sequence[Piece], divisor: int) -> Iterator[Chunk]:
        """Every chunk, once it holds the sum over all ranks, divided. All collectives start before the first wait."""


class RankOrder(Order):
    """Gradients are added in the order of the ranks, in at least fp32 and at least ``reduce_dtype``."""

    has_gaps = True

    def __init__(self, reduce_dtype: torch.dtype | None) -> None:
        self._reduce_dtype = reduce_dtype

    def scratch(self, memory: "HostMemory", numel: int) -> list[torch.Tensor]:
        dtype = sum_dtype(memory.bucket.dtype, self._reduce_dtype)
        return [torch.empty(numel, dtype=dtype, device="cpu")]

    def total_of(self, chunk: Chunk) -> torch.Tensor:
        total, (first, second, *others) = chunk.scratch[0], chunk.parts
        if total.dtype != first.dtype:  # a wider dtype
            total.copy_(first).add_(second)
        else:
            torch.add(first, second, out=total)
        for part in others:
            total.add_(part)
        return total

    def sum_between_hosts(self, call: Call, pieces: Sequence[Piece], divisor: int) -> Iterator[Chunk]:
        started = []
        for piece in pieces:
            with call.profiled(f"start {piece.label}"):
                before, after = split_divisor(divisor, call.groups.size, piece.carried.dtype)
                started.append((piece, after, self._start(call, piece, before)))
        for piece, after, work in started:
            with call.profiled(f"finish {piece.label}"):
                call.wait(call.groups.between, work)
                for chunk, carried in piece.with_carried():
                    divide(chunk, carried, after)
                    yield chunk

    def _start(self, call: Call, piece: Piece, divisor: float) -> Any:
        """Add over the ranks of the host, divide by ``divisor``, and start the sum over the hosts."""
        piece.add_on_host(self, divisor)
        options = call.options("Allreduce")
        options.reduceOp = dist.ReduceOp.SUM
        return call.start(call.groups.between, lambda group: group.allreduce([piece.carried], options))


class TreeOrder(Order):
    """Sums of micro-batches, which have all slots, are added as nodes of a tree, in their own dtype."""

    has_gaps = False

    def scratch(self, memory: "HostMemory", numel: int) -> list[torch.Tensor]:
        parts = memory.parts
        return [torch.empty(numel, dtype=parts[0].dtype, device="cpu") for _ in range(len(parts) // 2)]

    def total_of(self, chunk: Chunk) -> torch.Tensor:
        return add_in_tree_order(chunk.parts, chunk.scratch)

    def sum_between_hosts(self, call: Call, pieces: Sequence[Piece], divisor: int) -> Iterator[Chunk]:
        # The tree over the hosts has the hosts in place of ranks.
        for piece, _ in zip(pieces, tree_reduce(call, self._inputs(call, pieces), divisor), strict=True):
            yield from piece.chunks

    def _inputs(self, call: Call, pieces: Sequence[Piece]) -> Iterator[TreeInput]:
        for piece in pieces:
            with call.profiled(f"start {piece.label}"):
                piece.add_on_host(self)
            runs = [(0, piece.carried.numel())]
            yield TreeInput(call.groups.between, piece.carried, piece.recv_buffer, piece.stretch, runs)


@dataclass(frozen=True)
class HostMemory:
    """The memory of one bucket on all ranks of the host, in order, as real numbers."""

    bucket: Bucket
    parts: Sequence[torch.Tensor]  # to add: the flat tensors, or the sums of micro-batches
    flats: Sequence[torch.Tensor]  # the flat tensors, for the result
    own: int  # index of this rank in both
    width: int  # real numbers per element

    def own_parts(self, runs: Sequence[Run]) -> list[Run]:
        """The part of this rank in each run, in elements."""
        return [part_of(run, self.own, len(self.flats)) for run in runs]

    def stretch(self, part: Run) -> slice:
        """``part`` in real numbers."""
        start, stop = part
        return slice(self.width * start, self.width * stop)

    def chunks(self, own_parts: Sequence[Run], order: Order) -> list[Chunk]:
        """The chunks of some parts of this rank. All chunks share their scratch memory, and are added one by one."""
        wholes = [self.stretch(part) for part in own_parts]
        stretches = [
            slice(place, min(place + CHUNK_NUMEL, whole.stop))
            for whole in wholes
            for place in range(whole.start, whole.stop, CHUNK_NUMEL)
        ]
        longest = max((stretch.stop - stretch.start for stretch in stretches), default=0)
        scratch = order.scratch(self, longest)
        chunks = []
        for stretch in stretches:
            others = [flat[stretch] for rank, flat in enumerate(self.flats) if rank != self.own]
            own_scratch = [memory[: stretch.stop - stretch.start] for memory in scratch]
            parts, own = [part[stretch] for part in self.parts], self.flats[self.own][stretch]
            chunks.append(Chunk(parts, own, others, own_scratch))
        return chunks


class HostReducer(Reducer):
    """Sums in the memory that all ranks of a single host have mapped."""

    def __init__(self, buckets: Sequence[int], memory: PeerMemory, settings: Settings) -> None:
        super().__init__(buckets)
        self._memory = memory
        self._settings = settings
        self._order: Order = TreeOrder() if settings.reproducible else RankOrder(settings.reduce_dtype)

    def reduce(self, call: Call, payload: Payload) -> int:
        runs = self.dense_runs(payload)
        if self._order.has_gaps and not payload.has_same_mask:  # ranks have gradients in different slots
            for (buffer, share), own_runs in zip(self.buffers_of(payload), runs, strict=True):
                fill_missing(payload, buffer, share, own_runs, buffer.flat)
            call.barrier()
        works, size_bytes = self._kept_works(call, payload, runs)
        self._sum(call, works, payload.divisor)
        call.barrier()
        return size_bytes

    def _sum(self, call: Call, works: Sequence[Any], divisor: int) -> None:
        for work in works:
            with call.profiled(f"sum {work.label}"):
                for chunk in work.chunks:
                    divide(chunk, self._order.total_of(chunk), divisor)
                    give_out(chunk)

    def _works_of(self, memory: HostMemory, runs: Sequence[Run]) -> Sequence[Work]:
        return [Work(memory.bucket.label, memory.chunks(memory.own_parts(runs), self._order))]

    def _kept_works(self, call: Call, payload: Payload, runs: Runs) -> tuple[Sequence[Work], int]:
        """The work of this rank for all buckets, and the bytes of their runs."""
        ranks = call.groups.host_ranks
        key = tuple(map(self._memory.segments.__getitem__, ranks)), runs
        # Kept from call to call, because making the views takes a seventh of a call.
        kept: tuple[Sequence[Work], int] | None = self._memory.views.get(key)
        if kept is None:
            works: list[Work] = []
            size_bytes, own = 0, ranks.index(call.groups.rank)
            for place, (index, own_runs) in enumerate(zip(self.buckets, runs, strict=True)):
                bucket = payload.plan.layout.buckets[index]
                works += self._works_of(self._map(bucket, place, ranks, own), own_runs)
                size_bytes += sum(stop - start for start, stop in own_runs) * bucket.dtype.itemsize
            kept = works, size_bytes
            if len(self._memory.views) >= _MAX_KEPT_VIEWS:
                self._memory.views.clear()
            self._memory.views[key] = kept
        return kept

    def _map(self, bucket: Bucket, place: int, ranks: Sequence[int], own: int) -> HostMemory:
        """The memory of the bucket whose segment is at ``place`` among the serials of a rank."""
        flats, parts = [], []
        for rank in ranks:
            serials = self._memory.segments[rank].serials
            flats.append(as_real(self._memory[rank, serials[place]].view(bucket.dtype)))
            sums = serials[len(self.buckets) + place]
            dtype = wire_dtype(bucket.dtype, None)
            parts.append(as_real(self._memory[rank, sums].view(dtype)) if sums else flats[-1])
        return HostMemory(bucket, parts, flats, own, 2 if bucket.dtype.is_complex else 1)


class BetweenHostsReducer(HostReducer):
    """Sums in the memory that the ranks of each host have mapped, and gloo between the hosts."""

    def _sum(self, call: Call, works: Sequence[Any], divisor: int) -> None:
        for chunk in self._order.sum_between_hosts(call, works, divisor):
            give_out(chunk)

    def _works_of(self, memory: HostMemory, runs: Sequence[Run]) -> Sequence[Piece]:
        # Equal pieces on all owners of a part. Cut in halves: one half is added while gloo sends the other.
        parts = memory.own_parts(runs)
        half = (sum(stop - start for start, stop in parts) + 1) // 2
        smallest = SMALLEST_PIECE_BYTES // wire_dtype(memory.bucket.dtype, self._settings.reduce_dtype).itemsize
        cuts = cut_runs(parts, max_numel=min(self._settings.buffer_size, max(half, smallest)))
        return [self._piece(memory, part) for part in cuts]

    def _piece(self, memory: HostMemory, part: Run) -> Piece:
        stretch, dtype = memory.flats[memory.own][memory.stretch(part)], memory.bucket.dtype
        wire = wire_dtype(dtype, self._settings.reduce_dtype)
        carried = stretch if wire == dtype else torch.empty_like(stretch, dtype=wire)
        recv_buffer = carried.new_empty(carried.numel() if self._settings.reproducible else 0)
        return Piece(memory.bucket.label, memory.chunks([part], self._order), stretch, carried, recv_buffer)


def part_of(run: Run, rank: int, size: int) -> Run:
    """The part of ``rank`` in a run. The parts of all ranks are disjoint and cover the run."""
    start, stop = run

    def border(index: int) -> int:
        place = start + (stop - start) * index // size
        return min(stop, -(-place // _LINE_NUMEL) * _LINE_NUMEL) if 0 < index < size else place

    return border(rank), border(rank + 1)


def divide(chunk: Chunk, total: torch.Tensor, divisor: float) -> None:
    """Write ``total / divisor`` to ``chunk.own``. ``total``: is overwritten; may be ``chunk.own``."""
    own = chunk.own
    if total.dtype != own.dtype:  # divide in the wider dtype: the sum may overflow the narrower, the quotient does not
        if torch.finfo(total.dtype).max > torch.finfo(own.dtype).max:
            own.copy_(total.div_(float(divisor)))
            return
        total = own.copy_(total)
    mantissa, _ = math.frexp(divisor)
    if mantissa == 0.5:  # a power of two: the product with its reciprocal has the same bits, and is quicker
        torch.mul(total, 1 / divisor, out=own)
    else:
        torch.div(total, float(divisor), out=own)


def give_out(chunk: Chunk) -> None:
    """Copy the own chunk to the other ranks."""
    for part in chunk.others:
        part.copy_(chunk.own)

"""Sum of dense gradients over several hosts: shared memory within a host, gloo between hosts. Collective (payload).

Every rank owns an equal part of every run on its host. The owner adds this part over the ranks of its host in rank
order, gloo adds the sums of all owners of the part, and each owner divides and writes the result to the flat tensors of
its host. Between hosts gradients have the dtype of the gloo transport: ``reduce_dtype``, else fp32 for fp16 gradients,
and their own dtype for all others.

With ``reproducible=True`` the sum over a host is a node of the tree, and the owners of a part add their nodes in the
order of the tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.layout import Run, cut_runs
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.wire import wire_dtype
from legacy_ddp._collectives.dense import SMALLEST_PIECE_BYTES, split_divisor
from legacy_ddp._collectives.host_sum import (
    Chunk,
    HostMemory,
    Work,
    divide,
    fill_runs,
    give_out,
    kept_views,
    size_bytes,
    total_of,
    work_on,
)
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.transport_choice import host_buffers
from legacy_ddp._reproducible.tree_reduce import TreeInput, tree_reduce
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call


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

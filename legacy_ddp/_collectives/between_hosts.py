"""Sum of dense gradients over several hosts: shared memory within a host, gloo between hosts. Collective (payload).

Every rank owns an equal part of every run on its host. The owner adds this part over the ranks of its host in rank
order, gloo adds the sums of all owners of the part, and each owner divides and writes the result to the flat tensors of
its host. Between hosts gradients have the dtype of the gloo transport: fp16 gradients travel as fp32, all others
unchanged.
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
from legacy_ddp._buckets.wire import as_real, wire_dtype
from legacy_ddp._collectives.dense import SMALLEST_PIECE_BYTES
from legacy_ddp._collectives.host_sum import (
    Chunk,
    Work,
    cut_chunks,
    fill_runs,
    give_out,
    part_of,
    size_bytes,
    total_of,
    work_on,
)
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.transport_choice import host_buffers
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call


def sum_between_hosts(
    call: Call, settings: Settings, plan: Plan, packed: Packed, kinds: Sequence[int], agreement: Agreement
) -> int:
    """Replace every run of dense gradients by its sum over all ranks, divided; return the bytes summed.

    If ranks have gradients in different slots, they fill the other slots now, and wait for the ranks of their host
    before the sum. The collectives of all pieces are started before the first wait.
    """
    buffers = host_buffers(plan)
    runs = fill_runs(call, plan, packed, kinds, is_filled=agreement.has_same_mask)
    started = []
    for buffer, pieces in zip(buffers, _pieces_of(call, settings, buffers, runs), strict=True):
        with call.profiled(f"start {buffer.bucket.label}"):
            started += [(buffer, piece, _start(call, buffer, piece)) for piece in pieces]
    for buffer, piece, work in started:
        with call.profiled(f"finish {buffer.bucket.label}"):
            call.wait(call.groups.between, work)
            for chunk, carried in piece.with_carried(buffer):
                give_out(chunk, carried, agreement.divisor)
    call.barrier()
    return size_bytes(buffers, runs)


@dataclass(frozen=True)
class _Piece:
    """A stretch of the own part, summed between hosts by one collective.

    ``run``: borders in the flat tensor, in real numbers. ``work``: the sum over the host. ``copy``: memory for the
    collective if the dtype between hosts is another, else None.
    """

    run: Run
    work: Work
    copy: torch.Tensor | None

    def carried(self, buffer: FlatBuffer) -> torch.Tensor:
        """The memory for the collective: the copy, or this stretch of the flat tensor."""
        start, stop = self.run
        return as_real(buffer.payload)[start:stop] if self.copy is None else self.copy

    def with_carried(self, buffer: FlatBuffer) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Every chunk, with its part of :meth:`carried`."""
        numels = [chunk.own.numel() for chunk in self.work.chunks]
        yield from zip(self.work.chunks, torch.split(self.carried(buffer), numels), strict=True)


def _pieces_of(
    call: Call, settings: Settings, buffers: Sequence[FlatBuffer], runs: tuple[tuple[Run, ...], ...]
) -> list[list[_Piece]]:
    """The pieces per buffer, equal on the owners of a part. Kept from call to call, as making the views takes time."""
    memory, segments, ranks = call.group_state.peer_memory, call.peer_segments, call.groups.host_ranks
    if memory is None or segments is None:
        raise LegacyDDPError(f"{call}: no shared memory is mapped")
    on_host = [(rank, segments[rank]) for rank in ranks]
    key = (tuple(on_host), runs)
    pieces: list[list[_Piece]] | None = memory.views.get(key)
    if pieces is None:
        own = ranks.index(call.groups.rank)
        pieces = []
        for index, (buffer, own_runs) in enumerate(zip(buffers, runs, strict=True)):
            flats = [as_real(memory[rank, ids.serials[index]].view(buffer.bucket.dtype)) for rank, ids in on_host]
            parts = [part_of(run, own, len(ranks)) for run in own_runs]
            pieces.append([_piece(settings, buffer, flats, own, run) for run in _cut(settings, buffer, parts)])
        memory.keep_views(key, pieces)
    return pieces


def _cut(settings: Settings, buffer: FlatBuffer, parts: Sequence[Run]) -> list[Run]:
    """The stretch of each collective. The parts are cut in halves: one half is added while the other is in flight."""
    half = (sum(stop - start for start, stop in parts) + 1) // 2
    smallest = SMALLEST_PIECE_BYTES // wire_dtype(buffer.bucket.dtype, None).itemsize
    return cut_runs(parts, max_numel=min(settings.buffer_size, max(half, smallest)))


def _piece(settings: Settings, buffer: FlatBuffer, flats: Sequence[torch.Tensor], own: int, run: Run) -> _Piece:
    dtype = buffer.bucket.dtype
    width = 2 if dtype.is_complex else 1
    work = work_on(buffer.bucket, list(cut_chunks(flats, flats, run, own, width)), settings)
    wire = wire_dtype(dtype, None)
    copy = torch.empty(run[1] - run[0], dtype=wire, device="cpu") if wire != dtype else None
    return _Piece((width * run[0], width * run[1]), work, copy)


def _start(call: Call, buffer: FlatBuffer, piece: _Piece) -> Any:
    """Add the chunks over the ranks of the host, and start the sum over the hosts."""
    for chunk, carried in piece.with_carried(buffer):
        carried.copy_(total_of(piece.work, chunk))
    options = call.options("Allreduce")
    options.reduceOp = dist.ReduceOp.SUM
    return call.start(call.groups.between, lambda group: group.allreduce([piece.carried(buffer)], options))

"""Exchanges of the cross-check: batches around the ring of ranks or to all ranks; failures. Collective."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from legacy_ddp._compare import name_ranks
from legacy_ddp._error_text import error_text
from legacy_ddp._errors import PeerError
from legacy_ddp._transport.call import Call


def gather_sizes(call: Call, own: torch.Tensor) -> list[int]:
    """The number of bytes of every rank's ``own``."""
    sizes: list[int] = call.gather(torch.tensor([own.numel()], device="cpu")).flatten().tolist()
    return sizes


def pass_on(call: Call, own: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The bytes of the previous rank in the ring; ``own`` goes to the next rank. ``sizes``: of all ranks, maybe 0."""
    rank, size = call.groups.rank, call.groups.size
    if size == 1:
        return own
    before, after = (rank - 1) % size, (rank + 1) % size
    received = torch.empty(sizes[before], dtype=torch.uint8, device="cpu")
    received_lengths = [sizes[before] * (other == before) for other in range(size)]
    sent_lengths = [sizes[rank] * (other == after) for other in range(size)]
    options = call.options("AllToAll")
    # No send and receive: gloo closes the connection if a wait for these ends by its timer, as it does in every poll.
    call.run(
        call.groups.payload(received.device),
        lambda group: group.alltoall_base(received, own, received_lengths, sent_lengths, options),
    )
    return received


def give_to_all(call: Call, own: torch.Tensor, source: int, size_bytes: int) -> torch.Tensor:
    """The tensor ``own`` of rank ``source``, of ``size_bytes`` bytes of dtype uint8 in one dimension, on every rank."""
    if call.groups.size == 1 or not size_bytes:
        return own
    data = own if call.groups.rank == source else torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    options = call.options("Broadcast")
    options.rootRank, options.rootTensor = source, 0
    call.run(call.groups.payload(data.device), lambda group: group.broadcast([data], options))
    return data


@dataclass
class Failures:
    """The failures of a block of work: ``ranks_by_text`` on all ranks, ``local`` on this rank."""

    ranks_by_text: dict[str, list[int]] = field(default_factory=dict)
    local: Exception | None = None

    @property
    def ranks(self) -> list[int]:
        """The ranks that failed."""
        return sorted(rank for ranks in self.ranks_by_text.values() for rank in ranks)

    def __str__(self) -> str:
        return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in self.ranks_by_text.items())


@contextmanager
def gathering_failures(call: Call) -> Iterator[Failures]:
    """Run local work; after it the ranks exchange failures. The object is complete after the block."""
    failures = Failures()
    try:
        yield failures
    except Exception as error:  # noqa: BLE001 - told to all ranks
        failures.local = error
    with call.phase("compare"):
        texts = call.gather_objects(None if failures.local is None else error_text(failures.local))
    for rank, text in enumerate(texts):
        if text:
            failures.ranks_by_text.setdefault(text, []).append(rank)


@contextmanager
def failing_together(call: Call, what: str) -> Iterator[None]:
    """Run local work, with a failure on all ranks or on no rank. ``what``: name of the work in the error.

    Raises:
        PeerError: some ranks failed; the same text on every rank.
    """
    phase = call.phase_name
    with gathering_failures(call) as failures:
        yield
    if failures.ranks:
        raise PeerError(
            f"{call}: {what} failed on {name_ranks(failures.ranks)}; model, gradients and random generators are as "
            f"before. {failures}",
            ranks=failures.ranks,
            call=call.number,
            phase=phase,
        ) from failures.local

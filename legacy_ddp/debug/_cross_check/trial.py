"""The order of runs and exchanges: the ring of all batches, then the trial of one batch. Collective."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import PeerError
from legacy_ddp._text import error_text
from legacy_ddp._transport.call import Call
from legacy_ddp.debug._cross_check.run import Passes
from legacy_ddp.debug._cross_check.verdict import (
    LATER_REPEAT,
    ON_ITS_RANK,
    ON_NEXT_RANK,
    REPEAT,
    Digests,
    Verdict,
    Witness,
    differing_batches,
    judge,
)
from legacy_ddp.debug._operations.operation import Operation


@dataclass(frozen=True)
class Ring:
    """The digests of the runs of all ranks, as in :func:`~legacy_ddp.debug._cross_check.verdict.differing_batches`.

    ``sizes``: bytes of the batch of each rank, 0 without a batch. ``operations``: of the two runs on this rank, by the
    name of the run; empty if they were not captured.
    """

    sizes: Sequence[int]
    on_its_rank: Sequence[Digests | None]
    on_next_rank: Sequence[Digests | None]
    operations: Mapping[str, Sequence[Operation]] = field(default_factory=dict)

    @property
    def is_different_everywhere(self) -> bool:
        """Whether there are several batches, and every batch had other results on the next rank."""
        batches = sum(size > 0 for size in self.sizes)
        return batches > 1 and len(differing_batches(self.on_its_rank, self.on_next_rank)) == batches


def run_ring(call: Call, passes: Passes, data: torch.Tensor, *, with_operations: bool) -> Ring:
    """Run the batch in ``data``, then the batch of the rank before; gather the digests, 16 bytes per result and rank.

    Raises:
        PeerError: a run failed, on any rank. ValueError: no rank has a batch.
    """
    rank, size = call.groups.rank, call.groups.size
    with call.phase("batch"):
        sizes = gather_sizes(call, data)
        if not any(sizes):
            call.mark_finished()
            raise ValueError("no rank has a batch: got batch=None on all ranks, expected a batch on at least one rank")
        received = pass_on(call, data, sizes)
        with failing_together(call, "the batch of another rank"):
            passes.check_classes(received)
    runs = (
        (ON_ITS_RANK, rank, data, "run"),
        (ON_NEXT_RANK, (rank - 1) % size, received, "run with the batch of the rank before"),
    )
    rows, operations = [], {}
    for name, batch, held, what in runs:
        digests: Digests = (0,) * len(passes.names)
        captured: list[Operation] = []
        with call.phase("run"), failing_together(call, what):
            if sizes[batch]:
                digests, captured = passes.run(held, with_operations=with_operations)
        rows.append(digests)
        if with_operations:
            operations[name] = captured
    with call.phase("compare"):
        table = call.gather(torch.tensor(rows, device="cpu")).tolist()
    on_its_rank = [tuple(table[batch][0]) if sizes[batch] else None for batch in range(size)]
    on_next_rank = [tuple(table[(batch + 1) % size][1]) if sizes[batch] else None for batch in range(size)]
    return Ring(sizes, on_its_rank, on_next_rank, operations)


@dataclass(frozen=True)
class Trial:
    """The verdict about the batch of rank ``batch``, whose bytes are ``data``.

    ``operations``: of the captured runs on this rank, by the name of the run; a run in the ring had this batch only on
    the rank that its name says. ``differing``: names of the results in which the two runs of the verdict differ.
    ``note``: the reason for missing operations, empty without a reason.
    """

    batch: int
    data: torch.Tensor
    verdict: Verdict
    operations: Mapping[str, Sequence[Operation]]
    differing: tuple[str, ...]
    note: str = ""


def try_batch(call: Call, passes: Passes, ring: Ring, batch: int, own: torch.Tensor) -> Trial:
    """Run the batch of rank ``batch`` twice on every rank. ``own``: the batch of this rank.

    Raises:
        PeerError: a run failed, on any rank.
    """
    with call.phase("batch"):
        data = give_to_all(call, own, batch, ring.sizes[batch])
    rows, captured, note = _run_twice(call, passes, batch, data)
    operations = {**ring.operations, **captured}
    with call.phase("compare"):
        table = call.gather(torch.tensor(rows, device="cpu")).tolist()
    repeats = [(tuple(first), tuple(second)) for first, second in table]
    on_its_rank, on_next_rank = ring.on_its_rank[batch], ring.on_next_rank[batch]
    if on_its_rank is None or on_next_rank is None:
        raise RuntimeError(f"rank {batch} has no batch, and its batch was chosen")
    next_rank = (batch + 1) % call.groups.size
    in_ring = {Witness(batch, ON_ITS_RANK): on_its_rank, Witness(next_rank, ON_NEXT_RANK): on_next_rank}
    verdict = judge(in_ring, repeats)
    if verdict.kind == "once" and ring.is_different_everywhere:
        # A single event changes one batch. If all batches differ, all ranks have the cause in common, such as a warm-up
        # in the first run, and to name the ranks of the examined batch alone would accuse them.
        verdict = replace(verdict, ranks=tuple(rank for rank, size in enumerate(ring.sizes) if size))
    results = dict(in_ring)
    for rank, (first, second) in enumerate(repeats):
        results[Witness(rank, REPEAT)] = first
        results[Witness(rank, LATER_REPEAT)] = second
    odd, reference = (results[witness] for witness in (verdict.odd, verdict.reference) if witness)
    differing = tuple(name for name, a, b in zip(passes.names, odd, reference, strict=True) if a != b)
    return Trial(batch, data, verdict, operations, differing, note)


def _run_twice(
    call: Call, passes: Passes, batch: int, data: torch.Tensor
) -> tuple[list[Digests], dict[str, Sequence[Operation]], str]:
    """The digests of two runs, their operations, and the reason for missing operations.

    A run that fails only under the capture (an operation without support for dispatch modes) is repeated without it:
    the ranks are known then, and the operation is not.
    """
    digests: dict[str, Digests] = {}
    operations: dict[str, Sequence[Operation]] = {}
    with call.phase("run"), gathering_failures(call) as failures:
        for name in (REPEAT, LATER_REPEAT):
            digests[name], operations[name] = passes.run(data, with_operations=True)
    if not failures.ranks:
        return list(digests.values()), operations, ""
    for name in (REPEAT, LATER_REPEAT):
        with call.phase("run"), failing_together(call, f"run with the batch of rank {batch}"):
            digests[name], _ = passes.run(data, with_operations=False)
    return list(digests.values()), {}, f"the capture of operations failed. {failures}"


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

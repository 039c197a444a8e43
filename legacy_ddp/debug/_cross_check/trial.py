"""Exchanges of a cross-check: the ring of all batches, the trial of one batch, and the search for the first different
operation with its elements. Collective.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from legacy_ddp._errors import PeerError
from legacy_ddp._explain.compare import LARGE_BYTES
from legacy_ddp._explain.element_compare import ElementDifference, compare_elements
from legacy_ddp._memory.layout import fingerprint
from legacy_ddp._ranks.call import Call
from legacy_ddp._text import error_text, name_ranks
from legacy_ddp.debug._cross_check.batch import pack, unpack
from legacy_ddp.debug._cross_check.run import Passes
from legacy_ddp.debug._cross_check.verdict import (
    LATER_REPEAT,
    ON_ITS_RANK,
    ON_NEXT_RANK,
    REPEAT,
    RING_RUNS,
    Digests,
    Place,
    Verdict,
    Witness,
    differing_batches,
    judge,
)
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Gap, Operation, OperationDifference, Origin, Value

_EQUAL = "the elements are not known: the output was equal in one more run"
_TOO_LARGE = "the elements are not known: the output is too large, sparse, or of another shape"
_WINDOW = 2_000  # operations after the first difference, enough to align the sequences again


@dataclass(frozen=True)
class Ring:
    """The digests of the runs of all ranks, as in :func:`differing_batches`.

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
    """Run the batch in ``data``, then the batch of the rank before. Gathers 16 bytes per result and rank."""
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

    ``operations``: of the captured runs on this rank, by the name of the run. (A run in the ring had this batch only on
    one rank.) ``differing``: names of the results in which the two runs of the verdict differ. ``note``: why operations
    are missing, or empty.
    """

    batch: int
    data: torch.Tensor
    verdict: Verdict
    operations: Mapping[str, Sequence[Operation]]
    differing: tuple[str, ...]
    note: str = ""


def try_batch(call: Call, passes: Passes, ring: Ring, batch: int, own: torch.Tensor) -> Trial:
    """Run the batch of rank ``batch`` twice on every rank. ``own``: the batch of this rank."""
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
        # A single event changes one batch. If all batches differ, the cause is common to all ranks, such as a warm-up
        # in the first run. Then it would be wrong to name only the ranks of the examined batch.
        verdict = replace(verdict, ranks=tuple(rank for rank, size in enumerate(ring.sizes) if size))
    results = dict(in_ring)
    for rank, (first, second) in enumerate(repeats):
        results[Witness(rank, REPEAT)] = first
        results[Witness(rank, LATER_REPEAT)] = second
    odd, reference = results[verdict.odd], results[verdict.reference]
    differing = tuple(name for name, a, b in zip(passes.names, odd, reference, strict=True) if a != b)
    return Trial(batch, data, verdict, operations, differing, note)


def _run_twice(
    call: Call, passes: Passes, batch: int, data: torch.Tensor
) -> tuple[list[Digests], dict[str, Sequence[Operation]], str]:
    """The digests of two runs, their operations, and the reason for missing operations.

    If a run fails under the capture (an operation may lack support for dispatch modes), both are repeated without it.
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


def locate(call: Call, passes: Passes, trial: Trial) -> Place:
    """The place of the difference, equal on all ranks.

    May need one more run on every rank, or two if both runs of the verdict were on one rank.
    """
    odd, reference = trial.verdict.odd, trial.verdict.reference
    if odd.run not in trial.operations:
        return Place(note=trial.note)
    with call.phase("compare"):
        place = _find_operation(call, trial, odd, reference)
    found = place.difference
    if found is None or found.kind != "output":
        return place
    if odd.run in RING_RUNS:
        return replace(place, note="the elements are not known: the difference did not happen again")
    elements, note = _compare_elements(call, passes, trial, found, odd, reference)
    return replace(place, elements=elements, note=note, is_intermittent=note == _EQUAL)


def _find_operation(call: Call, trial: Trial, odd: Witness, reference: Witness) -> Place:
    """The first different operation, found on the rank of ``odd`` and sent to all."""
    rank = call.groups.rank
    odd_operations = list(trial.operations[odd.run]) if rank == odd.rank else []
    if odd.rank == reference.rank:
        reference_operations = list(trial.operations[reference.run]) if rank == odd.rank else []
    else:
        mine = list(trial.operations[reference.run]) if rank == reference.rank else odd_operations
        reference_operations = _operations_of(call, mine, odd.rank, reference.rank)
    found = None
    with failing_together(call, "the comparison of operations"):
        if rank == odd.rank:
            found = first_difference(odd_operations, reference_operations)
    last = odd_operations[-1].number if odd_operations else 0
    facts = [len(odd_operations), last, asdict(found) if found else None]
    count, last, row = call.gather_objects(facts)[odd.rank]
    return Place(difference_from(row) if row else None, count=count, last=last)


def _operations_of(call: Call, mine: list[Operation], receiver: int, sender: int) -> list[Operation]:
    """The operations of rank ``sender``, on rank ``receiver``; empty on all other ranks. ``mine``: of this rank.

    Leaves out the operations at the beginning that are equal on both ranks, and sends the next :data:`_WINDOW`.
    """
    rank = call.groups.rank
    texts = [repr(operation).encode(errors="backslashreplace") for operation in mine]
    prints = torch.tensor([*map(fingerprint, texts)], dtype=torch.int64, device="cpu")
    data = prints.view(torch.uint8)
    receivers_prints = give_to_all(call, data, receiver, gather_sizes(call, data)[receiver]).view(torch.int64)
    common, sent = 0, []
    if rank == sender:
        length = min(len(prints), len(receivers_prints))
        differs = (prints[:length] != receivers_prints[:length]).nonzero()
        common = int(differs[0]) if len(differs) else length
        sent = [asdict(operation) for operation in mine[common : common + _WINDOW]]
    data = torch.frombuffer(bytearray(json.dumps([common, sent]).encode("ascii")), dtype=torch.uint8)
    data = give_to_all(call, data, sender, gather_sizes(call, data)[sender])
    if rank != receiver:
        return []
    common, rows = json.loads(bytes(data.tolist()))
    return [*mine[:common], *map(operation_from, rows)]


def _compare_elements(
    call: Call, passes: Passes, trial: Trial, found: OperationDifference, odd: Witness, reference: Witness
) -> tuple[ElementDifference | None, str]:
    """The difference of the first differing output in another run of both sides; else None and the reason."""
    outputs, sides = [], ((odd, found.start_a), (reference, found.start_b))
    positions = sorted({position for witness, position in sides if witness.rank == call.groups.rank})
    for witness, position in sides:
        # Every rank makes every run: a run may hold a collective of the user.
        if witness is odd or odd.rank == reference.rank:
            with call.phase("run"), failing_together(call, f"run with the batch of rank {trial.batch}"):
                kept = passes.run_keeping(trial.data, positions)
        if call.groups.rank == witness.rank:
            outputs.append(kept.get(position, ())[found.differing[0] : found.differing[0] + 1])
        else:
            outputs.append(())
    with call.phase("compare"):
        return _exchange_elements(call, outputs, odd.rank, reference.rank)


def _exchange_elements(
    call: Call, outputs: list[tuple[torch.Tensor, ...]], receiver: int, sender: int
) -> tuple[ElementDifference | None, str]:
    """Compare the outputs on rank ``receiver``, and send the result to all ranks."""
    (own, other), rank = outputs, call.groups.rank
    is_sent = bool(other) and other[0].layout is torch.strided and other[0].nbytes <= LARGE_BYTES
    data = pack(other[0].detach(), None, {})[0] if is_sent else torch.empty(0, dtype=torch.uint8)
    sizes = gather_sizes(call, data)
    if not sizes[sender]:
        return None, _TOO_LARGE
    data = give_to_all(call, data, sender, sizes[sender])
    row, note = None, _TOO_LARGE
    if rank == receiver and own:
        theirs = unpack(data, torch.device("cpu"), {}).batch
        mine = own[0].detach().to(theirs.device)
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and mine.layout is torch.strided:
            found = compare_elements(mine, theirs)
            row, note = (found.to_json(), "") if found else (None, _EQUAL)
    row, note = call.gather_objects([row, note])[receiver]
    return (ElementDifference.from_json(row) if row else None), note


def operation_from(row: dict[str, Any]) -> Operation:
    """The inverse of ``asdict``, after JSON."""
    values = {name: tuple(Value(**value) for value in row[name]) for name in ("inputs", "outputs")}
    return Operation(**{**row, **values, "parameters": tuple(row["parameters"])})


def difference_from(row: dict[str, Any]) -> OperationDifference:
    """The inverse of ``asdict``, after JSON."""
    return OperationDifference(
        **{
            **row,
            **_sides(row),
            "differing": tuple(row["differing"]),
            "origin": Origin(**{**row["origin"], **_writers(row["origin"])}),
            **{name: tuple(Gap(**{**gap, **_sides(gap)}) for gap in row[name]) for name in ("earlier", "later")},
        }
    )


def _sides(row: dict[str, Any]) -> dict[str, tuple[Operation, ...]]:
    return {side: tuple(map(operation_from, row[side])) for side in ("a", "b")}


def _writers(row: dict[str, Any]) -> dict[str, Operation | None]:
    return {name: row[name] and operation_from(row[name]) for name in ("operation_a", "operation_b", "operation_read")}


def gather_sizes(call: Call, own: torch.Tensor) -> list[int]:
    sizes: list[int] = call.gather(torch.tensor([own.numel()], device="cpu")).flatten().tolist()
    return sizes


def pass_on(call: Call, own: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Send ``own`` to the next rank in the ring; returns the bytes of the previous one. ``sizes``: of all ranks."""
    rank, size = call.groups.rank, call.groups.size
    if size == 1:
        return own
    before, after = (rank - 1) % size, (rank + 1) % size
    received = torch.empty(sizes[before], dtype=torch.uint8, device="cpu")
    received_lengths = [sizes[before] * (other == before) for other in range(size)]
    sent_lengths = [sizes[rank] * (other == after) for other in range(size)]
    options = call.options("AllToAll")
    # Not send and receive: gloo closes their connection if a wait ends by a timeout, and every poll is such a wait.
    call.run(
        call.groups.payload(received.device),
        lambda group: group.alltoall_base(received, own, received_lengths, sent_lengths, options),
    )
    return received


def give_to_all(call: Call, own: torch.Tensor, source: int, size_bytes: int) -> torch.Tensor:
    """The tensor ``own`` of rank ``source`` (uint8, one dimension of ``size_bytes``) on every rank."""
    if call.groups.size == 1 or not size_bytes:
        return own
    data = own if call.groups.rank == source else torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    call.broadcast(data, source)
    return data


@dataclass
class Failures:
    """The failures of a block of work: ``ranks_by_text`` on all ranks, ``local`` on this rank."""

    ranks_by_text: dict[str, list[int]] = field(default_factory=dict)
    local: Exception | None = None

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for ranks in self.ranks_by_text.values() for rank in ranks)

    def __str__(self) -> str:
        return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in self.ranks_by_text.items())


@contextmanager
def gathering_failures(call: Call) -> Iterator[Failures]:
    """Run local work. After the block the ranks exchange their failures, and the object holds all of them."""
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
    """Run local work. If it fails on any rank, all ranks raise a PeerError. ``what``: name of the work in the error."""
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

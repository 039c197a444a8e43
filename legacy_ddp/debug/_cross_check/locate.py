"""The first different operation of two runs of one batch, and the elements of its output. Collective."""

import json
from dataclasses import asdict, replace
from typing import Any

import torch

from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._replicas.compare import LARGE_BYTES
from legacy_ddp._replicas.element_compare import ElementDifference, compare_elements
from legacy_ddp._transport.call import Call
from legacy_ddp.debug._cross_check.batch import pack, unpack
from legacy_ddp.debug._cross_check.run import Passes
from legacy_ddp.debug._cross_check.trial import Trial, failing_together, gather_sizes, give_to_all
from legacy_ddp.debug._cross_check.verdict import RING_RUNS, Place, Witness
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Gap, Operation, OperationDifference, Origin, Value

_EQUAL = "the elements are not known: the output was equal in one more run"
_TOO_LARGE = "the elements are not known: the output is too large, sparse, or of another shape"
_WINDOW = 2_000  # operations after the first difference, enough to align the sequences again


def locate(call: Call, passes: Passes, trial: Trial) -> Place:
    """The place of the difference, equal on all ranks. One more run on every rank, two for a rank that disagrees with
    itself.

    Raises:
        PeerError: a run failed, on any rank.
    """
    odd, reference = trial.verdict.odd, trial.verdict.reference
    if odd is None or reference is None or odd.run not in trial.operations:
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

    The operations that both ranks have in common at the beginning are not sent. Of the others :data:`_WINDOW` are sent.
    """
    rank = call.groups.rank
    prints = torch.tensor([_fingerprint(operation) for operation in mine], dtype=torch.int64, device="cpu")
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


def _fingerprint(operation: Operation) -> int:
    return fingerprint(repr(operation).encode(errors="backslashreplace"))


def _compare_elements(
    call: Call, passes: Passes, trial: Trial, found: OperationDifference, odd: Witness, reference: Witness
) -> tuple[ElementDifference | None, str]:
    """The difference of the first differing output in one more run of both sides; the reason for a missing one."""
    outputs = []
    for witness, position in ((odd, found.start_a), (reference, found.start_b)):
        # Every rank makes every run: a run may hold a collective of the user.
        if witness is odd or odd.rank == reference.rank:
            with call.phase("run"), failing_together(call, f"run with the batch of rank {trial.batch}"):
                kept = passes.run_keeping(trial.data, _positions(call.groups.rank, found, odd, reference))
        if call.groups.rank == witness.rank:
            outputs.append(kept.get(position, ())[found.differing[0] : found.differing[0] + 1])
        else:
            outputs.append(())
    with call.phase("compare"):
        return _exchange_elements(call, outputs, odd.rank, reference.rank)


def _positions(rank: int, found: OperationDifference, odd: Witness, reference: Witness) -> list[int]:
    sides = ((odd, found.start_a), (reference, found.start_b))
    return sorted({position for witness, position in sides if witness.rank == rank})


def _exchange_elements(
    call: Call, outputs: list[tuple[torch.Tensor, ...]], receiver: int, sender: int
) -> tuple[ElementDifference | None, str]:
    """Compare the outputs on rank ``receiver``, and tell all ranks."""
    (own, other), rank = outputs, call.groups.rank
    is_sent = bool(other) and other[0].layout is torch.strided and other[0].nbytes <= LARGE_BYTES
    data = pack(other[0].detach(), None, {}) if is_sent else torch.empty(0, dtype=torch.uint8)
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


# Operations and their first difference travel as JSON values: asdict, and the way back.


def operation_from(row: dict[str, Any]) -> Operation:
    """The inverse of :func:`dataclasses.asdict` for an operation."""
    values = {name: tuple(Value(**value) for value in row[name]) for name in ("inputs", "outputs")}
    return Operation(**{**row, **values, "parameters": tuple(row["parameters"])})


def difference_from(row: dict[str, Any]) -> OperationDifference:
    """The inverse of :func:`dataclasses.asdict` for a difference."""
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

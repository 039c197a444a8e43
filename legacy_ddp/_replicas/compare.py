"""Ranks show each other what they hold, until they know what differs, how, since when and through whom. Collective."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from legacy_ddp._agreement.header import Header
from legacy_ddp._buckets.inventory import fingerprint
from legacy_ddp._compare import compare_rows, name_ranks
from legacy_ddp._replicas.attribution import STATE_ALONE, Blame, Verdict, accuse, judge_kinds, judge_phases, weigh
from legacy_ddp._replicas.element_compare import ElementDifference, compare_elements
from legacy_ddp._replicas.phases import Phases
from legacy_ddp._replicas.report import ReplicaDifference, ReplicaReport
from legacy_ddp._replicas.state import KINDS, Holding, rows_of, word_of
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.operation import Operation

Rows = dict[str, dict[str, str]]

LARGE_BYTES = 2**28  # of larger tensors no element is looked at: it may take 17 times their memory
DETAILS = 3  # tensors that are compared element by element, unless the user asks for more


@dataclass(frozen=True)
class Own:
    """What this rank brings: what replicas should share at any moment, gradients, and a number for its generators.

    ``gradients``, ``generators``: None if nobody asked for them. ``recall``: tells the phases, asked only if something
    differs; None where nothing followed them.
    """

    shared: Sequence[Holding]
    gradients: Sequence[Holding] | None = None
    generators: int | None = None
    recall: Callable[[], Phases] | None = None

    def sign(self, header: Header) -> Header:
        """``header`` with a number for each; gradients have their own, as they may turn out to be a rank's alone."""
        gradients = word_of(self.gradients or ())
        return header._replace(state=word_of(self.shared), mask=gradients, random=self.generators or 0)


def compare(call: Call, rows: Sequence[Header], own: Own, *, details: int) -> ReplicaReport:
    """What the headers say, all of which were signed; collective if they differ."""
    # Decided by what was asked for, which is the same on all ranks, and not by what there is.
    local = [] if own.gradients is None else [rank for rank, row in enumerate(rows) if row.micro_batches]
    holdings = [*own.shared, *(() if local else own.gradients or ())]
    if len({(row.state, 0 if local else row.mask) for row in rows}) == 1:
        report = ReplicaReport(str(call), call.groups.size, count_kinds(holdings))
    else:
        report = examine(call, holdings, own.recall, details=details)
    note = f"gradients not compared: those of {name_ranks(local)} are from a backward since the last all_reduce()"
    generators = () if own.generators is None else _alike([row.random for row in rows])
    return replace(report, notes=(note,) if local else (), generators=generators)


def examine(
    call: Call,
    holdings: Sequence[Holding],
    recall: Callable[[], Phases] | None,
    *,
    details: int = DETAILS,
    left_out: Collection[int] = (),
) -> ReplicaReport:
    """Collective, on every rank, when headers differ: exchanges the rows of all ranks, and ``details`` tensors.

    ``left_out``: ranks whose replicas are known to be old, and are compared with none.

    A tensor that is compared element by element is sent once to all ranks, from the lowest of the ranks that hold
    what most hold.
    """
    with call.phase("examine"):
        rows, compared = _exchange(call, holdings)
        ranks = [rank for rank in range(len(rows)) if rank not in left_out]
        differences = _find_differences(rows, ranks)
        # What followed their steps counts the ranks that are left out, too.
        verdict = _judge(call, differences, compared, None if left_out else recall)
        tensors = {item.name: item.value for item in holdings if isinstance(item.value, torch.Tensor)}
        differences = _look_closer(call, differences, tensors, details, ranks)
    return ReplicaReport(str(call), call.groups.size, compared, tuple(differences), verdict)


def count_kinds(holdings: Iterable[Holding]) -> dict[str, int]:
    """How many things of each kind."""
    counts = dict.fromkeys(KINDS, 0)
    for holding in holdings:
        counts[holding.kind] += 1
    return counts


def _exchange(call: Call, holdings: Sequence[Holding]) -> tuple[list[Rows], dict[str, int]]:
    """Collective: what each rank holds, in words, at least where they differ; and how many things of each kind.

    Ranks that hold things of the same names find out by 8 bytes each which of them to show.
    """
    words = rows_of(holdings)
    names = call.gather(torch.tensor([fingerprint(json.dumps(list(words)).encode())], device="cpu"))
    if bool((names != names[0]).any()):
        rows = _show(call, holdings, words)
        if not all(of_rank["optimizer"] for of_rank in rows):  # a rank that took no step yet knows of no optimizer
            rows = [{**of_rank, "optimizer": {}} for of_rank in rows]
        return rows, {kind: len({name for of_rank in rows for name in of_rank[kind]}) for kind in KINDS}
    marks = call.gather(torch.tensor([fingerprint(json.dumps(text).encode()) for text in words.values()], device="cpu"))
    differs = (marks != marks[0]).any(dim=0).tolist()
    shown = [item for item, is_shown in zip(holdings, differs, strict=True) if is_shown]
    return _show(call, shown, words), count_kinds(holdings)


def _show(call: Call, holdings: Sequence[Holding], words: Mapping[str, str]) -> list[Rows]:
    """Collective: by rank and kind, the name of each thing and what it is."""
    own = {kind: {item.name: words[item.name] for item in holdings if item.kind == kind} for kind in KINDS}
    return call.gather_objects(own)


def _find_differences(rows: Sequence[Rows], ranks: Sequence[int]) -> list[ReplicaDifference]:
    """Kind by kind, but settings that differ first: a learning rate says more than a thousand weights."""
    found = [
        ReplicaDifference(kind, item.name, item.holders)
        for kind in KINDS
        for item in compare_rows([rows[rank][kind] for rank in ranks], ranks).differences
    ]
    return sorted(found, key=lambda item: not item.is_setting)


def _judge(
    call: Call,
    differences: Sequence[ReplicaDifference],
    compared: Mapping[str, int],
    recall: Callable[[], Phases] | None,
) -> Verdict:
    """Collective if phases were followed: since when replicas differ, or else what that looks like now."""
    kinds = {item.kind for item in differences}
    phases = [] if recall is None else _exchange_phases(call, recall())
    found = _blame_all(differences, phases)
    if phases and (call.operation is Operation.ALL_REDUCE or "parameters" in kinds):
        verdict = judge_phases(phases, call.group_state.calls[Operation.ALL_REDUCE])
        if verdict.phase:
            return accuse(verdict, found.implicated, STATE_ALONE)
    return judge_kinds(kinds, [kind for kind in KINDS if compared[kind]], found)


def _exchange_phases(call: Call, own: Phases) -> list[Phases]:
    """Collective: the phases of all ranks."""
    return [Phases(**of_rank) for of_rank in call.gather_objects(asdict(own))]


def _blame_all(differences: Sequence[ReplicaDifference], phases: Sequence[Phases]) -> Blame:
    """Every rank that a majority speaks against in any of the differences; several may be at fault.

    Evidence speaks of optimizer state alone, and only where that differs now.
    """
    minority = sorted({rank for item in differences for rank in item.suspects})
    sides = "; ".join(list(dict.fromkeys(item.sides for item in differences))[:3])
    has_state = any(item.kind == "optimizer" and not item.is_setting for item in differences)
    did = [of_rank.state_changed_after for of_rank in phases] if has_state else []
    return weigh(sides, minority, did, STATE_ALONE)


def _look_closer(
    call: Call,
    differences: Sequence[ReplicaDifference],
    tensors: Mapping[str, torch.Tensor],
    details: int,
    ranks: Sequence[int],
) -> list[ReplicaDifference]:
    """Compare the first ``details`` tensors by element; which these are follows from what all ranks know."""
    closer = []
    for item in differences:
        if details > 0 and item.tensor is not None and _can_look_into(tensors[item.name]):
            details -= 1
            told = _compare_elements(call, tensors[item.name], item.holders[0][1])
            elements = {rank: difference for rank, difference in told.items() if rank in ranks}
            closer.append(replace(item, elements=elements))
        else:
            closer.append(item)
    return closer


def _compare_elements(call: Call, own: torch.Tensor, most: Sequence[int]) -> dict[int, ElementDifference]:
    reference = own.detach().resolve_conj().resolve_neg().contiguous().clone()
    options = call.options("Broadcast")
    options.rootRank, options.rootTensor = most[0], 0
    flat = reference.view(-1).view(torch.uint8)
    call.run(call.groups.payload(own.device), lambda group: group.broadcast([flat], options))
    found = None if call.groups.rank in most else _compared(own, reference)
    told = call.gather_objects(found and found.to_json())
    return {rank: ElementDifference.from_json(item) for rank, item in enumerate(told) if item is not None}


def _can_look_into(tensor: torch.Tensor) -> bool:
    """Decided by what is the same on all ranks."""
    return tensor.layout is torch.strided and tensor.numel() * tensor.itemsize <= LARGE_BYTES


def _compared(own: torch.Tensor, reference: torch.Tensor) -> ElementDifference | None:
    try:
        return compare_elements(own, reference)
    except Exception:  # noqa: BLE001 - the other ranks wait; the report says less, instead of nothing
        return None


def _alike(words: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for rank, word in enumerate(words):
        groups.setdefault(word, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())

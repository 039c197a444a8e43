"""Exchange after a difference between replicas: descriptions, digests and tensors of the items that differ."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from legacy_ddp._errors import ReplicaDivergenceError
from legacy_ddp._explain.attribution import (
    AT_START,
    STATE_CHANGED,
    Verdict,
    add_evidence,
    add_optimizer_cause,
    add_reading_of_buffers,
    attribute,
    attribute_digests,
    attribute_kinds,
    attribute_values,
    name_digest,
)
from legacy_ddp._explain.element_compare import ElementDifference, compare_elements, format_element
from legacy_ddp._explain.replica_report import (
    Kind,
    ReplicaDifference,
    ReplicaReport,
    count_holders,
    explain_loss,
    group_entries,
    unlike_tensors,
)
from legacy_ddp._explainer import DifferingReplicas
from legacy_ddp._memory.layout import fingerprint
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Header, Operation
from legacy_ddp._replicas.history import StepDigests
from legacy_ddp._replicas.state import KINDS, StateItem, describe_value, digest_each, digest_items, equal_groups
from legacy_ddp._text import compare_groups, name_ranks

# Larger tensors are not compared by element: the comparison may take 17 times their memory.
LARGE_BYTES = 2**28  # 4 GiB for a report that was asked for
LARGE_BYTES_BY_DEFAULT = 2**24  # 272 MiB for a warning beside a training
_NEXT_STEP = (
    "  next: mend the cause, then give every rank the parameters of a good one (of a\n"
    "    wrapper: broadcast_parameters(src=...), broadcast_buffers(src=...)), or go\n"
    "    back to a checkpoint; optimizer state is not broadcast"
)
_UNLIKE = (
    "  next: make the module alike on every rank: a broadcast raises LayoutError where\n"
    "    ranks hold tensors of other names, dtypes or shapes"
)
_MOMENTS = (
    "optimizer state (`step`) is as of this call, and settings (`lr`) are as of the last step() before it; replicas "
    "may have parted earlier"
)
_CAUSE = (
    "a write outside of a step(), another start (seed, checkpoint), a step() of its own (inside no_sync(), learning "
    "rate, optimizer state, gradients changed after the call), or memory that does not keep its bits"
)

DETAILS = 3  # tensors that are compared by element by default
Rows = dict[str, dict[str, str]]  # by kind, the name and the description of each item
Groups = list[tuple[Rows, tuple[int, ...]]]  # with the ranks that hold them


@dataclass(frozen=True)
class Explained:
    """The report on differing replicas of a call, and what was known of them before it."""

    found: DifferingReplicas
    report: ReplicaReport

    @property
    def differences(self) -> Sequence[ReplicaDifference]:
        return self.report.differences

    def between(self, last: int, number: int, note: str) -> "Explained":
        """The same with the calls between which the difference came about, its possible causes, and a note.

        ``last``: the last call without the difference, 0 without one. ``number``: the call whose digests differ.
        """
        now = self.found.call.number
        found = "this call" if number == now else f"call {number}, as the device has told by this call"
        verdict = replace(self.report.verdict, since=f"between {name_digest(last)} and {found}")
        if number == 1:
            verdict = replace(verdict, phase="start", since=AT_START.since, cause=AT_START.cause)
        elif verdict.phase == "unknown":
            verdict = replace(verdict, cause=_CAUSE)
        notes = (*self.report.notes, note) if note else self.report.notes
        return replace(self, report=replace(self.report, verdict=verdict, notes=notes))

    def error(self, notes: Sequence[str]) -> ReplicaDivergenceError:
        report = add_moved(self.report, self.found.moved, self.found.digests)
        return divergence_error(self.found.call, replace(report, notes=(*report.notes, *notes)))


def explain_replicas(found: DifferingReplicas) -> Explained:
    """Collective: exchange the items of all ranks, and compare them."""
    report = compare_items(
        found.call,
        found.items,
        found.evidence,
        largest_bytes=LARGE_BYTES_BY_DEFAULT if found.is_brief else LARGE_BYTES,
        left_out=found.left_out,
        told=found.told,
    )
    return Explained(found, report)


def divergence_error(call: Call, report: ReplicaReport) -> ReplicaDivergenceError:
    parameters = {item.parameter for item in report.differences if item.kind == "parameters"}
    error = ReplicaDivergenceError(
        f"{report}\n{_UNLIKE if unlike_tensors(report.differences) else _NEXT_STEP}",
        ranks=report.ranks,
        call=call.number,
        phase=report.phase,
        parameter=parameters.pop() if len(parameters) == 1 else None,
    )
    error.report, error.minority, error.implicated = report, report.minority, report.implicated
    return error


@dataclass(frozen=True)
class LocalState:
    """The items of this rank for ``check_replicas()``."""

    shared: Sequence[StateItem]
    gradients: Sequence[StateItem] | None = None  # None if not requested
    generators: int | None = None  # a digest of the random generators; None if not requested
    snapshot: Callable[[], StepDigests] | None = None  # called only after a difference; None without a history

    def add_digests(self, header: Header) -> None:
        """Write three digests to the header. Gradients are separate, because they may belong to a single rank."""
        header.replica, header.gradients = digest_items(self.shared), digest_items(self.gradients or ())
        header.generators = self.generators or 0


def compare_headers(call: Call, rows: Sequence[Header], own: LocalState, *, details: int) -> ReplicaReport:
    """The report, from headers with digests. Collective if the digests differ."""
    # Decided by the request, which is equal on all ranks, and not by the items, which may differ.
    local = [] if own.gradients is None else [rank for rank, row in enumerate(rows) if row.micro_batches]
    items = [*own.shared, *(() if local else own.gradients or ())]
    if len({(row.replica, 0 if local else row.gradients) for row in rows}) == 1:
        present = [item for item in items if item.kind != "gradients" or isinstance(item.value, torch.Tensor)]
        report = ReplicaReport(str(call), call.groups.size, _count_kinds(present))
    else:
        report = compare_items(call, items, own.snapshot, details=details)
    note = f"gradients not compared: those of {name_ranks(local)} are from a backward since the last all_reduce()"
    generators = () if own.generators is None else equal_groups({rank: row.generators for rank, row in enumerate(rows)})
    return replace(report, notes=(note,) if local else (), generators=generators)


def compare_items(
    call: Call,
    items: Sequence[StateItem],
    snapshot: Callable[[], StepDigests] | None,
    *,
    details: int = DETAILS,
    largest_bytes: int = LARGE_BYTES,
    left_out: Collection[int] = (),
    told: Collection[tuple[str, str]] = (),
) -> ReplicaReport:
    """The report after digests differ. Collective, on every rank.

    At most ``details`` tensors, of at most ``largest_bytes`` each, are compared by element. The lowest rank of the
    largest group of equal ranks sends such a tensor to all ranks. ``left_out``: ranks that are not compared, because
    their replicas are known to be old. ``told``: names and sides of differences that were reported before; these come
    last.
    """
    with call.phase("compare"):
        groups, compared, entry_counts = _exchange_rows(call, items)
        ranks = [rank for rank in range(call.groups.size) if rank not in left_out]
        differences = sorted(_find_differences(groups, left_out), key=lambda item: (item.name, item.sides) in told)
        # The digests of steps include the ranks that are left out.
        verdict = _attribute(call, differences, compared, None if left_out else snapshot)
        buffers = [item for item in differences if item.kind == "buffers"]
        verdict = add_reading_of_buffers(verdict, buffers, unlike_tensors(buffers))
        entries = group_entries((item for item in differences if item.kind == "optimizer"), entry_counts)
        settings = [item.kind[0] for item in entries if item.is_setting]
        verdict = add_optimizer_cause(verdict, explain_loss(entries, entry_counts), settings)
        tensors = {item.name: item.value for item in items if isinstance(item.value, torch.Tensor)}
        # Layout and size are equal on all ranks if only the bits of a tensor differ: all ranks choose the same tensors.
        chosen = [
            item.name
            for item in differences
            if item.tensor is not None
            and (tensor := tensors[item.name]).layout is torch.strided
            and not tensor.is_quantized
            and tensor.numel() * tensor.itemsize <= largest_bytes
        ][:details]
        differences = [
            replace(item, elements=_compare_elements(call, tensors[item.name], item.holders[0][1], ranks))
            if item.name in chosen
            else item
            for item in differences
        ]
    notes = (_MOMENTS,) if entries and call.operation is Operation.ALL_REDUCE else ()
    return ReplicaReport(
        str(call), call.groups.size, compared, tuple(differences), verdict, notes=notes, entry_counts=entry_counts
    )


def add_moved(report: ReplicaReport, moved: Sequence[int], digests: Mapping[int, int]) -> ReplicaReport:
    """``report`` with a note that the parameters of the ranks ``moved`` have changed since ``digests`` were taken."""
    if not moved:
        return report
    # The present elements say nothing about the difference. Without evidence, the ranks at fault follow from `digests`.
    verdict = report.verdict
    if not verdict.implicated:
        found = attribute_values(list(digests.values()), ranks=list(digests))
        verdict = replace(verdict, who=found.who, ranks=found.ranks, minority=found.minority)
    note = (
        f"the parameters have changed on {name_ranks(moved)} since the forward in which they were found to differ, for "
        "example perturbed for a moment (m-SAM). The list is of this call, and the script may restore them after it"
    )
    differences = [replace(item, elements={}) if item.kind == "parameters" else item for item in report.differences]
    return replace(report, verdict=verdict, differences=tuple(differences), notes=(*report.notes, note))


def describe_items(items: Sequence[StateItem]) -> dict[str, str]:
    """The text of each item by name: the type and digest of a tensor, the type and number of an optimizer scalar."""
    texts = {item.name: describe_value(item.value) for item in items}
    hashed: dict[str, torch.Tensor] = {}
    for item in items:
        if not isinstance(item.value, torch.Tensor):
            continue
        if item.kind == "optimizer" and item.value.ndim == 0 and item.value.layout is torch.strided:
            texts[item.name] += f" {format_element(item.value)}"
        else:
            hashed[item.name] = item.value
    for name, digest in zip(hashed, digest_each(hashed.values()), strict=True):
        texts[name] += f" {digest % 2**64:016x}"
    return texts


def _count_kinds(items: Iterable[StateItem]) -> dict[str, int]:
    counts = Counter(item.kind for item in items)
    return {kind: counts[kind] for kind in KINDS}


def _exchange_rows(call: Call, items: Sequence[StateItem]) -> tuple[Groups, dict[str, int], dict[Kind, int]]:
    """Collective: the descriptions of the items, the number of items of each kind, and :func:`count_holders`.

    Ranks with equal names first exchange 8 bytes for each item, and then only the descriptions that differ.
    """
    descriptions = describe_items(items)
    names = _gather_fingerprints(call, [list(descriptions)])
    if bool((names != names[0]).any()):
        groups = _gather_rows(call, items, descriptions)
        if not all(rows["optimizer"] for rows, _ in groups):  # the optimizer is unknown before the first step
            groups = [({**rows, "optimizer": {}}, ranks) for rows, ranks in groups]
        found = {kind: {name for rows, _ in groups for name in rows[kind]} for kind in KINDS}
        return groups, {kind: len(of_kind) for kind, of_kind in found.items()}, count_holders(found["optimizer"])
    fingerprints = _gather_fingerprints(call, descriptions.values())
    differs = (fingerprints != fingerprints[0]).any(dim=0).tolist()
    differing = [item for item, is_differing in zip(items, differs, strict=True) if is_differing]
    entry_counts = count_holders(item.name for item in items if item.kind == "optimizer")
    return _gather_rows(call, differing, descriptions), _count_kinds(items), entry_counts


def _gather_fingerprints(call: Call, values: Iterable[object]) -> torch.Tensor:
    """Collective: the fingerprint of each value, ``[ranks, values]``."""
    return call.gather(torch.tensor([fingerprint(json.dumps(value).encode()) for value in values], device="cpu"))


def _gather_rows(call: Call, items: Sequence[StateItem], descriptions: Mapping[str, str]) -> Groups:
    """Collective."""
    own = {kind: {item.name: descriptions[item.name] for item in items if item.kind == kind} for kind in KINDS}
    return call.gather_distinct(own)


def _find_differences(groups: Groups, left_out: Collection[int]) -> list[ReplicaDifference]:
    """Differences by kind. Settings come first: a learning rate explains more than a thousand weights."""
    compared = [(rows, [rank for rank in ranks if rank not in left_out]) for rows, ranks in groups]
    found = [
        ReplicaDifference(item.name, item.holders, kind)
        for kind in KINDS
        for item in compare_groups([(rows[kind], ranks) for rows, ranks in compared if ranks]).differences
    ]
    return sorted(found, key=lambda item: not item.is_setting)


def _attribute(
    call: Call,
    differences: Sequence[ReplicaDifference],
    compared: Mapping[str, int],
    snapshot: Callable[[], StepDigests] | None,
) -> Verdict:
    """From the digests of the phases, or else from the kinds that differ now. Collective with a history."""
    kinds = {item.kind for item in differences}
    digests = [] if snapshot is None else [StepDigests(**row) for row in call.gather_objects(asdict(snapshot()))]
    found = _attribute_items(differences, digests)
    if digests and (call.operation is Operation.ALL_REDUCE or "parameters" in kinds):
        verdict = attribute_digests(digests, call.group_state.calls[Operation.ALL_REDUCE])
        if verdict.phase:
            return add_evidence(verdict, found.implicated, STATE_CHANGED)
    return attribute_kinds(kinds, [kind for kind in KINDS if compared[kind]], found)


def _attribute_items(differences: Sequence[ReplicaDifference], digests: Sequence[StepDigests]) -> Verdict:
    # The minority of any difference: several ranks may be at fault.
    minority = sorted({rank for item in differences for rank in item.suspects})
    sides = "; ".join(list(dict.fromkeys(item.sides for item in differences))[:3])
    # The evidence is about optimizer state, and counts only if optimizer state differs now.
    has_state = any(item.kind == "optimizer" and not item.is_setting for item in differences)
    has_evidence = [of_rank.state_changed_after for of_rank in digests] if has_state else []
    return attribute(sides, minority, has_evidence, STATE_CHANGED)


def _compare_elements(
    call: Call, own: torch.Tensor, majority: Sequence[int], ranks: Collection[int]
) -> dict[int, ElementDifference]:
    """Collective: the difference of each of ``ranks`` from the first rank of ``majority``, the largest group."""
    reference = own.detach().resolve_conj().resolve_neg().contiguous().clone()
    call.broadcast(reference.view(-1), majority[0])
    found = None if call.groups.rank in majority else _try_compare(own, reference)
    gathered = call.gather_objects(found and found.to_json())
    return {
        rank: ElementDifference.from_json(item)
        for rank, item in enumerate(gathered)
        if item is not None and rank in ranks
    }


def _try_compare(own: torch.Tensor, reference: torch.Tensor) -> ElementDifference | None:
    try:
        return compare_elements(own, reference)
    except Exception:  # noqa: BLE001 - the other ranks wait; the report goes on without the elements
        return None

"""The words of a report: the evidence, the place, the cause, the settings that differ, and the next step. Pure.

Both sides of a cross-check have the same batch and, on one rank, the same code and settings. Fewer causes are possible
than between two traces.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp._compare import MISSING, Difference, compare_rows, name_ranks
from legacy_ddp._settings import Settings
from legacy_ddp._text import shorten
from legacy_ddp.debug._cross_check.verdict import RING_RUNS, CrossCheckReport, Place, Verdict
from legacy_ddp.debug._operations.describe import Labels, details, numbers, summary
from legacy_ddp.debug._operations.explain import (
    CROSS_CHECK,
    Explanation,
    Facts,
    Row,
    always,
    explain,
    explain_by,
    has_unknown_source,
)
from legacy_ddp.debug._operations.operation import OperationDifference
from legacy_ddp.debug._trace.environment import facts_of

MODULE, RUN = "module ", "run "  # beginnings of names
_FEW = 3  # modules with a line of their own
_Holders = tuple[tuple[str, tuple[int, ...]], ...]
# They differ between ranks as they should, or have no influence on a result.
_OWN_FACTS = frozenset({"argv", "checks", "commit", "devices", "host", "pid", "seed", "transport"})
_VALUE_COLUMNS = 60


class RankSettings(NamedTuple):
    """The settings of a rank. ``values``: as text by name. ``numbers``: of the rank itself, by the way of counting."""

    values: Mapping[str, str]
    numbers: Mapping[str, int]


def settings_of(
    group: dist.ProcessGroup, settings: Settings, module: nn.Module, held: Mapping[str, Any]
) -> RankSettings:
    """The settings of this rank. ``held``: the values inside of the user's function."""
    devices = {parameter.device for parameter in module.parameters()}
    facts = facts_of(group, settings, devices, (), "", None)
    numbers = {
        name: shorten(repr(value), _VALUE_COLUMNS)
        for name, value in held.items()
        if not isinstance(value, torch.Tensor)
    }
    values = {
        **{name: fact for name, fact in facts.items() if name not in _OWN_FACTS},
        **{f"autocast of {kind}": _autocast(kind) for kind in sorted({"cpu", *(device.type for device in devices)})},
        **{f"{MODULE}{name!r}": "training" if child.training else "eval" for name, child in module.named_modules()},
        **numbers,
    }
    return RankSettings(values, _numbers_of_rank(group))


def _numbers_of_rank(group: dist.ProcessGroup) -> dict[str, int]:
    """The number of this rank in the group, in the job and, where a launcher such as torchrun tells it, on its host."""
    numbers = {"rank": dist.get_rank(group), "global rank": dist.get_rank()}
    local = os.environ.get("LOCAL_RANK", "")
    return {**numbers, "local rank": int(local)} if local.isdecimal() else numbers


def _autocast(kind: str) -> str:
    if not torch.is_autocast_enabled(kind):
        return "off"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def differing_settings(rows: Sequence[RankSettings]) -> tuple[Difference, ...]:
    """The settings that differ between ranks. ``rows``: of each rank.

    A value in the user's function that is on every rank the rank's own number differs as it should: it is left out.
    """
    differences = compare_rows([row.values for row in rows]).differences
    return tuple(item for item in differences if not (item.name.startswith(RUN) and _is_own_number(item.name, rows)))


def _is_own_number(name: str, rows: Sequence[RankSettings]) -> bool:
    """Whether the value is on all ranks the rank's number in one way of counting, as an int or as text."""
    return any(
        all(row.values.get(name, "").strip("'") == str(row.numbers.get(way)) for row in rows) for way in rows[0].numbers
    )


def describe_settings(differences: Sequence[Difference]) -> Iterator[str]:
    """A line for each setting; many modules with equal values on the same ranks have one line together."""
    groups: dict[tuple[_Holders, str], list[str]] = {}
    for item in differences:
        kind = MODULE if item.name.startswith(MODULE) else item.name
        groups.setdefault((item.holders, kind), []).append(item.name)
    for (holders, _), names in groups.items():
        for name in names if len(names) <= _FEW else [_name_modules(names)]:
            yield f"{name_setting(name)}: {_values(holders)}"


def name_setting(name: str) -> str:
    """The name of a setting, for the root module in words."""
    return "the model" if name == f"{MODULE}{''!r}" else name


def _name_modules(names: Sequence[str]) -> str:
    paths = [name.removeprefix(MODULE).strip("'") for name in names]
    if "" in paths:
        return f"the model and {len(paths) - 1} modules inside"
    prefix = _common_prefix(paths)
    return f"{len(paths)} modules of {prefix!r}" if prefix else f"{len(paths)} modules, first {paths[0]!r}"


def _common_prefix(paths: Sequence[str]) -> str:
    """The path of the innermost module around all modules of ``paths``; empty for the model."""
    common = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _values(holders: _Holders) -> str:
    """The values of all ranks, by ascending ranks."""
    sides = sorted(holders, key=lambda side: min(side[1]))
    return "; ".join(f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in sides)


def report_of(
    call: str,
    size: int,
    compared: int,
    batch: int,
    verdict: Verdict,
    differing: Sequence[str],
    place: Place,
    settings: Sequence[Difference],
) -> CrossCheckReport:
    """The report after a difference. ``compared``: the number of results; ``differing``: names of results."""
    labels = _labels(verdict)
    cause = explain_by(_CAUSES, _Case(verdict, place, labels, _facts(verdict, settings)))
    operation = place.difference.operation if place.difference else None
    return CrossCheckReport(
        call=call,
        size=size,
        verdict=verdict.kind,
        ranks=verdict.ranks,
        batch=batch,
        differing=tuple(differing),
        module=operation.module if operation else "",
        operation=operation.name if operation else "",
        stage=operation.stage if operation else "",
        elements=place.elements,
        settings=tuple(describe_settings(settings)),
        compared=compared,
        who=_who(verdict, batch, size),
        place=tuple(_where(place, verdict, labels, cause)),
        next_step=cause.next_step,
    )


def _labels(verdict: Verdict) -> Labels:
    odd, reference = verdict.odd, verdict.reference
    if odd is None or reference is None:
        return "A", "B"
    if odd.rank != reference.rank:
        return name_ranks(verdict.group_of(odd)), name_ranks(verdict.group_of(reference))
    return ("an earlier run", "a later run") if odd.run in RING_RUNS else ("one run", "the next run")


def _facts(verdict: Verdict, settings: Sequence[Difference]) -> Facts:
    """The settings that differ between the two sides: one value on all ranks of a side, another on all of the other."""
    odd, reference = verdict.odd, verdict.reference
    if odd is None or reference is None or odd.rank == reference.rank:
        return {}
    found = {}
    for item in settings:
        here, there = ({_value(item, rank) for rank in verdict.group_of(side)} for side in (odd, reference))
        if len(here) == len(there) == 1 and here != there:
            found[item.name] = (here.pop(), there.pop())
    return found


def _value(item: Difference, rank: int) -> str:
    return next((value for value, ranks in item.holders if rank in ranks), MISSING)


def _who(verdict: Verdict, batch: int, size: int) -> str:
    """The evidence, from the runs of the examined batch."""
    batches = f"of 2 runs of the batch of rank {batch}"
    if verdict.kind == "nondeterministic":
        stable = sorted({*range(size)} - {*verdict.ranks})
        agree = "agree with themselves" if len(stable) > 1 else "agrees with itself"
        other = f"; {name_ranks(stable)} {agree}" if stable else ""
        places = name_ranks(verdict.ranks) if stable or size == 1 else "every rank"
        return f"the results {batches} differ on {places}{other}"
    runs = f"{batches} on every rank"
    if verdict.kind == "once" and len(verdict.ranks) > 1:
        return f"the first run of every batch differs from the run on the next rank, and no result {runs}"
    if verdict.kind == "once":
        return f"an earlier result of {name_ranks(verdict.ranks)} differs from all results {runs}"
    if not verdict.is_attributed:
        sides = " against ".join(map(name_ranks, verdict.groups))
        return f"{sides}, in both {runs}: no majority, and no rank disagrees with itself"
    agreeing = f"{len(verdict.groups[0])} of {size} ranks agree"
    return f"{name_ranks(verdict.ranks)} against {name_ranks(verdict.groups[0])} ({agreeing}), in both {runs}"


def _where(place: Place, verdict: Verdict, labels: Labels, cause: Explanation) -> Iterator[str]:
    """Where, why, and the reason for missing elements."""
    found = place.difference
    if found is None:
        reason = f"all {place.count:,} captured operations agree, and no operation of another thread is captured"
        if place.note:
            reason = place.note
        elif verdict.kind == "once" and not place.count:
            reason = "operations were not captured in the first run; operations=True captures them"
        yield f"where: not known: {reason}"
        if verdict.kind == "once" and cause.meaning:
            yield f"why: {cause.meaning}"
        return
    a, b = found.numbers
    number = f"{numbers((a, b), labels)}{f' of {place.last:,}' if a and a == b else ''}"
    sides = f"; {labels[0]} (here) against {labels[1]} (there)" if place.elements else ""
    yield f"where: {summary(found, labels)}, {number}{sides}"
    yield f"why: {cause.meaning}"
    yield from (text for text in details(found, labels) if not text.startswith(("input", "output")))  # digests
    if place.note:
        yield place.note


@dataclass(frozen=True)
class _Case:
    """A verdict with its place, and the attributes that the rows ask for.

    ``facts``: the settings with other values on the two compared ranks.
    """

    verdict: Verdict
    place: Place
    labels: Labels
    facts: Facts

    @property
    def kind(self) -> str:
        return self.verdict.kind

    @property
    def found(self) -> OperationDifference | None:
        return self.place.difference

    @property
    def has_other_generator(self) -> bool:
        found = self.found
        return bool(found and found.kind == "output" and found.a[0].generator != found.b[0].generator)

    @property
    def is_other_call(self) -> bool:
        """Whether the code of two runs made other calls: other operations, or other arguments of one operation."""
        found = self.found
        is_other = found and (found.kind in ("sequence", "order", "form") or found.a[0].settings != found.b[0].settings)
        return bool(is_other)

    @property
    def of_operation(self) -> Explanation:
        """The explanation of the different operation. Results differ: operations of only one side may be the cause."""
        if self.found is None:
            return Explanation("", "")
        has_no_effect = self.found.has_effect is False
        return explain(replace(self.found, tensors_differ=has_no_effect), self.labels, self.facts)

    @property
    def between_ranks(self) -> Explanation:
        found = self.of_operation
        # After the cross-check that has just been made, another cross-check is no next step.
        if self.found is None or found.next_step.endswith(CROSS_CHECK):
            return explain_by([_OTHER_KERNEL], self)
        return Explanation(found.meaning, found.next_step.replace("diff again", "check again"))

    @property
    def held(self) -> str:
        """The first value in the user's function that differs."""
        return next((name for name in self.facts if name.startswith(RUN)), "")

    @property
    def module(self) -> str:
        """The first module in another mode."""
        return next((name_setting(name) for name in self.facts if name.startswith(MODULE)), "")


_OTHER_KERNEL = Row(
    always,
    "the same inputs give other outputs on {c.labels[0]} than on {c.labels[1]}, in every run: another library or "
    "extension, a kernel that is wrong on one side, or hardware",
    "compare libraries, extensions and hardware of these ranks; start the job again with the rank on another device, "
    "and see whether the difference stays with the device",
)
_FIND_UNSTABLE = (
    "torch.use_deterministic_algorithms(True) names the operations of torch that are not deterministic; after it only "
    "custom operations, threads and hardware remain"
)

_CAUSES = (
    Row(
        lambda c: c.kind == "once" and len(c.verdict.ranks) > 1,
        "state of a first run: a warm-up, a lazy cache, a counter",
        "run one batch before the first cross-check, and keep state in buffers",
    ),
    Row(
        lambda c: c.found and has_unknown_source(c.found),
        "both runs had the same batch: state kept outside of parameters and buffers (an attribute of a module, a value "
        "inside of an object that run holds), data that run reads itself, or a kernel that is not recorded "
        "(torch.compile)",
        "keep such state in buffers, or take it out of run(); check again without torch.compile",
    ),
    Row(
        lambda c: c.has_other_generator,
        "random numbers from another place of the generator: both runs began with equal states, so that one side set a "
        "seed, drew more, or has a generator of its own",
        "look for seeds and draws inside of run and of the model",
    ),
    Row(
        lambda c: c.kind == "differs" and c.place.is_intermittent,
        "the same inputs gave other outputs in two runs, and equal outputs in a third: a kernel that is wrong at "
        "times, memory or hardware",
        "start the job again with the rank on another device, and see whether the difference stays with the device",
    ),
    Row(
        lambda c: c.kind == "differs" and c.held,
        "{c.between_ranks.meaning}",
        "if the loss depends on {c.held}, make it equal on all ranks, or pass it in the batch",
    ),
    Row(
        lambda c: c.kind == "differs" and c.module,
        "{c.between_ranks.meaning}",
        "give {c.module} the same mode on all ranks, with train() or eval()",
    ),
    Row(lambda c: c.kind == "differs", "{c.between_ranks.meaning}", "{c.between_ranks.next_step}"),
    Row(
        lambda c: c.is_other_call,
        "state in Python that a run changes: a counter, a cache, an attribute of a module",
        "keep such state in buffers, or take it out of run()",
    ),
    Row(
        lambda c: c.kind == "once" and c.found,
        "{c.of_operation.meaning}",
        "cross-check more often; a single event is memory or hardware, or a kernel that is rarely wrong",
    ),
    Row(
        lambda c: c.kind == "once",
        "",
        "cross-check more often with operations=True, to name the operation of the next time; a single event is state "
        "of a first run in Python, memory or hardware, or a kernel that is rarely wrong",
    ),
    Row(
        lambda c: c.found is None or c.found.kind == "output",
        "the same inputs gave other outputs in two runs on one rank: a kernel that is not deterministic (atomic "
        "additions, threads), or memory or hardware",
        _FIND_UNSTABLE,
    ),
    Row(always, "{c.of_operation.meaning}", _FIND_UNSTABLE),
)

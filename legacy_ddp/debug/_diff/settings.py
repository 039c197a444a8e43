"""Settings of the optimizer that differ up to a step: every name, with its steps and ranks."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from legacy_ddp._text import MISSING, group_ranks, name_ranks
from legacy_ddp.debug._diff.locations import SETTINGS
from legacy_ddp.debug._diff.pair import ABSENT, Entry, EntryDifference, Pair, entry_differences
from legacy_ddp.debug._diff.result import Cause, Divergence
from legacy_ddp.debug._trace.records import NO_OPTIMIZER, PHASES
from legacy_ddp.debug._trace.run import span

# Another implementation of the same step may differ in rounding.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
# Schedulers of torch write these to a parameter group, and no optimizer of torch reads them.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
TAKEN = "taken"  # of a step of an optimizer
_NAME = re.compile(r"((?:optimizer \d+: )?)(.*) of (parameter group \d+)", re.DOTALL)
_OF_ONE_SIDE = "rest"  # in place of the keys that one side alone has


def _parts(name: str) -> tuple[str, str, str]:
    """``optimizer 1: `` or nothing, the key, and the parameter group."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2], found[3]) if found else ("", name, "")


def is_apart(name: str) -> bool:
    """Whether a setting changes the results of a step by rounding at most."""
    return _parts(name)[1] in _IMPLEMENTATIONS | _OF_SCHEDULERS


def chooses_implementation(name: str) -> bool:
    return _parts(name)[1] in _IMPLEMENTATIONS


@dataclass
class _OnRank:
    """A difference on one rank.

    ``first``, ``last``: its steps. ``count``: their number. ``span``, ``compared``: the number of compared steps from
    ``first`` to ``last``, and to the last compared one. ``value``: at ``first``. ``present``: at the step of the first
    different tensors, None if there is no difference there.
    """

    first: int
    value: EntryDifference
    last: int = 0
    count: int = 0
    span: int = 0
    compared: int = 0
    present: EntryDifference | None = None

    @property
    def when(self) -> str:
        if self.count == self.compared:
            return f"from step {self.first}"
        steps = span((self.first, self.last))
        return f"in {steps}" if self.count == self.span else f"in {self.count} of {steps}"


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs, by rank. ``is_step``: instead, a step that an optimizer took on one side alone."""

    name: str
    ranks: Mapping[int, _OnRank]
    is_step: bool = False

    @property
    def first(self) -> int:
        """The first step in which it differs."""
        return min(on.first for on in self.ranks.values())

    @property
    def when(self) -> str:
        """``from step 3``, ``in steps 3-5``; the first step alone if ranks differ in their steps."""
        texts = {on.when for on in self.ranks.values()}
        return texts.pop() if len(texts) == 1 and not self.is_step else f"first in step {self.first}"

    @property
    def is_apart(self) -> bool:
        return is_apart(self.name)

    @property
    def is_of_one_side(self) -> bool:
        """Whether one side alone has the setting, so that its values cannot be compared."""
        values = [entry.value for on in self.ranks.values() for entry in (on.value.a, on.value.b)]
        return None in values or _parts(self.name)[1] == _OF_ONE_SIDE

    @property
    def present(self) -> dict[int, EntryDifference]:
        """The values at the step of the first different tensors, on the ranks with a difference there."""
        return {rank: on.present for rank, on in self.ranks.items() if on.present is not None}


class SettingDifferences:
    """The settings that differ in some steps, and the steps of an optimizer that one side alone took.

    ``steps``: to compare, ascending. ``at``: the step of the first different tensors, None without any. A pair is two
    runs on a rank, or rank 0 of a run with another rank. Settings are compared where both sides recorded them: the
    start of a run has none, and neither has a call without a step of the optimizer after it.
    """

    def __init__(self, steps: Sequence[int], at: int | None) -> None:
        self._steps, self._at = steps, at
        self._settings: dict[str, dict[int, _OnRank]] = {}
        self._optimizer_steps: dict[str, dict[int, _OnRank]] = {}

    @staticmethod
    def has_any(pair: Pair) -> bool:
        """Whether a step may have such a difference. Parses nothing."""
        starts = _starts(pair)
        digests = ((step, pair.a.digest(step, "settings"), pair.b.digest(step, "settings")) for step in pair.steps)
        return any(a != b and not (step in starts and None in (a, b)) for step, a, b in digests)

    def add_rank(self, rank: int, pair: Pair) -> None:
        """Compare the settings of a pair. Parses a short line per file and step where they differ."""
        for step in self._steps:
            digests = pair.a.digest(step, "settings"), pair.b.digest(step, "settings")
            a, b = pair.entries(step, "settings") if digests[0] != digests[1] else ({}, {})
            optimizer_steps = _optimizer_steps(pair, step, a, b)
            if None not in digests:
                settings = [item for item in _settings(a, b) if _step_of(item.name) not in optimizer_steps]
                self._add(self._settings, rank, step, settings)
            if None not in digests or optimizer_steps:
                self._add(self._optimizer_steps, rank, step, [*optimizer_steps.values()])

    def is_compared(self, step: int) -> bool:
        return step in self._steps

    @property
    def settings(self) -> tuple[SettingDifference, ...]:
        """The settings, in the order of their first steps; of one step, in the order of names."""
        found = [SettingDifference(name, ranks) for name, ranks in self._settings.items()]
        return tuple(sorted(found, key=lambda item: item.first))

    @property
    def optimizer_steps(self) -> tuple[SettingDifference, ...]:
        return tuple(SettingDifference(name, ranks, is_step=True) for name, ranks in self._optimizer_steps.items())

    def _add(
        self, found: dict[str, dict[int, _OnRank]], rank: int, step: int, differences: Sequence[EntryDifference]
    ) -> None:
        for item in differences:
            on = found.setdefault(item.name, {}).setdefault(rank, _OnRank(step, item))
            on.last, on.count, on.span = step, on.count + 1, on.compared + 1
            if step == self._at:
                on.present = item
        for ranks in found.values():
            if rank in ranks:
                ranks[rank].compared += 1


def _starts(pair: Pair) -> set[int]:
    return {trace.environment.first_step - 1 for trace in (pair.a, pair.b)}


def _settings(a: dict[str, Entry], b: dict[str, Entry]) -> list[EntryDifference]:
    """The settings that differ; those of a parameter group that one side alone has are joined."""
    found: list[EntryDifference] = []
    of_one_side: dict[str, list[EntryDifference]] = {}
    for item in entry_differences(a, b):
        optimizer, _, group = _parts(item.name)
        joined = of_one_side.setdefault(f"{optimizer}{_OF_ONE_SIDE} of {group}", [])
        (joined if None in (item.a.value, item.b.value) else found).append(item)
    for name, items in of_one_side.items():
        if all(is_apart(item.name) for item in items):
            found += items
        else:
            sides = [(item.name, item.a.value) for item in items], [(item.name, item.b.value) for item in items]
            found.append(EntryDifference(name, *map(_joined, sides)))
    return found


def _joined(side: Sequence[tuple[str, str | None]]) -> Entry:
    """``momentum 0.9, nesterov False``."""
    texts = [f"{_parts(name)[1]} {value}" for name, value in side if value is not None]
    return Entry("", ", ".join(texts), None, 0) if texts else ABSENT


def _optimizer_steps(pair: Pair, step: int, a: dict[str, Entry], b: dict[str, Entry]) -> dict[str, EntryDifference]:
    """The optimizers with settings on one side alone, although both runs recorded the same optimizers there."""
    traces = pair.a, pair.b
    optimizers = {trace.environment.facts.get("optimizer", NO_OPTIMIZER) for trace in traces}
    is_recorded = all(trace.digest(step, "parameters") is not None for trace in traces)
    if step in _starts(pair) or not is_recorded or len(optimizers) > 1 or NO_OPTIMIZER in optimizers:
        return {}
    taken = [dict.fromkeys(map(_step_of, side)) for side in (a, b)]
    return {
        name: EntryDifference(name, *(Entry("", TAKEN if name in side else "not taken", None, 0) for side in taken))
        for name in taken[0] | taken[1]
        if (name in taken[0]) != (name in taken[1])
    }


def _step_of(name: str) -> str:
    """The step that used the setting of this name: ``step of optimizer 1``."""
    return f"step of {_parts(name)[0].removesuffix(': ') or 'the optimizer'}"


def explaining(step: int, ranks: Collection[int], settings: Sequence[SettingDifference]) -> list[Divergence]:
    """The settings that may explain why tensors of two runs differ after a step, and others that differ in this step.

    Empty if no setting explains it: one that both runs have, that acts on a step, and that differs in this step on one
    of the ``ranks`` with different tensors. The likeliest come first: those that differ from this step on.
    """

    def unlikeliness(item: SettingDifference) -> tuple[bool, bool, bool]:
        return item.is_apart, item.is_of_one_side, item.first < step

    there = sorted((item for item in settings if {*item.present} & {*ranks}), key=unlikeliness)
    if not there or there[0].is_apart or there[0].is_of_one_side:
        return []
    found = []
    for item in there:
        value = next(iter(item.present.values()))
        sides = value.a.side("A"), value.b.side("B")
        found.append(Divergence(step, "settings", item.name, value.kind, tuple(item.present), sides))
    return found


def setting_causes(
    found: SettingDifferences, first: Divergence | None, cause_of: Callable[[SettingDifference], Cause]
) -> tuple[list[Cause], list[Cause], list[Cause]]:
    """Settings that may explain the first difference, without its own name; other settings; and settings apart."""
    likely: list[Cause] = []
    others: list[Cause] = []
    apart: list[Cause] = []
    # A step uses its settings after its gradients.
    are_late = first is not None and PHASES.index(first.phase) < SETTINGS and found.is_compared(first.step - 1)
    for item in (*found.optimizer_steps, *found.settings):
        if first and (item.name, item.first) == (first.name, first.step):
            continue
        cause = cause_of(item)
        if first and are_late and item.first == first.step:
            cause = replace(cause, where=f"{cause.where}, after the first difference")
        is_likely = item.present and not item.is_of_one_side and not are_late
        (apart if item.is_apart else likely if is_likely else others).append(cause)
    return likely, others, apart


def cause_of_runs(item: SettingDifference, *, ranks: int) -> Cause:
    """A difference between two runs, with the values at its first step. ``ranks``: the number of compared ranks."""
    rank, on = next(iter(item.ranks.items()))
    where = [
        item.when + (f" on {name_ranks(item.ranks)}" if len(item.ranks) < ranks else ""),
        *[f"shown for rank {rank}"] * (len({on.value for on in item.ranks.values()}) > 1),
    ]
    sides = ("A", on.value.a.value or MISSING), ("B", on.value.b.value or MISSING)
    return Cause(item.name, sides, ", ".join(where))


def cause_of_ranks(item: SettingDifference, *, world_size: int) -> Cause:
    """A difference between the ranks of one run, with the values at its first step."""
    odd = {rank: on.value for rank, on in item.ranks.items() if on.first == item.first}
    usual = next(iter(odd.values())).a.value
    groups = group_ranks([odd[rank].b.value if rank in odd else usual for rank in range(world_size)])
    return Cause(item.name, tuple((name_ranks(ranks), value or MISSING) for value, ranks in groups), item.when)

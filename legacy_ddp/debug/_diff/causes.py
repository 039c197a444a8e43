"""Differences around the training as possible causes: environment, data, amounts, metrics and settings."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from legacy_ddp._text import MISSING, group_ranks, name_ranks, plain
from legacy_ddp.debug._diff.pair import ABSENT, SETTINGS, Entry, EntryDifference, Pair, entry_differences
from legacy_ddp.debug._diff.result import Cause, Divergence, MetricDifference
from legacy_ddp.debug._trace.read import RankTrace, span
from legacy_ddp.debug._trace.records import NO_OPTIMIZER, PHASES, CallFacts, Environment

EXCLUDED = ("host", "pid", "started")
# Likeliest first. Unlisted facts come next, and the least likely facts last.
_LIKELIEST = (
    *("seed", "commit", "torch", "legacy_ddp", "reproducible", "reduce_dtype", "default dtype", "devices"),
    *("backend", "transport", "threads", "float32 matmul precision", "deterministic algorithms", "cudnn.benchmark"),
    *("cudnn.deterministic", "CUBLAS_WORKSPACE_CONFIG", "mkldnn", "cpu", "cuda", "cudnn", "nccl", "buffer_size"),
    *("optimizer", "ignore", "interop threads"),
)
_LEAST_LIKELY = ("argv", "python", "platform", "gradient_as_bucket_view", "checks")
SHAPE, DATA, MICRO_BATCHES, FORWARDS = "micro-batch shape", "data", "micro-batches", "forward passes"
SAMPLE_SIZE, TOOK_PART, GENERATORS = "sample_size", "took part", "random generators"
TOTALS = "micro-batches of all ranks", "sample_size of all ranks"
# Likeliest first.
_ORDER = (SHAPE, DATA, MICRO_BATCHES, FORWARDS, SAMPLE_SIZE, TOOK_PART, GENERATORS)


def _two_sides(what: str, a: object, b: object, where: Sequence[str] = ()) -> Cause:
    return Cause(what, (("A", str(a)), ("B", str(b))), ", ".join(where))


def by_likelihood(facts: Sequence[str]) -> list[str]:
    """The distinct facts, likeliest cause first, without the excluded facts."""

    def position(fact: str) -> int:
        if fact in _LIKELIEST:
            return _LIKELIEST.index(fact)
        return len(_LIKELIEST) + (1 + _LEAST_LIKELY.index(fact) if fact in _LEAST_LIKELY else 0)

    return sorted((fact for fact in dict.fromkeys(facts) if fact not in EXCLUDED), key=position)


def causes_by_rank(pairs: Sequence[tuple[Environment, Environment]]) -> list[Cause]:
    """Facts that differ between rank r of A and rank r of B; ``pairs`` are in rank order."""
    causes = []
    for fact in by_likelihood([fact for a, b in pairs for fact in (*a.facts, *b.facts)]):
        values = {a.rank: (a.facts.get(fact, MISSING), b.facts.get(fact, MISSING)) for a, b in pairs}
        differing = {rank: sides for rank, sides in values.items() if sides[0] != sides[1]}
        if differing:
            where = [] if len(differing) == len(values) else [f"on {name_ranks(differing)}"]
            causes.append(_on_ranks(fact, differing, where))
    return causes


def causes_by_run(a: Sequence[Environment], b: Sequence[Environment]) -> tuple[list[Cause], list[str]]:
    """Facts with one value on all ranks of A and another on all ranks of B; and facts with several values in a run."""
    causes, mixed = [], []
    for fact in by_likelihood([fact for environment in (*a, *b) for fact in environment.facts]):
        left, right = (list({item.facts.get(fact, MISSING): None for item in run}) for run in (a, b))
        if len(left) > 1 or len(right) > 1:
            mixed.append(fact)
        elif left != right:
            causes.append(_two_sides(fact, left[0], right[0]))
    return [_two_sides("world size", len(a), len(b)), *causes], mixed


def _on_ranks(what: str, sides: Mapping[int, tuple[str, str]], where: Sequence[str]) -> Cause:
    """The values of A and B on the first of the ranks. Names that rank if other ranks have other values."""
    rank, (left, right) = next(iter(sides.items()))
    shown = [f"shown for rank {rank}"] if len({*sides.values()}) > 1 else []
    return _two_sides(what, left, right, [*where, *shown])


class _CallDifference(NamedTuple):
    step: int
    a: str
    b: str
    detail: str


class CallDifferences:
    """The first difference of each kind, on every rank. Ranks are added in ascending order."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, _CallDifference]] = {}
        self._inputs_known: dict[int, bool] = {}

    def add_rank(self, rank: int, pair: Pair, until: int | None) -> None:
        """Compare the calls of a rank up to the step ``until``. Parses one short line per step and file."""
        for step in pair.steps:
            if until is not None and step > until:
                break
            a, b = pair.a.call(step), pair.b.call(step)
            if a is None or b is None:
                self._inputs_known.pop(rank, None)
                continue
            self._inputs_known[rank] = all(call.inputs_complete and _counts_micro_batches(call) for call in (a, b))
            for kind, left, right, detail in _differences(a, b):
                self._found.setdefault(kind, {}).setdefault(rank, _CallDifference(step, left, right, detail))

    def causes(self, until: int) -> list[Cause]:
        """The differences up to the step ``until``, likeliest first, each with its first step."""
        causes = []
        for kind in _ORDER:
            found = self._found.get(kind, {})
            step = min((item.step for item in found.values()), default=until + 1)
            if step <= until:
                first = {rank: item for rank, item in found.items() if item.step == step}
                detail = next(iter(first.values())).detail
                where = [f"first at step {step} on {name_ranks(first)}", *filter(None, [detail])]
                causes.append(_on_ranks(kind, {rank: (item.a, item.b) for rank, item in first.items()}, where))
        return causes

    def inputs_known(self, rank: int) -> bool:
        """Whether both traces hold all inputs of the forward passes in the last compared step of a rank."""
        return self._inputs_known.get(rank, False)

    def call_known(self, rank: int) -> bool:
        """Whether both traces hold the call in the last compared step of a rank."""
        return rank in self._inputs_known


@dataclass
class StepTotals:
    """Sums over all ranks of a run in one step. ``inputs``: in rank order, None if some are unknown."""

    micro_batches: int = 0
    sample_size: int = 0
    ranks: int = 0
    inputs: list[tuple[str, str]] | None = field(default_factory=list)


def step_totals(traces: Iterator[RankTrace], until: int, world_size: int) -> dict[int, StepTotals]:
    """The totals of each step up to ``until`` that all ranks recorded."""
    totals: dict[int, StepTotals] = {}
    for trace in traces:
        for step in trace.steps:
            if step <= until and (call := trace.call(step)):
                total = totals.setdefault(step, StepTotals())
                total.micro_batches += call.micro_batches
                total.sample_size += call.sample_size or 0
                total.ranks += 1
                known = total.inputs is not None and call.inputs_complete
                total.inputs = [*(total.inputs or ()), *call.inputs] if known else None
    return {step: total for step, total in totals.items() if total.ranks == world_size}


def total_causes(a: dict[int, StepTotals], b: dict[int, StepTotals], *, reproducible: bool) -> list[Cause]:
    common = sorted({*a} & {*b})
    # Only in reproducible runs the order of inputs over all ranks has a meaning.
    causes = list(_total_input_cause(a, b, common)) if reproducible else []
    for kind, attribute in zip(TOTALS, ("micro_batches", "sample_size"), strict=True):
        amounts = ((step, getattr(a[step], attribute), getattr(b[step], attribute)) for step in common)
        if first := next((amount for amount in amounts if amount[1] != amount[2]), None):
            step, left, right = first
            causes.append(_two_sides(kind, left, right, [f"first at step {step}"]))
    return causes


def _total_input_cause(a: dict[int, StepTotals], b: dict[int, StepTotals], steps: Sequence[int]) -> Iterator[Cause]:
    for step in steps:
        for index, (left, right) in enumerate(zip(a[step].inputs or [], b[step].inputs or [], strict=False)):
            if left != right:
                where = [f"first at step {step}, input {index + 1} of those of all ranks"]
                yield _two_sides(*_input_difference(left, right), where)
                return


def _differences(a: CallFacts, b: CallFacts) -> Iterator[tuple[str, str, str, str]]:
    """Kind, value in A, value in B, and detail of every difference."""
    yield from _first_input_difference(a, b)
    if _counts_micro_batches(a) and _counts_micro_batches(b):
        if a.micro_batches != b.micro_batches:
            yield MICRO_BATCHES, str(a.micro_batches), str(b.micro_batches), ""
        elif a.forwards != b.forwards:
            yield FORWARDS, str(a.forwards), str(b.forwards), ""
    if a.sample_size != b.sample_size:
        yield SAMPLE_SIZE, str(a.sample_size), str(b.sample_size), ""
    if a.took_part != b.took_part:
        yield TOOK_PART, "yes" if a.took_part else "no", "yes" if b.took_part else "no", ""
    if a.generators != b.generators:
        yield GENERATORS, a.generators, b.generators, ""


def _first_input_difference(a: CallFacts, b: CallFacts) -> Iterator[tuple[str, str, str, str]]:
    if not a.inputs or not b.inputs:  # not recorded, or no forward pass
        return
    common = min(len(a.inputs), len(b.inputs))
    for index, (left, right) in enumerate(zip_longest(a.inputs, b.inputs, fillvalue=(MISSING, ""))):
        if index >= common and a.forwards != b.forwards:
            return
        if left != right:
            yield *_input_difference(left, right), _input_position(index, a, b)
            return


def _input_difference(a: tuple[str, str], b: tuple[str, str]) -> tuple[str, str, str]:
    """``SHAPE`` with both shapes, or ``DATA`` with shapes and digests."""
    return (SHAPE, a[0], b[0]) if a[0] != b[0] else (DATA, " ".join(a), " ".join(b))


def _counts_micro_batches(call: CallFacts) -> bool:
    return call.micro_batches > 0 or not call.took_part  # a call for a plain module takes part, and counts none


def _input_position(index: int, a: CallFacts, b: CallFacts) -> str:
    """``forward pass 2 of 3``; ``forward pass 2`` if A and B have other numbers of forward passes."""
    of_all = f" of {a.forwards}" if a.forwards == b.forwards else ""
    if all(len(call.inputs) == call.forwards for call in (a, b)):
        return f"forward pass {index + 1}{of_all}"
    return f"input tensor {index + 1}{of_all} forward passes" if of_all else f"input tensor {index + 1}"


def metric_differences(pair: Pair) -> tuple[MetricDifference, ...]:
    """The first difference of each metric, in the order of the steps. Values are compared exactly; NaN equals NaN.

    One pair of ranks is enough, because all ranks of a run have the same sums. Parses one short line per step and file.
    """
    firsts: dict[str, tuple[int, float | str | None, float | str | None]] = {}
    counts: dict[str, int] = {}
    calls = 0
    for step in pair.steps:
        a, b = pair.a.call(step), pair.b.call(step)
        if a is None or b is None:
            continue
        calls += 1
        for name in dict.fromkeys([*a.metrics, *b.metrics]):
            left, right = a.metrics.get(name), b.metrics.get(name)
            if repr(left) != repr(right):
                firsts.setdefault(name, (step, _plain(left), _plain(right)))
                counts[name] = counts.get(name, 0) + 1
    return tuple(MetricDifference(name, *first, counts[name], calls) for name, first in firsts.items())


def _plain(value: float | None) -> float | str | None:
    return None if value is None else plain(value)


# Another implementation of the same step may differ in rounding.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
# Schedulers of torch write these to a parameter group, and no optimizer of torch reads them.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
TAKEN = "taken"  # of a step of an optimizer
_NAME = re.compile(r"((?:optimizer \d+: )?)(.*) of (parameter group \d+)", re.DOTALL)
_OF_ONE_SIDE = "rest"  # the joined name of the keys that only one side has


def _parts(name: str) -> tuple[str, str, str]:
    """``optimizer 1: `` or an empty text, the key, and the parameter group."""
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

    ``first``, ``last``: the first and the last step with the difference. ``count``: the number of steps with it.
    ``span``: the number of compared steps from ``first`` to ``last``. ``compared``: the same from ``first`` to the last
    compared step. ``value``: at ``first``. ``present``: at the step of the first different tensors, None if there is
    no difference at that step.
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
    """A setting that differs, by rank. ``is_step``: a step that an optimizer took on only one side, not a setting."""

    name: str
    ranks: Mapping[int, _OnRank]
    is_step: bool = False

    @property
    def first(self) -> int:
        return min(on.first for on in self.ranks.values())

    @property
    def when(self) -> str:
        """``from step 3`` or ``in steps 3-5``; ``first in step 3`` if it differs in other steps on other ranks."""
        texts = {on.when for on in self.ranks.values()}
        return texts.pop() if len(texts) == 1 and not self.is_step else f"first in step {self.first}"

    @property
    def is_apart(self) -> bool:
        return is_apart(self.name)

    @property
    def is_of_one_side(self) -> bool:
        """Whether only one side has the setting. Its values cannot be compared then."""
        values = [entry.value for on in self.ranks.values() for entry in (on.value.a, on.value.b)]
        return None in values or _parts(self.name)[1] == _OF_ONE_SIDE

    @property
    def present(self) -> dict[int, EntryDifference]:
        """The values at the step of the first different tensors, on the ranks where they differ at that step."""
        return {rank: on.present for rank, on in self.ranks.items() if on.present is not None}


class SettingDifferences:
    """The settings that differ in some steps, and the steps of an optimizer that only one side took.

    ``steps``: to compare, ascending. ``at``: the step of the first different tensors, None without any. A pair is two
    runs on a rank, or rank 0 of a run and another rank. Settings are compared where both sides recorded them: the
    start of a run has none, and a call has none if no step of the optimizer follows.
    """

    def __init__(self, steps: Sequence[int], at: int | None) -> None:
        self._steps, self._at = steps, at
        self._settings: dict[str, dict[int, _OnRank]] = {}
        self._optimizer_steps: dict[str, dict[int, _OnRank]] = {}

    @staticmethod
    def has_any(pair: Pair) -> bool:
        """Whether a step may have a difference of settings. Parses nothing."""
        starts = pair.starts
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


def _settings(a: dict[str, Entry], b: dict[str, Entry]) -> list[EntryDifference]:
    """The settings that differ. The settings of a parameter group that only one side has are joined to one."""
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
    """The optimizers with settings in this step on only one side, if both sides recorded the same optimizers."""
    traces = pair.a, pair.b
    optimizers = {trace.environment.facts.get("optimizer", NO_OPTIMIZER) for trace in traces}
    is_recorded = all(trace.digest(step, "parameters") is not None for trace in traces)
    if step in pair.starts or not is_recorded or len(optimizers) > 1 or NO_OPTIMIZER in optimizers:
        return {}
    taken = [dict.fromkeys(map(_step_of, side)) for side in (a, b)]
    return {
        name: EntryDifference(name, *(Entry("", TAKEN if name in side else "not taken", None, 0) for side in taken))
        for name in taken[0] | taken[1]
        if (name in taken[0]) != (name in taken[1])
    }


def _step_of(name: str) -> str:
    """The step of the optimizer of this setting: ``step of optimizer 1``."""
    return f"step of {_parts(name)[0].removesuffix(': ') or 'the optimizer'}"


def explaining(step: int, ranks: Collection[int], settings: Sequence[SettingDifference]) -> list[Divergence]:
    """The settings that differ in a step, as divergences, if one of them explains why tensors differ after the step.

    A setting explains it if both runs have it, if it changes a step by more than rounding, and if it differs on one of
    the ``ranks`` with different tensors. The likeliest come first: those that differ from this step on. Empty if no
    setting explains it.
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
    """Settings that may explain the first difference; other settings; settings that change a step by rounding only.

    None of them is the first difference itself.
    """
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

"""Differences around the training of two runs: environment, data, amounts, generators, metrics. None is a verdict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from legacy_ddp._text import MISSING, name_ranks, plain
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Cause, MetricDifference
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import CallFacts, Environment

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
    """Facts which differ between rank r of A and rank r of B; ``pairs`` are in rank order."""
    causes = []
    for fact in by_likelihood([fact for a, b in pairs for fact in (*a.facts, *b.facts)]):
        values = {a.rank: (a.facts.get(fact, MISSING), b.facts.get(fact, MISSING)) for a, b in pairs}
        differing = {rank: sides for rank, sides in values.items() if sides[0] != sides[1]}
        if differing:
            where = [] if len(differing) == len(values) else [f"on {name_ranks(differing)}"]
            causes.append(_on_ranks(fact, differing, where))
    return causes


def causes_by_run(a: Sequence[Environment], b: Sequence[Environment]) -> tuple[list[Cause], list[str]]:
    """Facts with one value in all of A and another value in all of B; and facts with several values in a run."""
    causes, mixed = [], []
    for fact in by_likelihood([fact for environment in (*a, *b) for fact in environment.facts]):
        left, right = (list({item.facts.get(fact, MISSING): None for item in run}) for run in (a, b))
        if len(left) > 1 or len(right) > 1:
            mixed.append(fact)
        elif left != right:
            causes.append(_two_sides(fact, left[0], right[0]))
    return [_two_sides("world size", len(a), len(b)), *causes], mixed


def _on_ranks(what: str, sides: Mapping[int, tuple[str, str]], where: Sequence[str]) -> Cause:
    """The values of A and B on the first of the ranks, with the rank if other ranks have other values."""
    rank, (left, right) = next(iter(sides.items()))
    shown = [f"shown for rank {rank}"] if len({*sides.values()}) > 1 else []
    return _two_sides(what, left, right, [*where, *shown])


class _CallDifference(NamedTuple):
    """The first step with a difference between two calls, and both values."""

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
        """Compare the calls of a rank up to a step. Parses one short line per step and file."""
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
        """The differences up to a step, each with its first step."""
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
    """Amounts of all ranks of a run in one step. ``inputs``: in rank order, None if some are unknown."""

    micro_batches: int = 0
    sample_size: int = 0
    ranks: int = 0
    inputs: list[tuple[str, str]] | None = field(default_factory=list)


def step_totals(traces: Iterator[RankTrace], until: int, world_size: int) -> dict[int, StepTotals]:
    """The totals of every step up to ``until`` which all ranks recorded."""
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
    """The first differences of totals between runs of different world sizes.

    Inputs are compared only between reproducible runs, because there the order of the ranks' inputs has a meaning.
    """
    common = sorted({*a} & {*b})
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
    """Kind, value in A, value in B and detail of every difference."""
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
    """Whether the number of micro-batches is known: a call for a plain module takes part, and counts none."""
    return call.micro_batches > 0 or not call.took_part


def _input_position(index: int, a: CallFacts, b: CallFacts) -> str:
    """``forward pass 2 of 3``; ``forward pass 2`` with another number of forward passes in A and B."""
    of_all = f" of {a.forwards}" if a.forwards == b.forwards else ""
    if all(len(call.inputs) == call.forwards for call in (a, b)):
        return f"forward pass {index + 1}{of_all}"
    return f"input tensor {index + 1}{of_all} forward passes" if of_all else f"input tensor {index + 1}"


def metric_differences(pair: Pair) -> tuple[MetricDifference, ...]:
    """The first difference of each metric, in the order of the steps. Values are compared exactly; NaN equals NaN.

    Every rank has the same sums: a pair of ranks stands for both runs. Parses one short line per step and file.
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

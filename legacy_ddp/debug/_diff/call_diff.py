"""What differs around the calls of two trainings: data, amounts, random generators? Causes, never a verdict."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Cause
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import CallFacts

SHAPE, DATA, MICRO_BATCHES = "micro-batch shape", "data", "micro-batches"
SAMPLE_SIZE, TOOK_PART, GENERATORS = "sample_size", "took part", "random generators"
ITEMS = "micro-batches of all ranks", "sample_size of all ranks"

# Likeliest first.
_ORDER = (SHAPE, DATA, MICRO_BATCHES, SAMPLE_SIZE, TOOK_PART, GENERATORS)


@dataclass(frozen=True)
class _Seen:
    step: int
    rank: int
    a: str
    b: str
    detail: str = ""


class Calls:
    """The first step at which each thing differs, of every rank; ranks come in ascending order."""

    def __init__(self) -> None:
        self._seen: dict[str, list[_Seen]] = {}
        self._inputs_known: dict[int, bool] = {}

    def take(self, rank: int, pair: Pair, until: int | None) -> None:
        """Compare the calls of one rank, up to a step. Costs parsing one short line a step and file."""
        found: set[str] = set()
        for step in pair.steps:
            if until is not None and step > until:
                break
            a, b = pair.a.call(step), pair.b.call(step)
            if a is None or b is None:
                self._inputs_known.pop(rank, None)
                continue
            self._inputs_known[rank] = a.inputs_complete and b.inputs_complete
            for what, left, right, detail in _differences(a, b):
                if what not in found:
                    found.add(what)
                    self._seen.setdefault(what, []).append(_Seen(step, rank, left, right, detail))

    def causes(self, until: int) -> list[Cause]:
        """What differs up to a step, where it does so first."""
        causes = []
        for what in _ORDER:
            seen = [item for item in self._seen.get(what, []) if item.step <= until]
            if seen:
                step = min(item.step for item in seen)
                causes.append(_cause(what, [item for item in seen if item.step == step]))
        return causes

    def inputs_known(self, rank: int) -> bool:
        """Whether all that the forward passes of a rank were given is in both traces, in its last step compared."""
        return self._inputs_known.get(rank, False)

    def knows(self, rank: int) -> bool:
        """Whether both traces have a rank's last call that was compared."""
        return rank in self._inputs_known


@dataclass
class Amounts:
    """What all ranks of one run together took in one step.

    ``inputs``: in the order of the ranks, None if not all are known.
    """

    micro_batches: int = 0
    sample_size: int = 0
    ranks: int = 0
    inputs: list[tuple[str, str]] | None = field(default_factory=list)


def amounts(traces: Iterator[RankTrace], until: int, world_size: int) -> dict[int, Amounts]:
    """The amounts of every step up to one, of those that all ranks recorded."""
    totals: dict[int, Amounts] = {}
    for trace in traces:
        for step in trace.steps:
            if step <= until and (call := trace.call(step)):
                total = totals.setdefault(step, Amounts())
                total.micro_batches += call.micro_batches
                total.sample_size += call.sample_size or 0
                total.ranks += 1
                known = total.inputs is not None and call.inputs_complete
                total.inputs = [*(total.inputs or ()), *call.inputs] if known else None
    return {step: total for step, total in totals.items() if total.ranks == world_size}


def of_amounts(a: dict[int, Amounts], b: dict[int, Amounts], *, in_one_order: bool) -> list[Cause]:
    """Where runs of other world sizes first took other amounts, or, if ranks hold them in one order, other inputs."""
    causes = list(_of_all_inputs(a, b)) if in_one_order else []
    for what, member in zip(ITEMS, ("micro_batches", "sample_size"), strict=True):
        for step in sorted(set(a) & set(b)):
            left, right = getattr(a[step], member), getattr(b[step], member)
            if left != right:
                causes.append(Cause(what, (("A", str(left)), ("B", str(right))), f"first at step {step}"))
                break
    return causes


def _of_all_inputs(a: dict[int, Amounts], b: dict[int, Amounts]) -> Iterator[Cause]:
    for step in sorted(set(a) & set(b)):
        left, right = a[step].inputs or [], b[step].inputs or []
        for index, pair in enumerate(zip(left, right, strict=False)):
            if pair[0] != pair[1]:
                (one, word), (other, other_word) = pair
                where = f"first at step {step}, input {index + 1} of those of all ranks"
                if one != other:
                    yield Cause(SHAPE, (("A", one), ("B", other)), where)
                else:
                    yield Cause(DATA, (("A", f"{one} {word}"), ("B", f"{other} {other_word}")), where)
                return


def _differences(a: CallFacts, b: CallFacts) -> Iterator[tuple[str, str, str, str]]:
    yield from _of_inputs(a, b)
    if a.micro_batches != b.micro_batches:
        yield MICRO_BATCHES, str(a.micro_batches), str(b.micro_batches), ""
    if a.sample_size != b.sample_size:
        yield SAMPLE_SIZE, str(a.sample_size), str(b.sample_size), ""
    if a.took_part != b.took_part:
        yield TOOK_PART, _yes(a.took_part), _yes(b.took_part), ""
    if a.generators != b.generators:
        yield GENERATORS, a.generators, b.generators, ""


def _of_inputs(a: CallFacts, b: CallFacts) -> Iterator[tuple[str, str, str, str]]:
    if not a.inputs or not b.inputs:  # not recorded, or no forward pass
        return
    for index in range(max(len(a.inputs), len(b.inputs))):
        left, right = (call.inputs[index] if index < len(call.inputs) else ("nothing", "") for call in (a, b))
        if left != right:
            where = _which_input(index, a)
            if left[0] != right[0]:
                yield SHAPE, left[0], right[0], where
            else:
                yield DATA, " ".join(left), " ".join(right), where
            return


def _which_input(index: int, call: CallFacts) -> str:
    if len(call.inputs) == call.forwards:
        return f"forward pass {index + 1} of {call.forwards}"
    return f"input tensor {index + 1} of {call.forwards} forward passes"


def _cause(what: str, seen: list[_Seen]) -> Cause:
    first = seen[0]
    words = [f"first at step {first.step} on {name_ranks(item.rank for item in seen)}"]
    if first.detail:
        words.append(first.detail)
    if len({(item.a, item.b) for item in seen}) > 1:
        words.append(f"shown for rank {first.rank}")
    return Cause(what, (("A", first.a), ("B", first.b)), ", ".join(words))


def _yes(value: bool) -> str:
    return "yes" if value else "no"

"""Where do the ranks of one run part, in what they are to share? A majority is named, and no rank is right."""

from collections.abc import Sequence
from dataclasses import replace

from legacy_ddp._compare import MAX_SIDES, compare_rows, name_ranks
from legacy_ddp.debug._diff.coverage import shortfall, span_of
from legacy_ddp.debug._diff.environment_diff import NEVER, in_order
from legacy_ddp.debug._diff.explain import Evidence, meaning
from legacy_ddp.debug._diff.locations import MAX_OTHERS, Key, join
from legacy_ddp.debug._diff.notes import NO_OPTIMIZER, say_phases
from legacy_ddp.debug._diff.rank_details import mark_places, read_first
from legacy_ddp.debug._diff.rank_digests import RankWords
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Side, Verdict
from legacy_ddp.debug._diff.sections import Keep, keep_shared
from legacy_ddp.debug._trace.line_format import PHASE_LABELS
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.run import Run

PARTED = "ReplicaDivergenceError"
# Ranks have these of their own, by design.
_OF_A_RANK = (*NEVER, "seed", "devices")


def compare_ranks(run: Run, progress: Progress = lambda _: None) -> Comparison:
    """What the ranks of one run hold differently in the phases that they share.

    Local gradients, inputs and buffers that match ``local_buffers`` are each rank's own, and not compared. One rank
    cannot be compared with anything: the verdict is ``unknown``. Every byte is looked through once, and up to the last
    place that differs a second time; two files are open at a time. Memory: see :class:`RankWords`.

    Raises:
        TraceError: the trace cannot be read.
    """
    if run.world_size == 1:
        return Comparison(
            (str(run.folder),), "unknown", "cannot tell: one rank only, and no other to compare it with; name two runs"
        )
    patterns = run.environments[0].local_buffers
    keep = keep_shared(patterns)
    words = RankWords(run, keep, progress)
    keys = words.differing()
    if keys and not words.names_agree:  # names in another order are no difference
        words = RankWords(run, keep, lambda _: None, by_content=True)
        keys = words.differing()
    if not keys:
        verdict, headline = _agreement(run, words)
        return _told(run, words, verdict, headline)
    return _different(run, words, keys, keep)


def _agreement(run: Run, words: RankWords) -> tuple[Verdict, str]:
    steps = words.compared
    if words.extent.damage:
        agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
        return "unknown", f"cannot tell: {run.folder / words.extent.damage[0][1]}; {agreed}"
    if short := shortfall([words.extent], steps):
        return "unknown", f"cannot tell: {short}"
    if not steps:
        return "unknown", "cannot tell: no step was recorded by all ranks"
    if not words.phases:
        return "unknown", "cannot tell: no phase that ranks share was recorded by all of them"
    if PARTED in words.extent.reasons:
        return "unknown", (
            f"cannot tell: the run ended by {PARTED} after step {steps[-1]}; up to there ranks hold the same, and what "
            "parted them came after it (see the error)"
        )
    if steps == [run.environments[0].first_step - 1]:
        return "unknown", f"cannot tell: only the start ({span_of(steps)}) was recorded by all ranks, where they agree"
    number = len(words.phases)
    return "same", (
        f"same: {run.world_size} ranks hold the same, {span_of(steps)}, "
        f"{number} phase{'s' * (number > 1)}, {words.tensors:,} tensors, bit for bit"
    )


def _told(run: Run, words: RankWords, verdict: Verdict, headline: str) -> Comparison:
    steps = words.compared
    notes = words.extent.notes()
    if words.missing:
        notes.append(f"not compared, for not all ranks recorded it: {', '.join(say_phases(words.missing))}")
    if "settings" not in words.extent.phases:
        notes.append(NO_OPTIMIZER)
    if patterns := run.environments[0].local_buffers:
        notes.append(f"not compared, for each rank has its own: buffers {', '.join(patterns)}")
    if verdict == "same":
        notes += [f"{cause.what} differs between ranks and changed no bit" for cause in _causes(run)]
    return Comparison(
        (str(run.folder),), verdict, headline, (steps[0], steps[-1]) if steps else None, notes=tuple(notes)
    )


def _different(run: Run, words: RankWords, keys: list[Key], keep: Keep) -> Comparison:
    first, *others = read_first(run, keys[0], keep).divergences()
    marks = mark_places(run, {key: words.holders(key) for key in keys}, keep)
    places, more_places = join(marks, words.compared)
    causes = _causes(run)
    is_start = first.step == run.environments[0].first_step - 1
    evidence = Evidence(
        kind="ranks",
        first=first,
        compared=words.phases,
        is_start=is_start,
        previous=max((step for step in words.compared if step < first.step), default=None),
        causes=frozenset(cause.what for cause in causes),
    )
    when = f"at the start (step {first.step})" if is_start else f"at step {first.step}"
    who = _sides(first.sides)
    return replace(
        _told(
            run, words, "different", f"different: ranks part {when} in {PHASE_LABELS[first.phase]}: {who}: {first.name}"
        ),
        first=first,
        others=tuple(others[:MAX_OTHERS]),
        meaning=f"{_majority(first, run.world_size)} {meaning(evidence)}",
        causes=tuple(causes),
        places=places,
        more_places=more_places,
    )


def _sides(sides: Sequence[Side]) -> str:
    """Who is with whom, the smallest group first."""
    labels = [side.label for side in reversed(sides)]
    more = [f"{len(labels) - MAX_SIDES} more groups"] if len(labels) > MAX_SIDES else []
    return " against ".join([*labels[:MAX_SIDES], *more])


def _majority(first: Divergence, size: int) -> str:
    if len(first.ranks) == size:
        return "No majority: nothing tells which ranks to look at."
    return f"{size - len(first.ranks)} of {size} ranks agree; a majority speaks against {name_ranks(first.ranks)}."


def _causes(run: Run) -> list[Cause]:
    """Facts of the environment that ranks do not share, the majority first."""
    rows = [
        {fact: environment.facts[fact] for fact in in_order(list(environment.facts)) if fact not in _OF_A_RANK}
        for environment in run.environments
    ]
    return [
        Cause(item.what, tuple((name_ranks(ranks), value) for value, ranks in item.holders[:MAX_SIDES]))
        for item in compare_rows(rows).differences
    ]

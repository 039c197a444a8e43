"""Comparison of the ranks of one run in the phases which ranks share. A majority is named, but not called right."""

from collections.abc import Sequence
from dataclasses import replace

from legacy_ddp._compare import MAX_SIDES, compare_rows, name_ranks
from legacy_ddp.debug._diff.coverage import format_steps, uncompared_steps
from legacy_ddp.debug._diff.environment_diff import EXCLUDED, by_likelihood
from legacy_ddp.debug._diff.evidence import Evidence
from legacy_ddp.debug._diff.explain import explain
from legacy_ddp.debug._diff.locations import MAX_OTHERS, Key, merge
from legacy_ddp.debug._diff.notes import local_buffer_notes, optimizer_notes, phase_labels
from legacy_ddp.debug._diff.operation_finding import with_operations
from legacy_ddp.debug._diff.operation_ranks import RankOperations
from legacy_ddp.debug._diff.rank_details import read_divergences, read_masks
from legacy_ddp.debug._diff.rank_digests import RankDigests
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Side, Verdict
from legacy_ddp.debug._diff.sections import Keep, keep_shared
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.records import PHASE_LABELS
from legacy_ddp.debug._trace.run import Run

_DIVERGENCE_ERROR = "ReplicaDivergenceError"
# Expected to differ between ranks.
_FACTS_OF_A_RANK = (*EXCLUDED, "seed", "devices")


def compare_ranks(run: Run, progress: Progress = lambda _: None) -> Comparison:
    """Differences between the ranks of one run, in the phases which ranks share.

    Local gradients, inputs and buffers matching ``local_buffers`` belong to single ranks and are not compared. The
    verdict about a run of one rank is ``unknown``. Every file is read once, and again up to the last difference; two
    files are open at a time. Memory: see :class:`RankDigests`.

    Raises:
        TraceError: a trace file cannot be read.
    """
    if run.world_size == 1:
        return Comparison(
            (str(run.folder),), "unknown", "cannot tell: one rank only, and no other to compare it with; name two runs"
        )
    keep = keep_shared(run.environments[0].local_buffers)
    digests = RankDigests(run, keep, progress)
    keys = digests.differing()
    if keys and not digests.names_agree:  # the order of names is no difference
        digests = RankDigests(run, keep, lambda _: None, by_content=True)
        keys = digests.differing()
    if not keys:
        return _result(run, digests, *_verdict_without_difference(run, digests))
    return _different(run, digests, keys, keep)


def _verdict_without_difference(run: Run, digests: RankDigests) -> tuple[Verdict, str]:
    steps = digests.compared_steps
    if digests.run_coverage.damage:
        agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
        return "unknown", f"cannot tell: {run.folder / digests.run_coverage.damage[0][1]}; {agreed}"
    if uncompared := uncompared_steps([digests.run_coverage], steps):
        return "unknown", f"cannot tell: {uncompared}"
    if not steps:
        return "unknown", "cannot tell: no step was recorded by all ranks"
    if not digests.phases:
        return "unknown", "cannot tell: no phase that ranks share was recorded by all of them"
    if _DIVERGENCE_ERROR in digests.run_coverage.reasons:
        return "unknown", (
            f"cannot tell: the run ended by {_DIVERGENCE_ERROR} after step {steps[-1]}; up to there ranks hold the "
            "same, and what parted them came after it (see the error)"
        )
    if steps == [run.environments[0].first_step - 1]:
        return (
            "unknown",
            f"cannot tell: only the start ({format_steps(steps)}) was recorded by all ranks, where they agree",
        )
    number = len(digests.phases)
    return "same", (
        f"same: {run.world_size} ranks hold the same, {format_steps(steps)}, "
        f"{number} phase{'s' * (number > 1)}, {digests.tensors:,} tensors, bit for bit"
    )


def _result(
    run: Run, digests: RankDigests, verdict: Verdict, headline: str, first_step: int | None = None
) -> Comparison:
    """``first_step``: of the first divergence, up to which operations are compared; None without any."""
    steps = digests.compared_steps
    notes = digests.run_coverage.notes()
    if digests.missing:
        notes.append(f"not compared, for not all ranks recorded it: {', '.join(phase_labels(digests.missing))}")
    notes += optimizer_notes([run], digests.run_coverage.phases)
    notes += local_buffer_notes(run.environments[0].local_buffers)
    if verdict == "same":
        notes += [f"{cause.what} differs between ranks and changed no bit" for cause in _causes(run)]
    compared = {k: v for k, v in digests.micro_batches.items() if first_step is None or k <= first_step}
    operations = RankOperations(run, compared)
    return Comparison(
        (str(run.folder),),
        verdict,
        with_operations(headline, verdict, operations.finding),
        (steps[0], steps[-1]) if steps else None,
        operations=operations.finding,
        notes=(*notes, *operations.notes()),
    )


def _different(run: Run, digests: RankDigests, keys: list[Key], keep: Keep) -> Comparison:
    first, *others = read_divergences(run, keys[0], keep)
    masks = read_masks(run, {key: digests.groups(key) for key in keys}, keep)
    locations, more_locations = merge(masks, digests.compared_steps)
    causes = _causes(run)
    is_start = first.step == run.environments[0].first_step - 1
    evidence = Evidence(
        kind="ranks",
        first=first,
        compared=digests.phases,
        is_start=is_start,
        previous=max((step for step in digests.compared_steps if step < first.step), default=None),
        causes=frozenset(cause.what for cause in causes),
    )
    when = f"at the start (step {first.step})" if is_start else f"at step {first.step}"
    headline = (
        f"different: ranks part {when} in {PHASE_LABELS[first.phase]}: {_format_sides(first.sides)}: {first.name}"
    )
    return replace(
        _result(run, digests, "different", headline, first.step),
        first=first,
        others=tuple(others[:MAX_OTHERS]),
        explanation=f"{_format_majority(first, run.world_size)} {explain(evidence)}",
        causes=tuple(causes),
        locations=locations,
        more_locations=more_locations,
    )


def _format_sides(sides: Sequence[Side]) -> str:
    """Labels of the sides, the smallest group of ranks first."""
    labels = [side.label for side in reversed(sides)]
    more = [f"{len(labels) - MAX_SIDES} more groups"] if len(labels) > MAX_SIDES else []
    return " against ".join([*labels[:MAX_SIDES], *more])


def _format_majority(first: Divergence, world_size: int) -> str:
    if len(first.ranks) == world_size:
        return "No majority: nothing tells which ranks to look at."
    agreeing = world_size - len(first.ranks)
    return f"{agreeing} of {world_size} ranks agree; a majority speaks against {name_ranks(first.ranks)}."


def _causes(run: Run) -> list[Cause]:
    """Facts of the environment which differ between ranks; the majority's value comes first."""
    rows = [
        {fact: item.facts[fact] for fact in by_likelihood(list(item.facts)) if fact not in _FACTS_OF_A_RANK}
        for item in run.environments
    ]
    return [
        Cause(item.name, tuple((name_ranks(ranks), value) for value, ranks in item.holders[:MAX_SIDES]))
        for item in compare_rows(rows).differences
    ]

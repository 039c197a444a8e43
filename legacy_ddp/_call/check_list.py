"""The list of the checks of a call, and the shorter checks.

``edited``, ``nonfinite``, ``late_nonfinite``, ``replicas`` and ``untrained`` have the longer checks.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import Check, LocalStep, Subject
from legacy_ddp._call.edited import EditedGradients
from legacy_ddp._call.nonfinite import LateNonFiniteGradients, NonFiniteGradients
from legacy_ddp._call.replicas import BufferNames, Replicas
from legacy_ddp._call.untrained import ClearedGradients, ForgottenCall, LocalStepsAlone, UntrainedParameters
from legacy_ddp._errors import AgreedError
from legacy_ddp._log import LOGGER, log_late_rank, warn
from legacy_ddp._memory.layout import Layout
from legacy_ddp._ranks.agree import Agreement, Mismatch, Precedence, compare_work, desync_error
from legacy_ddp._ranks.header import Flag, Header, Participation
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._statistics import PARTS, SUSPICIOUS_CALLS, LateRankTrend, SameDataDetector, StepTimes, comparable_norm
from legacy_ddp._steps.guard import guard_steps
from legacy_ddp._steps.step_counter import StepCounter
from legacy_ddp._text import compare_rows, name_ranks
from legacy_ddp._torch.device import which_nonzero

_SPEAKER = 1  # the rank that warns of an evaluation


class EqualSteps(Check):
    """Counts the optimizer steps since the last call, and raises if the numbers of the ranks differ.

    The numbers are compared only if every rank knows its number. After a failed call the number is unknown, because
    counting stops in a call and begins again at its end.
    """

    precedence = Precedence.STEPS

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.counts_steps and subject.wrapper is not None
        self._counter = StepCounter(subject.planner.counter.policy) if self.is_on else None
        self._layout: Layout | None = None  # of the parameters that the counter knows

    def facts(self, step: LocalStep) -> None:
        if self._counter is not None and (count := self._counter.take(step.call.groups)) is not None:
            step.header.steps = count
            step.header.flags |= Flag.STEPS_KNOWN

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        ranks = [rank for rank, row in enumerate(rows) if not row.flags & Flag.JOINED]  # other ranks make no more steps
        if not all(rows[rank].flags & Flag.STEPS_KNOWN for rank in ranks):
            return None
        finding = compare_rows([{"optimizer steps": str(rows[rank].steps)} for rank in ranks], ranks)
        advice = (
            "let every rank step after every call, or none: decide by a value that all ranks share, and unscale, clip\n"
            "and look for infinities after all_reduce(); replicas differ now, unless the step changed nothing"
        )
        return desync_error(
            rows, "ranks made different numbers of optimizer steps since the last call", finding, advice
        )

    def end(self, step: LocalStep) -> None:
        counter = self._counter
        if counter is None:
            return
        if step.plan.layout is not self._layout:  # a plan of the same layout has the same parameters
            counter.ids = frozenset(map(id, step.plan.parameters))
            self._layout = step.plan.layout
        counter.begin(step.call.groups)

    def forget(self) -> None:
        if self._counter is not None:
            self._counter.stop()


class UnevenWork(Check):
    """Warns of different numbers of micro-batches on the ranks, or raises on all ranks.

    The error comes in any call. The warning does not come with ``sample_size``, where every item counts the same. The
    setting is equal on all ranks.
    """

    precedence = Precedence.UNEVEN
    section = "Uneven work"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.uneven == "warn"
        self._raises = subject.settings.checks.uneven == "raise"

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        return desync_error(rows, "ranks bring uneven work", compare_work(rows)) if self._raises else None

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        if agreement.is_uniform or agreement.sample_size is not None:
            return None
        finding = compare_work(agreement.rows)
        if not finding:
            return None
        return (
            f"{step.call}: ranks bring uneven work (warned once):\n{finding}\n"
            f"pass sample_size= if they should, or see {step.call.settings.how_to_check('uneven=...')}"
        )


class SameData(Check):
    """Warns of ranks with the same data: their local gradients have equal norms, call after call.

    Gradients that do not depend on the data have equal norms, too. The data are not compared, because a digest of the
    inputs would cost time in every forward.
    """

    section = "The same data"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.warns_of_same_data
        # By process group, and empty while all norms are different: then a call costs one set.
        self._streaks: weakref.WeakKeyDictionary[Groups, SameDataDetector] = weakref.WeakKeyDictionary()

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        norms = agreement.headers.column("norm_bits")
        if len(set(norms)) == len(norms):
            if self._streaks:
                self._streaks.pop(step.call.groups, None)
            return None
        # If no backward pass has run since the last call, or since a call of another wrapper of the parameters
        # (REDUCED), the gradients are the result of that call and equal on all ranks.
        comparable = [
            comparable_norm(row.local_norm, row.finite) if row.micro_batches and not row.flags & Flag.REDUCED else None
            for row in agreement.rows
        ]
        groups = self._streaks.setdefault(step.call.groups, SameDataDetector()).add(comparable)
        if not groups:
            return None
        who = " and ".join(f"on {name_ranks(ranks)}" for ranks in groups)
        return (
            f"{step.call}: norms of local gradients are equal {who}, to the last bit, for {SUSPICIOUS_CALLS} calls "
            "(warned once):\n"
            "either these ranks read the same data (same sampler seed, no DistributedSampler, ...),\n"
            "or their gradients do not depend on the data (dead ReLUs, a loss term of the weights alone, ...);\n"
            "only norms were compared: look at a batch of each of these ranks; see "
            f"{step.call.settings.how_to_check('same_data=...')}"
        )


class UnclearedGradients(Check):
    """Warns of a missing zero_grad(): a plain mean of gradients that a step has used, with a backward added since.

    Several calls for one step are not reported, and neither are gradients of which some were cleared.
    """

    section = "Gradients that were not cleared"
    awaits = Flag.UNCLEARED

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.level != "off"

    def facts(self, step: LocalStep) -> None:
        header = step.header
        counter, is_plain = step.counter, header.participation == Participation.PLAIN
        if is_plain and counter.sums.additions and counter.added_to_used_results(step.plan.parameters):
            header.flags |= Flag.UNCLEARED

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        ranks = agreement.ranks_with(Flag.UNCLEARED)
        return (
            f"{step.call}: on {name_ranks(ranks)} backward added to gradients that a step had used already, in every\n"
            "parameter that it reached (warned once): the steps now use the old gradients again;\n"
            "call zero_grad() once per step, between step() and the next backward(), on every rank"
        )


class DividedResults(Check):
    """Marks each result of an earlier call that a weighted call divides again, because it was not cleared.

    Often no step uses such a gradient: a discriminator has one while the generator is trained. So the call goes on, and
    a step that would use the gradient raises (``_steps/guard``). All ranks mark the same gradients, also if only some
    of them held the earlier result. A plain call keeps the marks of results that are still not cleared.
    """

    section = "GradientError"
    awaits = Flag.STALE

    def __init__(self, _: Subject) -> None:
        self._stale: list[int] = []  # positions on this rank
        self._marked: list[int] = []  # positions on all ranks

    def facts(self, step: LocalStep) -> None:
        header, parameters = step.header, step.plan.parameters
        self._stale, self._marked = [], []
        if step.packed.stale and header.takes_part:
            grads = {index: grad for index in step.packed.stale if (grad := parameters[index].grad) is not None}
            self._stale = list(compress(grads, which_nonzero(grads.values())))
            if self._stale:
                header.flags |= Flag.STALE

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective: find the results that this or an earlier call divides again."""
        is_divided = agreement.sample_size is not None and agreement.divisor != len(agreement.participants)
        stale, marked, fresh = torch.zeros(3, len(step.plan.parameters), dtype=torch.uint8, device="cpu")
        fresh[:] = step.header.takes_part
        fresh[self._stale], stale[self._stale] = 0, 1
        marked[step.counter.divided_again(self._stale)] = 1
        stale, marked, fresh = step.call.maximum(torch.stack([stale, marked, fresh])).bool()
        # If only some ranks have cleared a result, the mean still divides it by the number of all ranks.
        self._marked = (stale & (marked | fresh | is_divided)).nonzero().flatten().tolist()
        return None

    def end(self, step: LocalStep) -> None:
        if self._marked or step.counter.divided:
            step.counter.mark_divided_again(self._marked)
        if self._marked:
            guard_steps()


class MergedMicroBatches(Check):
    """Warns if several backward passes were added as a single leaf of the tree."""

    section = "Merged micro-batches"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.reproducible and subject.settings.checks.level != "off"

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        merged = {rank: row for rank, row in enumerate(agreement.rows) if 0 < row.leaves < row.micro_batches}
        if not merged:
            return None
        row = next(iter(merged.values()))
        return (
            f"{step.call}: {name_ranks(merged)} ran several backward passes in one micro-batch (warned once):\n"
            f"got {row.micro_batches} in {row.leaves}; put each micro-batch into a no_sync() block of its own,\n"
            "or another split of them over ranks gives other bits"
        )


class EvaluationHint(Check):
    """Warns of running statistics that every rank has updated on its own data: once, on rank 1, at the first forward in
    eval mode after training and a call.

    Rank 0 does not warn, because it may evaluate alone, and has the statistics that torch DDP would give to all ranks.

    Nothing is communicated: the version counters of the buffers show whether this rank has updated them. Layers with a
    buffer that is ignored, or named in ``Checks(local_buffers=)``, do not count.
    """

    section = "Statistics of each rank"

    def __init__(self, subject: Subject) -> None:
        settings = subject.settings
        self.is_on = settings.checks.level != "off" and subject.wrapper is not None
        self._wrapper = subject.wrapper_reference
        self._left_out = (*settings.ignore, *settings.checks.local_buffers)
        self._has_reduced = False
        self._is_speaker = False
        self._awaits_training = True  # the mode of the next forward to look at; forwards in the other mode are skipped
        self._versions: dict[str, int] | None = None  # by layer, at the first training forward since a broadcast

    def end(self, step: LocalStep) -> None:
        groups = step.call.groups
        if groups.size > 1:
            self._has_reduced, self._is_speaker = True, groups.rank == _SPEAKER

    def restart_buffers(self) -> None:
        self._awaits_training, self._versions = True, None

    def begin_forward(self, *, is_training: bool) -> None:
        if is_training is not self._awaits_training or not self.is_on:
            return
        layers = self._layers()
        if is_training:
            if self._versions is None:
                self._versions = {name: version for name, (_, version) in layers.items()}
            self.is_on = bool(layers)
            self._awaits_training = False
            return
        marks = self._versions or {}
        updated = {name: kind for name, (kind, version) in layers.items() if version > marks.get(name, version)}
        self._awaits_training = True
        if self._has_reduced and updated:
            self.is_on = False
            if self._is_speaker:
                warn(_SPEAKER, _describe_evaluation(updated), self.section)

    def _layers(self) -> dict[str, tuple[str, int]]:
        """By layer: its kind, and the sum of the versions of its statistics."""
        wrapper: Any = self._wrapper()  # not None: its forward runs
        return {
            layer: (kind, sum(map(internals.version_of, buffers.values())))
            for layer, kind, buffers in internals.running_statistics(wrapper.module)
            if not any(fnmatchcase(name, pattern) for name in buffers for pattern in self._left_out)
        }


def _describe_evaluation(layers: dict[str, str]) -> str:
    name, kind = next(iter(layers.items()))
    return (
        f"evaluation after training: the running statistics of {len(layers)} layer{'s' * (len(layers) > 1)}, "
        f"first {name!r} ({kind}), are of each rank's own data;\n"
        "in eval mode ranks give different results, and so does a checkpoint of each rank (told once);\n"
        "call broadcast_buffers() on every rank before an evaluation and before a checkpoint"
    )


class LateRankReport(Check):
    """Sends the times of the parts of the step; rank 0 logs the rank for which the others wait in call after call.

    This is a log record and no warning, because a slow rank is no mistake.
    """

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.level != "off"
        self._trends: weakref.WeakKeyDictionary[Groups, LateRankTrend] = weakref.WeakKeyDictionary()

    def facts(self, step: LocalStep) -> None:
        header, clock = step.header, step.counter.policy.clock
        header.data_seconds, header.forward_seconds, header.backward_seconds = clock.data, clock.forward, clock.backward
        clock.data = clock.forward = clock.backward = 0.0

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        if not LOGGER.isEnabledFor(logging.INFO):
            return None
        parts = {part: agreement.column(f"{part}_seconds") for part in PARTS}
        own = sum(seconds[0] for seconds in parts.values())  # of rank 0, which observes
        times = StepTimes(parts, own + sum(step.call.seconds.values()))
        trend = self._trends.setdefault(step.call.groups, LateRankTrend())
        if late := trend.add(times, agreement.column("waited_seconds")):
            log_late_rank(step.call.name, late.rank, late.seconds, late.part, str(late))
        return None


class CheckList:
    """The checks of a set of parameters, by the methods that they override."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.all = checks
        # Called only if a parameter is on a device: the lists …_on_cpu are without this check.
        self.late = next(check for check in checks if isinstance(check, LateNonFiniteGradients))
        self.with_facts = _overriding(checks, "facts")
        self.with_compare = _overriding(checks, "compare")
        self.with_facts_on_cpu = [check for check in self.with_facts if check is not self.late]
        self.with_compare_on_cpu = [check for check in self.with_compare if check is not self.late]
        self.with_end = _overriding(checks, "end")
        # Rank 0 calls these after a call with a flag that they await, each until it has returned a text.
        self.observing = [check for check in _overriding(checks, "observe") if check.is_on]
        self.with_forward = _overriding(checks, "begin_forward")
        self.with_block = _overriding(checks, "change_block")
        self.with_idle_call = _overriding(checks, "idle_call")
        self.mismatches: Sequence[tuple[Precedence, Mismatch]] = [
            (check.precedence, check.mismatch) for check in _overriding(checks, "mismatch")
        ]


def _overriding(checks: Sequence[Check], method: str) -> list[Check]:
    base: Callable[..., object] = getattr(Check, method)
    return [check for check in checks if getattr(type(check), method) is not base]


CHECKS: tuple[type[Check], ...] = (
    EqualSteps,
    BufferNames,
    Replicas,
    EditedGradients,
    NonFiniteGradients,
    LateNonFiniteGradients,
    UnevenWork,
    SameData,
    UnclearedGradients,
    DividedResults,
    ClearedGradients,
    UntrainedParameters,
    LocalStepsAlone,
    ForgottenCall,
    MergedMicroBatches,
    EvaluationHint,
    LateRankReport,
)


def make_checks(subject: Subject) -> CheckList:
    return CheckList([kind(subject) for kind in CHECKS])

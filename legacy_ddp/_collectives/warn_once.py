"""Warnings of rank 0 about the facts of all ranks, each given once; and warnings that wait for the end of a call."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from legacy_ddp._agreement.agree import Agreement, Precedence, agreed_error, describe_uneven_work
from legacy_ddp._agreement.header import Flag, Header, Participation
from legacy_ddp._collectives.check import Check, LocalStep, Subject
from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import AgreedError, DesyncError
from legacy_ddp._log import warn
from legacy_ddp._statistics import SUSPICIOUS_CALLS, SameDataDetector, comparable_norm
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.groups import Groups


class Pending(NamedTuple):
    """``rank``: of the log record. ``is_everywhere``: every rank has this text."""

    rank: int
    text: str
    is_everywhere: bool = False


class Warnings:
    """The warnings of a set of parameters that wait for the end of the call."""

    def __init__(self) -> None:
        self.pending: list[Pending] = []

    def add(self, text: str) -> None:
        """Add a warning of rank 0."""
        self.pending.append(Pending(0, text))

    def add_everywhere(self, call: Call, text: str) -> None:
        """Add a warning with the same text on every rank, unless it is empty."""
        if text:
            self.pending.append(Pending(call.groups.rank, text, is_everywhere=True))

    def emit(self) -> None:
        """Show the pending warnings, at the line of the call of :meth:`all_reduce`."""
        while self.pending:
            rank, text, is_everywhere = self.pending.pop(0)
            warn(rank, text, is_everywhere=is_everywhere)


class UnevenWork(Check):
    """Ranks bring different numbers of micro-batches to a plain mean: a warning, or an error on all ranks.

    With ``sample_size`` every item counts the same, however a rank cuts its items into micro-batches. The setting is
    equal on all ranks.
    """

    precedence = Precedence.UNEVEN

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.uneven == "warn"
        self._raises = subject.settings.checks.uneven == "raise"

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        if not self._raises or not (finding := describe_uneven_work(rows)):
            return None
        return agreed_error(DesyncError, rows, f"ranks bring uneven work:\n{finding}", finding.ranks)

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        if agreement.is_uniform or agreement.sample_size is not None:
            return None
        finding = describe_uneven_work(agreement.rows)
        if not finding:
            return None
        return (
            f"{step.call}: ranks bring uneven work (warned once):\n{finding}\n"
            "pass all_reduce(sample_size=...) if they should, or see legacy_ddp.Checks(uneven=...)"
        )


class SameData(Check):
    """Ranks have the same data: equal norms of local gradients, call after call.

    Gradients that do not depend on the data have equal norms, too. Data themselves are not compared: a digest of the
    inputs would cost every forward.
    """

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.warns_of_same_data
        # By process group; only while norms are equal, so that an ordinary call costs one set.
        self._streaks: weakref.WeakKeyDictionary[Groups, SameDataDetector] = weakref.WeakKeyDictionary()

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        """The warning after ``SUSPICIOUS_CALLS`` calls."""
        norms = agreement.column("norm_bits")
        if len(set(norms)) == len(norms):
            if self._streaks:
                self._streaks.pop(step.call.groups, None)
            return None
        # Without a backward pass since the last call (of this wrapper, or of a second wrapper of the parameters) the
        # gradients are the result of that call, equal on all ranks.
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
            "only norms were compared: look at a batch of each of these ranks; see legacy_ddp.Checks(same_data=...)"
        )


class UnclearedGradients(Check):
    """A plain mean of gradients that a step has used already, with a backward added: zero_grad() is missing.

    Several calls for one step are no sign, and gradients that were cleared in part are not, either.
    """

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.level != "off"

    def facts(self, step: LocalStep) -> None:
        header = step.header
        if header.participation == Participation.PLAIN and step.counter.added_to_used_results(step.plan.parameters):
            header.flags |= Flag.UNCLEARED

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        if not agreement.some_flags & Flag.UNCLEARED:
            return None
        ranks = agreement.ranks_with(Flag.UNCLEARED)
        return (
            f"{step.call}: on {name_ranks(ranks)} backward added to gradients that a step had used already, in every\n"
            "parameter that it reached (warned once): the steps now use the old gradients again;\n"
            "call zero_grad() once per step, between step() and the next backward(), on every rank"
        )


class MergedMicroBatches(Check):
    """Several backward passes were added as a single leaf of the tree."""

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

"""Warnings about the ranks of a call: which were given already, and which wait for the end of the call."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import Flag
from legacy_ddp._compare import name_ranks
from legacy_ddp._log import warn
from legacy_ddp._settings import Settings
from legacy_ddp._statistics import SUSPICIOUS_CALLS, SameDataDetector, comparable_norm
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.groups import Groups


class Pending(NamedTuple):
    """``rank``: of the log record. ``is_everywhere``: every rank has this text."""

    rank: int
    text: str
    is_everywhere: bool = False


class Warnings:
    """The warnings of a set of parameters.

    ``open``: the checks that have not warned yet. Each returns the text of a warning, or an empty text. A warning is
    given once per run and on rank 0, and its check goes. ``nonfinite_groups``: the process groups with a streak of
    non-finite gradients, after the warning on every rank. ``has_searched_scalers``: all scalers of the process were
    looked for, which is done once.
    """

    def __init__(self, settings: Settings) -> None:
        checks = settings.checks
        self.pending: list[Pending] = []
        self.nonfinite_groups: weakref.WeakSet[Groups] = weakref.WeakSet()
        self.has_searched_scalers = False
        wanted: tuple[tuple[bool, Callable[[Call, Agreement], str]], ...] = (
            (checks.uneven == "warn", _describe_uneven_work),
            (checks.warns_of_same_data, _SameData().describe),
            (checks.level != "off", _describe_uncleared),
            (settings.reproducible and checks.level != "off", _describe_merged_micro_batches),
        )
        self.open = [check for is_wanted, check in wanted if is_wanted]

    def check(self, call: Call, agreement: Agreement) -> None:
        """Run the open checks on the rows of a call."""
        if call.groups.rank != 0:
            return
        for check in tuple(self.open):
            if text := check(call, agreement):
                self.open.remove(check)
                self.pending.append(Pending(0, text))

    def add_everywhere(self, call: Call, text: str) -> None:
        """Add a warning with the same text on every rank, unless it is empty."""
        if not text:
            return
        self.pending.append(Pending(call.groups.rank, text, is_everywhere=True))

    def emit(self) -> None:
        """Show the pending warnings, at the line of the call of :meth:`all_reduce`."""
        while self.pending:
            rank, text, is_everywhere = self.pending.pop(0)
            warn(rank, text, is_everywhere=is_everywhere)


def _describe_uneven_work(call: Call, agreement: Agreement) -> str:
    """Ranks bring different numbers of micro-batches to a plain mean. With ``sample_size`` every item counts the same,
    however a rank cuts its items into micro-batches."""
    if agreement.sample_size is not None or not (finding := agreement.uneven_work()):
        return ""
    return (
        f"{call}: ranks bring uneven work (warned once):\n{finding}\n"
        "pass all_reduce(sample_size=...) if they should, or see legacy_ddp.Checks(uneven=...)"
    )


def _describe_uncleared(call: Call, agreement: Agreement) -> str:
    """A plain mean of gradients that a step has used already, with a backward added: zero_grad() is missing. Several
    calls for one step are no sign, and gradients that were cleared in part are not, either."""
    if not agreement.some_flags & Flag.UNCLEARED:
        return ""
    ranks = agreement.ranks_with(Flag.UNCLEARED)
    return (
        f"{call}: on {name_ranks(ranks)} backward added to gradients that a step had used already, in every\n"
        "parameter that it reached (warned once): the steps now use the old gradients again;\n"
        "call zero_grad() once per step, between step() and the next backward(), on every rank"
    )


def _describe_merged_micro_batches(call: Call, agreement: Agreement) -> str:
    """Several backward passes were added as a single leaf of the tree."""
    merged = {rank: row for rank, row in enumerate(agreement.rows) if 0 < row.leaves < row.micro_batches}
    if not merged:
        return ""
    row = next(iter(merged.values()))
    return (
        f"{call}: {name_ranks(merged)} ran several backward passes in one micro-batch (warned once):\n"
        f"got {row.micro_batches} in {row.leaves}; put each micro-batch into a no_sync() block of its own,\n"
        "or another split of them over ranks gives other bits"
    )


class _SameData:
    """Check for ranks with the same data: equal norms of local gradients, call after call.

    Gradients that do not depend on the data have equal norms, too. Data themselves are not compared: a digest of the
    inputs would cost every forward.
    """

    def __init__(self) -> None:
        # By process group; only while norms are equal, so that an ordinary call costs one set.
        self._streaks: weakref.WeakKeyDictionary[Groups, SameDataDetector] = weakref.WeakKeyDictionary()

    def describe(self, call: Call, agreement: Agreement) -> str:
        """The warning after ``SUSPICIOUS_CALLS`` calls, else an empty text."""
        norms = agreement.column("norm_bits")
        if len(set(norms)) == len(norms):
            if self._streaks:
                self._streaks.pop(call.groups, None)
            return ""
        # Without a backward pass since the last call (of this wrapper, or of a second wrapper of the parameters) the
        # gradients are the result of that call, equal on all ranks.
        comparable = [
            comparable_norm(row.local_norm, row.finite) if row.micro_batches and not row.flags & Flag.REDUCED else None
            for row in agreement.rows
        ]
        groups = self._streaks.setdefault(call.groups, SameDataDetector()).add(comparable)
        if not groups:
            return ""
        who = " and ".join(f"on {name_ranks(ranks)}" for ranks in groups)
        return (
            f"{call}: norms of local gradients are equal {who}, to the last bit, for {SUSPICIOUS_CALLS} calls "
            "(warned once):\n"
            "either these ranks read the same data (same sampler seed, no DistributedSampler, ...),\n"
            "or their gradients do not depend on the data (dead ReLUs, a loss term of the weights alone, ...);\n"
            "only norms were compared: look at a batch of each of these ranks; see legacy_ddp.Checks(same_data=...)"
        )

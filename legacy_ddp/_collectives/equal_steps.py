"""The check for ranks with different numbers of optimizer steps between two calls."""

from collections.abc import Sequence

from legacy_ddp._agreement.agree import Precedence, agreed_error
from legacy_ddp._agreement.header import Flag, Header
from legacy_ddp._collectives.check import Check, LocalStep, Subject
from legacy_ddp._compare import compare_rows
from legacy_ddp._errors import AgreedError, DesyncError
from legacy_ddp._step_guard.step_counter import StepCounter


class EqualSteps(Check):
    """Counts the optimizer steps since the last call, and raises if the numbers of the ranks differ.

    Only if every rank knows its number. Counting stops in a call, and begins again at the end of the call: after a
    failed call the number is unknown.
    """

    precedence = Precedence.STEPS

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.counts_steps and subject.wrapper is not None
        self._counter = StepCounter(subject.planner.counter.policy) if self.is_on else None

    def facts(self, step: LocalStep) -> None:
        if self._counter is not None and (count := self._counter.take(step.call.groups)) is not None:
            step.header.steps = count
            step.header.flags |= Flag.STEPS_KNOWN

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        ranks = [rank for rank, row in enumerate(rows) if not row.flags & Flag.JOINED]  # other ranks make no more steps
        if not all(rows[rank].flags & Flag.STEPS_KNOWN for rank in ranks):
            return None
        finding = compare_rows([{"optimizer steps": str(rows[rank].steps)} for rank in ranks], ranks)
        if not finding:
            return None
        advice = (
            "let every rank step after every call, or none: decide by a value that all ranks share, and unscale, clip\n"
            "and look for infinities after all_reduce(); replicas differ now, unless the step changed nothing"
        )
        text = f"ranks made different numbers of optimizer steps since the last call:\n{finding}\n{advice}"
        return agreed_error(DesyncError, rows, text, finding.ranks)

    def end(self, step: LocalStep) -> None:
        if self._counter is not None:
            self._counter.begin(step.call.groups, step.plan.parameters)

    def forget(self) -> None:
        if self._counter is not None:
            self._counter.stop()

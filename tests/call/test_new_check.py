"""A new check is one class and one line: here for ranks whose losses differ in sign, told by the metrics."""

from collections.abc import Sequence

from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._call import check_list
from legacy_ddp._call.check import Check, LocalStep
from legacy_ddp._errors import AgreedError, DesyncError
from legacy_ddp._ranks.agree import Agreement, agreed_error
from legacy_ddp._ranks.header import Header
from legacy_ddp._text import name_ranks
from tests.helpers import logged_warnings
from tests.helpers.outcomes import attempt, backward
from tests.helpers.shared_jobs import run_cases

_KNOWN, _NEGATIVE = 2**30, 2**31  # bits of the flags that no other check uses


class _LossSign(Check):
    """A warning of every rank; ``raises``: an error instead."""

    section = "Uneven work"  # of another check: errors.md has none for this
    raises = False

    def facts(self, step: LocalStep) -> None:
        if (loss := step.packed.metrics.get("loss")) is not None:
            step.header.flags |= _KNOWN | (_NEGATIVE if loss < 0 else 0)

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        ranks = [rank for rank, row in enumerate(rows) if row.flags & _NEGATIVE]
        if not self.raises or not ranks or not all(row.flags & _KNOWN for row in rows):
            return None
        return agreed_error(DesyncError, rows, f"the loss is negative on {name_ranks(ranks)}", ranks)

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        if not agreement.common_flags & _KNOWN or agreement.common_flags & _NEGATIVE:
            return None
        ranks = agreement.ranks_with(_NEGATIVE)
        return f"{step.call}: the loss is negative on {name_ranks(ranks)}" if ranks else None


class _RaisingLossSign(_LossSign):
    raises = True


def _outcome(rank: int, kind: type[Check], losses: Sequence[float]) -> tuple[str, list[str], list[float]]:
    """The error and the warnings of a call with the check, and the gradient afterwards."""
    before = check_list.CHECKS
    check_list.CHECKS = (*before, kind)
    try:
        model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False))
    finally:
        check_list.CHECKS = before
    backward(model, float(rank))
    error = attempt(lambda: model.all_reduce(metrics={"loss": losses[rank]}))
    return str(error or ""), logged_warnings.take(), model.module.weight.grad.flatten().tolist()


def test_every_rank_has_the_warning_of_a_new_check_or_its_error_before_a_gradient_moves() -> None:
    cases = {
        "both are positive": (_LossSign, [1.0, 2.0]),
        "both are negative": (_LossSign, [-1.0, -2.0]),
        "warning": (_LossSign, [1.0, -2.0]),
        "error": (_RaisingLossSign, [1.0, -2.0]),
    }
    found = run_cases(_outcome, 2, cases)
    text, errors = "all_reduce() call 1: the loss is negative on rank 1", found.pop("error")

    assert found.pop("warning") == [("", [text], [0.5, 0.5])] * 2
    assert found == {f"both are {sign}": [("", [], [0.5, 0.5])] * 2 for sign in ("positive", "negative")}
    assert [error.startswith(text) for error, _, _ in errors] == [True] * 2
    assert [(warned, grad) for _, warned, grad in errors] == [([], [0.0, 0.0]), ([], [1.0, 1.0])]

"""The cause of a difference in a cross-check, and the next step. Pure.

Both sides of a cross-check have the same batch and, on one rank, the same code and settings. Fewer causes are possible
than between two traces.
"""

from dataclasses import replace

from legacy_ddp.debug._cross_check.verdict import Kind
from legacy_ddp.debug._operations.describe import Labels
from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.explain import CROSS_CHECK, Explanation, Facts, explain
from legacy_ddp.debug._operations.explain_input import has_unknown_source

_STATE = Explanation(
    "state in Python that a run changes: a counter, a cache, an attribute of a module",
    "keep such state in buffers, or take it out of run()",
)
_UNSEEN = Explanation(
    "both runs had the same batch: state kept outside of parameters and buffers (an attribute of a module), or a "
    "kernel that is not recorded (torch.compile)",
    "keep such state in buffers, or take it out of run(); check again without torch.compile",
)
_UNSTABLE = Explanation(
    "the same inputs gave other outputs in two runs on one rank: a kernel that is not deterministic (atomic additions, "
    "threads), or memory or hardware",
    "torch.use_deterministic_algorithms(True) names the operations of torch that are not deterministic; after it only "
    "custom operations, threads and hardware remain",
)
_OTHER_KERNEL = Explanation(
    "the same inputs give other outputs on these two ranks, in every run: another library or extension, a kernel that "
    "is wrong on one of them, or hardware",
    "compare libraries, extensions and hardware of these ranks; start the job again with the rank on another device, "
    "and see whether the difference stays with the device",
)
_CAPTURE = " with operations=True, to name the operation of the next time"
_ONCE = "cross-check more often{}; a single event is memory or hardware, or a kernel that is rarely wrong"


def cause_of(kind: Kind, found: OperationDifference | None, labels: Labels, facts: Facts) -> Explanation:
    """The cause and the next step for a verdict. ``found``: the first different operation; None if not known."""
    if found is not None and has_unknown_source(found):
        return _UNSEEN
    if kind == "differs":
        return _between_ranks(found, labels, facts)
    if found is not None and _is_other_call(found):
        return _STATE
    meaning = _explained(found, labels, facts).meaning if found else ""
    if kind == "once":
        return Explanation(meaning, _ONCE.format("" if found else _CAPTURE))
    return _UNSTABLE if found is None or found.kind == "output" else Explanation(meaning, _UNSTABLE.next_step)


def _between_ranks(found: OperationDifference | None, labels: Labels, facts: Facts) -> Explanation:
    explanation = _OTHER_KERNEL if found is None else _explained(found, labels, facts)
    if explanation.next_step.endswith(CROSS_CHECK):  # the comparison that has just been made
        return _OTHER_KERNEL
    return Explanation(explanation.meaning, explanation.next_step.replace("diff again", "check again"))


def _explained(found: OperationDifference, labels: Labels, facts: Facts) -> Explanation:
    """The explanation, where results differ: operations of one side alone may be the cause without a trace of it."""
    return explain(replace(found, tensors_differ=found.has_effect is False), labels, facts)


def _is_other_call(found: OperationDifference) -> bool:
    """Whether the code of two runs made other calls: other operations, or other arguments of one operation."""
    return found.kind in ("sequence", "order", "form") or found.a[0].settings != found.b[0].settings

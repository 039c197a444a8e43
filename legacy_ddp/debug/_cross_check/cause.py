"""The cause of a difference in a cross-check, and the next step. Pure.

Both sides of a cross-check have the same batch and, on one rank, the same code and settings. Fewer causes are possible
than between two traces.
"""

from dataclasses import replace

from legacy_ddp.debug._cross_check.place import Place
from legacy_ddp.debug._cross_check.settings_text import MODULE, RUN, name_setting
from legacy_ddp.debug._cross_check.verdict import Verdict
from legacy_ddp.debug._operations.describe import Labels
from legacy_ddp.debug._operations.explain import CROSS_CHECK, Explanation, Facts, explain, has_unknown_source
from legacy_ddp.debug._operations.operation import OperationDifference

_STATE = Explanation(
    "state in Python that a run changes: a counter, a cache, an attribute of a module",
    "keep such state in buffers, or take it out of run()",
)
_FIRST_RUN = Explanation(
    "state of a first run: a warm-up, a lazy cache, a counter",
    "run one batch before the first cross-check, and keep state in buffers",
)
_UNSEEN = Explanation(
    "both runs had the same batch: state kept outside of parameters and buffers (an attribute of a module, a value "
    "inside of an object that run holds), data that run reads itself, or a kernel that is not recorded (torch.compile)",
    "keep such state in buffers, or take it out of run(); check again without torch.compile",
)
_GENERATOR = Explanation(
    "random numbers from another place of the generator: both runs began with equal states, so that one side set a "
    "seed, drew more, or has a generator of its own",
    "look for seeds and draws inside of run and of the model",
)
_INTERMITTENT = Explanation(
    "the same inputs gave other outputs in two runs, and equal outputs in a third: a kernel that is wrong at times, "
    "memory or hardware",
    "start the job again with the rank on another device, and see whether the difference stays with the device",
)
_UNSTABLE = Explanation(
    "the same inputs gave other outputs in two runs on one rank: a kernel that is not deterministic (atomic additions, "
    "threads), or memory or hardware",
    "torch.use_deterministic_algorithms(True) names the operations of torch that are not deterministic; after it only "
    "custom operations, threads and hardware remain",
)
_ONCE = "cross-check more often{}; a single event is {}memory or hardware, or a kernel that is rarely wrong"
_NOT_CAPTURED = (" with operations=True, to name the operation of the next time", "state of a first run in Python, ")


def cause_of(verdict: Verdict, place: Place, labels: Labels, facts: Facts) -> Explanation:
    """The cause and the next step. ``facts``: the settings with other values on the two compared ranks."""
    found = place.difference
    if verdict.kind == "once" and len(verdict.ranks) > 1:
        return _FIRST_RUN
    if found is not None and has_unknown_source(found):
        return _UNSEEN
    if found is not None and found.kind == "output" and found.a[0].generator != found.b[0].generator:
        return _GENERATOR
    if verdict.kind == "differs":
        return _INTERMITTENT if place.is_intermittent else _between_ranks(found, labels, facts)
    if found is not None and _is_other_call(found):
        return _STATE
    meaning = _explained(found, labels, facts).meaning if found else ""
    if verdict.kind == "once":
        return Explanation(meaning, _ONCE.format(*(("", "") if found else _NOT_CAPTURED)))
    return _UNSTABLE if found is None or found.kind == "output" else Explanation(meaning, _UNSTABLE.next_step)


def _between_ranks(found: OperationDifference | None, labels: Labels, facts: Facts) -> Explanation:
    explanation = None if found is None else _explained(found, labels, facts)
    # After the cross-check that has just been made, another cross-check is no next step.
    if explanation is None or explanation.next_step.endswith(CROSS_CHECK):
        return _with_settings(_other_kernel(labels), facts)
    step = explanation.next_step.replace("diff again", "check again")
    return _with_settings(Explanation(explanation.meaning, step), facts)


def _other_kernel(labels: Labels) -> Explanation:
    return Explanation(
        f"the same inputs give other outputs on {labels[0]} than on {labels[1]}, in every run: another library or "
        "extension, a kernel that is wrong on one side, or hardware",
        "compare libraries, extensions and hardware of these ranks; start the job again with the rank on another "
        "device, and see whether the difference stays with the device",
    )


def _with_settings(explanation: Explanation, facts: Facts) -> Explanation:
    """With another next step, if a value in the user's function or the mode of a module differs."""
    held = [name for name in facts if name.startswith(RUN)]
    modules = [name for name in facts if name.startswith(MODULE)]
    if held:
        step = f"if the loss depends on {held[0]}, make it equal on all ranks, or pass it in the batch"
        return Explanation(explanation.meaning, step)
    if modules:
        step = f"give {name_setting(modules[0])} the same mode on all ranks, with train() or eval()"
        return Explanation(explanation.meaning, step)
    return explanation


def _explained(found: OperationDifference, labels: Labels, facts: Facts) -> Explanation:
    """The explanation, where results differ: operations of one side alone may be the cause without a trace of it."""
    return explain(replace(found, tensors_differ=found.has_effect is False), labels, facts)


def _is_other_call(found: OperationDifference) -> bool:
    """Whether the code of two runs made other calls: other operations, or other arguments of one operation."""
    return found.kind in ("sequence", "order", "form") or found.a[0].settings != found.b[0].settings

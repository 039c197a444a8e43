"""What does the first divergence mean? A table of sentences, by its phase and by what is known around it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from legacy_ddp.debug._diff import call_diff
from legacy_ddp.debug._diff.growth import GROWN, ROUNDING, Growth
from legacy_ddp.debug._diff.result import Divergence

Kind = Literal["runs", "sizes", "ranks"]
"""Two runs, two runs of other world sizes, or the ranks of one run."""


@dataclass(frozen=True)
class Evidence:
    """What is known around a divergence.

    ``compared``: the phases that both sides recorded. ``previous``: the last step before it that was compared, None if
    none was. ``is_start``: either side begins with it; ``begins``: which, if the other one came there by training.
    ``causes``: what differs around it. ``inputs_known``: all inputs of its ranks were recorded. ``generators_known``:
    so were random generators. ``in_one_order``: sums do not depend on the world size. ``size``: as in a comparison.
    """

    kind: Kind
    first: Divergence
    compared: tuple[str, ...]
    is_start: bool
    previous: int | None
    begins: str = ""
    causes: frozenset[str] = frozenset()
    inputs_known: bool = False
    generators_known: bool = False
    in_one_order: bool = False
    size: float | None = None
    growth: Growth | None = None


@dataclass
class _Sentences:
    told: list[str] = field(default_factory=list)

    def __call__(self, text: str, when: bool = True) -> None:
        if when:
            self.told.append(text)


def meaning(evidence: Evidence) -> str:
    """Sentences that say no more than the evidence does."""
    say = _Sentences()
    table = _BETWEEN_RANKS if evidence.kind == "ranks" else _AT_START if evidence.is_start else _BETWEEN_RUNS
    if not evidence.is_start:
        _since(evidence, say)
    table[evidence.first.phase](evidence, say)
    if evidence.kind == "sizes":
        _other_order(evidence, say)
    if evidence.kind != "ranks":
        _size(evidence, say)
    return " ".join(say.told)


def _start_settings(evidence: Evidence, say: _Sentences) -> None:
    say(f"{_begin(evidence)} other settings of the optimizer: {_values(evidence)}.")


def _start_optimizer(evidence: Evidence, say: _Sentences) -> None:
    if label := _only_one(evidence):
        say(f"Only {label} holds it there: was the optimizer's state left out of a checkpoint, or of loading it?")
    else:
        say(f"{_begin(evidence)} another state of the optimizer: another checkpoint, or one loaded in one run only.")


def _start_parameters(evidence: Evidence, say: _Sentences) -> None:
    say(f"{_begin(evidence)} other weights: another seed, another initialisation or another checkpoint.")
    say("Their seeds differ.", "seed" in evidence.causes)


def _start_buffers(evidence: Evidence, say: _Sentences) -> None:
    say("Weights agree.", "parameters" in evidence.compared)
    say(f"{_begin(evidence)} other buffers: a checkpoint without them, or a forward pass before the start.")


def _begin(evidence: Evidence) -> str:
    if not evidence.begins:
        return "The runs begin with"
    return f"{evidence.begins} begins there, and the other run has trained up to there. It begins with"


def _local(evidence: Evidence, say: _Sentences) -> None:
    say("The gradients that a rank made itself part them: what went in, what was computed, or what it began from.")
    _changed_set(evidence, say)
    data = evidence.causes & {call_diff.DATA, call_diff.SHAPE}
    batches = call_diff.MICRO_BATCHES in evidence.causes
    random = call_diff.GENERATORS in evidence.causes
    say("The forward passes were given micro-batches of another shape.", call_diff.SHAPE in data)
    say("The forward passes were given other data.", data == {call_diff.DATA})
    say("The runs took another number of micro-batches.", batches)
    say("Random generators differ, so dropout may have drawn other masks.", random)
    say("Whether the data differ cannot be told: not all inputs were recorded.", not data and not evidence.inputs_known)
    no_data = evidence.inputs_known and not data
    no_random = evidence.generators_known and not random
    say("The forward passes were given equal data, so the data are ruled out.", no_data)
    # Generators are looked at in the call; what micro_batch_rng() seeds before it has gone by then.
    # Given other data, equal generators may still have drawn a mask for another place.
    say(
        "Random generators are equal, so dropout has drawn from the same numbers.",
        no_random and not data and not evidence.in_one_order,
    )
    say(
        "Look at: other code or arguments of the model, loss or its scale, weights or buffers written since the step "
        "before was recorded, gradients left over (zero_grad) or edited before the call, other targets in a loss "
        "outside the module, other arithmetic (threads, kernels, versions, a kernel that is not deterministic).",
        no_data and no_random and not batches and not _only_one(evidence),
    )


def _reduced(evidence: Evidence, say: _Sentences) -> None:
    shares = evidence.causes & {call_diff.SAMPLE_SIZE, call_diff.TOOK_PART, *call_diff.ITEMS}
    if shares:
        say("The ranks took other amounts, which the sum is divided by or made of.")
    elif evidence.kind == "sizes":
        say("Local gradients of other world sizes cannot be compared, so they or their sum may part the runs.")
    elif "local_gradients" in evidence.compared:
        say(
            "All local gradients agree, so their reduction parts the runs: the order of the sum (buffer_size, backend, "
            "hosts), reduce_dtype, a communication hook, or a transport that does not keep its bits."
        )
    else:
        say("Local gradients were not recorded by both, so whether they or their sum part the runs cannot be told.")
    _changed_set(evidence, say)
    say("The forward passes were given other data.", bool(evidence.causes & {call_diff.DATA, call_diff.SHAPE}))


def _settings(evidence: Evidence, say: _Sentences) -> None:
    say(f"A setting of the optimizer parts the runs: {_values(evidence)}. Another schedule or another argument.")
    say("Gradients agree up to there.", "reduced_gradients" in evidence.compared)


def _optimizer(evidence: Evidence, say: _Sentences) -> None:
    say(f"{_agreed(evidence)}what came after the step before, apart from them, parts the runs.")
    say(
        "Gradients clipped or edited before step(), a step left out or taken twice, a write to the optimizer's state "
        "(or to weights, which weight decay carries there), or other arithmetic of the optimizer."
    )
    _changed_set(evidence, say)


def _parameters(evidence: Evidence, say: _Sentences) -> None:
    if "optimizer" in evidence.compared:
        say(f"{_agreed(evidence)}only weights part the runs.")
        say("A write to them outside of step(), a step left out or taken twice, other arithmetic, or memory.")
    else:
        say(f"{_agreed(evidence)}what came between the call and the end of the step parts the runs.")
        say("Gradients clipped or edited there, another learning rate if none was recorded, or a write to weights.")
    _changed_set(evidence, say)


def _buffers(evidence: Evidence, say: _Sentences) -> None:
    say("Only buffers part the runs.", "parameters" in evidence.compared)
    say(
        "Forward passes in training mode that made no gradients (evaluation without eval()), another momentum or code "
        "of the layer, or a write to them."
    )
    _changed_set(evidence, say)


def _ranks_settings(_: Evidence, say: _Sentences) -> None:
    say("Ranks hold other settings of the optimizer: a scheduler that is ahead, or an argument that depends on rank.")


def _ranks_reduced(_: Evidence, say: _Sentences) -> None:
    say(
        "Ranks left one call with other gradients: a transport or memory that does not keep its bits, or a "
        "communication hook that reduces in sub-groups by design."
    )


def _ranks_optimizer(evidence: Evidence, say: _Sentences) -> None:
    if evidence.is_start:
        say("Ranks begin with another state of the optimizer: a checkpoint loaded on some of them alone.")
    else:
        say(f"{_agreed(evidence)}what came after the step before, apart from them, parts the ranks.")
        say(
            "Gradients clipped or edited on some ranks alone, a step left out, a write to the optimizer's state (or to "
            "weights, which weight decay carries there), or memory."
        )


def _ranks_parameters(evidence: Evidence, say: _Sentences) -> None:
    if evidence.is_start:
        say("Ranks begin with other weights: seeds with init_sync=False, or a checkpoint loaded on some ranks alone.")
    else:
        say(f"{_agreed(evidence)}what came after the step before, apart from them, parts the ranks.")
        say("A write to weights outside of step(), a step left out on some ranks, a clip of their own, or memory.")


def _ranks_buffers(_: Evidence, say: _Sentences) -> None:
    say("Buffers of ranks part, often statistics of each rank's own data (BatchNorm, an average).")
    say(
        'If that is meant, leave them out here, --local-buffers "*.running_*", and in the training, '
        'Checks(local_buffers=("*.running_*",)); else call broadcast_buffers().'
    )


_AT_START: dict[str, Callable[[Evidence, _Sentences], None]] = {
    "settings": _start_settings,
    "optimizer": _start_optimizer,
    "parameters": _start_parameters,
    "buffers": _start_buffers,
}
_BETWEEN_RUNS: dict[str, Callable[[Evidence, _Sentences], None]] = {
    "local_gradients": _local,
    "reduced_gradients": _reduced,
    "settings": _settings,
    "optimizer": _optimizer,
    "parameters": _parameters,
    "buffers": _buffers,
}
_BETWEEN_RANKS: dict[str, Callable[[Evidence, _Sentences], None]] = {
    "reduced_gradients": _ranks_reduced,
    "settings": _ranks_settings,
    "optimizer": _ranks_optimizer,
    "parameters": _ranks_parameters,
    "buffers": _ranks_buffers,
}


def _agreed(evidence: Evidence) -> str:
    """What of the step agrees before the phase, as far as it was recorded."""
    names = {"reduced_gradients": "reduced gradients", "settings": "settings", "optimizer": "optimizer state"}
    order = list(names)
    upto = order.index(evidence.first.phase) if evidence.first.phase in order else len(order)
    agree = [names[phase] for phase in order[:upto] if phase in evidence.compared]
    missing = [names[phase] for phase in order[:upto] if phase not in evidence.compared and phase != "optimizer"]
    text = (
        f"{' and '.join([', '.join(agree[:-1]), agree[-1]] if len(agree) > 1 else agree)} agree, so " if agree else ""
    )
    unknown = f"{' and '.join(missing)} were not recorded; " if missing else ""
    return (unknown + text)[:1].upper() + (unknown + text)[1:]


def _since(evidence: Evidence, say: _Sentences) -> None:
    step, previous = evidence.first.step, evidence.previous
    say(f"All that was compared up to step {previous} agrees.", previous == step - 1)
    if previous is None:
        say("Nothing before this step was compared, so the cause may lie earlier.")
    elif previous != step - 1:
        say(f"Steps after {previous} and before this one were not compared, so the cause may lie in any of them.")


def _other_order(evidence: Evidence, say: _Sentences) -> None:
    if evidence.is_start:
        return
    if evidence.in_one_order and call_diff.ITEMS[0] not in evidence.causes:
        say(
            "Both add gradients in the order of a tree (reproducible=True): with a no_sync() block for each "
            "micro-batch the order of the sum is not the reason. A loss divided by the micro-batches of a rank would "
            "be one, and random numbers that follow from the rank."
        )
    else:
        say("Runs of other world sizes can be expected to hold the same bits only if sums are taken in the same order.")


def _size(evidence: Evidence, say: _Sentences) -> None:
    if evidence.size is None:
        return
    if evidence.size > ROUNDING:
        say(f"Norms there differ by up to {evidence.size:.2g} relative: more than rounding usually makes at once.")
        return
    say(f"Norms there differ by at most {evidence.size:.2g} relative: of rounding size, judged by norms alone.")
    if (growth := evidence.growth) and growth.name:
        say(f"It grows beyond {GROWN:.1%} at step {growth.step}: {growth.name}.")
    elif growth:
        say(f"Up to step {growth.last}, no norm of weights or reduced gradients differs by more than {GROWN:.1%}.")


def _changed_set(evidence: Evidence, say: _Sentences) -> None:
    if label := _only_one(evidence):
        say(f"Only {label} holds {evidence.first.name}.")


def _only_one(evidence: Evidence) -> str:
    """The label of the only side that holds it, empty if both do."""
    holders = [side.label for side in evidence.first.sides if side.word is not None]
    return holders[0] if len(holders) == 1 else ""


def _values(evidence: Evidence) -> str:
    sides = [f"{side.word or 'nothing'} in {side.label}" for side in evidence.first.sides]
    return f"{evidence.first.name} is {' and '.join(sides)}"

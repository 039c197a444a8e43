"""Explanation of the first divergence: sentences chosen by its phase and by the evidence. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from legacy_ddp.debug._diff import causes
from legacy_ddp.debug._diff.pair import GROWTH_LIMIT, ROUNDING_LIMIT, Growth
from legacy_ddp.debug._diff.result import Divergence

Kind = Literal["runs", "sizes", "ranks"]
"""Two runs, two runs of different world sizes, or the ranks of one run."""

_PHASES_BEFORE = {"reduced_gradients": "reduced gradients", "settings": "settings", "optimizer": "optimizer state"}


@dataclass(frozen=True)
class Evidence:
    """Facts about the first divergence.

    ``compared``: phases recorded on both sides. ``previous``: the last compared step before the divergence, None
    without any. ``is_start``: the divergence is at the start of a run; ``starting_run``: A or B if only this run starts
    there. ``causes``: names of the possible causes. ``inputs_known``, ``generators_known``: inputs and random
    generators of the differing ranks were recorded. ``reproducible``: sums do not depend on the world size. ``size``:
    as in :class:`Comparison`.
    """

    kind: Kind
    first: Divergence
    compared: tuple[str, ...]
    is_start: bool
    previous: int | None
    starting_run: str = ""
    causes: frozenset[str] = frozenset()
    inputs_known: bool = False
    generators_known: bool = False
    reproducible: bool = False
    size: float | None = None
    growth: Growth | None = None

    @property
    def only_side(self) -> str:
        """Label of the only side with a value; empty if several sides have a value."""
        labels = [side.label for side in self.first.sides if side.value is not None]
        return labels[0] if len(labels) == 1 else ""

    @property
    def values(self) -> str:
        """``lr of parameter group 0 is 0.1 in A and 0.2 in B``."""
        sides = [f"{side.value or 'nothing'} in {side.label}" for side in self.first.sides]
        return f"{self.first.name} is {' and '.join(sides)}"

    @property
    def earlier_phases(self) -> str:
        """Beginning of a sentence: the earlier phases of the step which agree, and those without a record."""
        phases = list(_PHASES_BEFORE)
        earlier = phases[: phases.index(self.first.phase)] if self.first.phase in phases else phases
        agree = [_PHASES_BEFORE[phase] for phase in earlier if phase in self.compared]
        missing = [_PHASES_BEFORE[phase] for phase in earlier if phase not in self.compared and phase != "optimizer"]
        text = f"{' and '.join(missing)} were not recorded; " if missing else ""
        if agree:
            *others, last = agree
            text += f"{', '.join(others)} and {last} agree, so " if others else f"{last} agree, so "
        return text[:1].upper() + text[1:]


def _start_settings(evidence: Evidence) -> Iterator[str]:
    yield f"{_begin_with(evidence)} other settings of the optimizer: {evidence.values}."


def _start_optimizer(evidence: Evidence) -> Iterator[str]:
    if label := evidence.only_side:
        yield f"Only {label} holds it there: was the optimizer's state left out of a checkpoint, or of loading it?"
    else:
        begin = _begin_with(evidence)
        yield f"{begin} another state of the optimizer: another checkpoint, or one loaded in one run only."


def _start_parameters(evidence: Evidence) -> Iterator[str]:
    yield f"{_begin_with(evidence)} other weights: another seed, another initialisation or another checkpoint."
    if "seed" in evidence.causes:
        yield "Their seeds differ."


def _start_buffers(evidence: Evidence) -> Iterator[str]:
    if "parameters" in evidence.compared:
        yield "Weights agree."
    yield f"{_begin_with(evidence)} other buffers: a checkpoint without them, or a forward pass before the start."


def _begin_with(evidence: Evidence) -> str:
    if not evidence.starting_run:
        return "The runs begin with"
    return f"{evidence.starting_run} begins there, and the other run has trained up to there. It begins with"


def _local_gradients(evidence: Evidence) -> Iterator[str]:
    yield "Local gradients are the first to differ: other inputs, another computation, or another state before it."
    yield from _only_side(evidence)
    data = evidence.causes & {causes.DATA, causes.SHAPE}
    batches = evidence.causes & {causes.MICRO_BATCHES, causes.FORWARDS}
    random = causes.GENERATORS in evidence.causes
    if causes.SHAPE in data:
        yield "The forward passes were given micro-batches of another shape."
    if data == {causes.DATA}:
        yield "The forward passes were given other data."
    if batches:
        yield f"The runs took another number of {' and of '.join(sorted(batches))}."
    if random:
        yield "Random generators differ, so dropout may have drawn other masks."
    if not data and not evidence.inputs_known:
        yield "Whether the data differ cannot be told: not all inputs were recorded."
    equal_data = evidence.inputs_known and not data and not batches
    equal_random = evidence.generators_known and not random
    if equal_data:
        yield "The forward passes were given equal data, so the data are ruled out."
    # Not with micro_batch_rng() (reproducible runs): its seeds are gone before the call records the generators. Not
    # with other data: equal generators may have drawn the mask for another tensor.
    if equal_random and not data and not evidence.reproducible:
        yield "Random generators are equal, so dropout has drawn from the same numbers."
    if equal_data and equal_random and not batches and not evidence.only_side:
        yield (
            "Look at: other code or arguments of the model, loss or its scale, weights or buffers written since the "
            "step before was recorded, gradients left over (zero_grad) or edited before the call, other targets in a "
            "loss outside the module, other arithmetic (threads, kernels, versions, a kernel that is not "
            "deterministic)."
        )


def _reduced_gradients(evidence: Evidence) -> Iterator[str]:
    if evidence.causes & {causes.SAMPLE_SIZE, causes.TOOK_PART, *causes.TOTALS}:
        yield "The ranks took other amounts, which the sum is divided by or made of."
    elif evidence.kind == "sizes":
        yield "Local gradients of other world sizes cannot be compared, so they or their sum may part the runs."
    elif "local_gradients" in evidence.compared:
        yield (
            "All local gradients agree, so their reduction parts the runs: the order of the sum (buffer_size, backend, "
            "hosts), reduce_dtype, a communication hook, or a transport that does not keep its bits."
        )
    else:
        yield "Local gradients were not recorded by both, so whether they or their sum part the runs cannot be told."
    yield from _only_side(evidence)
    if evidence.causes & {causes.DATA, causes.SHAPE}:
        yield "The forward passes were given other data."


def _settings(evidence: Evidence) -> Iterator[str]:
    yield f"A setting of the optimizer parts the runs: {evidence.values}. Another schedule or another argument."
    if "reduced_gradients" in evidence.compared:
        yield "Gradients agree up to there."


def _optimizer(evidence: Evidence) -> Iterator[str]:
    yield f"{evidence.earlier_phases}something else after the previous step parts the runs."
    yield (
        "Gradients clipped or edited before step(), a step left out or taken twice, a write to the optimizer's state "
        "(or to weights, which weight decay carries there), or other arithmetic of the optimizer."
    )
    yield from _only_side(evidence)


def _parameters(evidence: Evidence) -> Iterator[str]:
    if "optimizer" in evidence.compared:
        yield f"{evidence.earlier_phases}only weights part the runs."
        yield "A write to them outside of step(), a step left out or taken twice, other arithmetic, or memory."
    else:
        yield f"{evidence.earlier_phases}what came between the call and the end of the step parts the runs."
        yield "Gradients clipped or edited there, another learning rate if none was recorded, or a write to weights."
    yield from _only_side(evidence)


def _buffers(evidence: Evidence) -> Iterator[str]:
    if "parameters" in evidence.compared:
        yield "Only buffers part the runs."
    yield (
        "Forward passes in training mode that made no gradients (evaluation without eval()), another momentum or code "
        "of the layer, or a write to them."
    )
    yield from _only_side(evidence)


def _only_side(evidence: Evidence) -> Iterator[str]:
    if label := evidence.only_side:
        yield f"Only {label} holds {evidence.first.name}."


AT_START: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "settings": _start_settings,
    "optimizer": _start_optimizer,
    "parameters": _start_parameters,
    "buffers": _start_buffers,
}
BETWEEN_RUNS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "local_gradients": _local_gradients,
    "reduced_gradients": _reduced_gradients,
    "settings": _settings,
    "optimizer": _optimizer,
    "parameters": _parameters,
    "buffers": _buffers,
}


def _rank_settings(_: Evidence) -> Iterator[str]:
    yield "Ranks hold other settings of the optimizer: a scheduler that is ahead, or an argument that depends on rank."


def _rank_reduced_gradients(_: Evidence) -> Iterator[str]:
    yield (
        "Ranks left one call with other gradients: a transport or memory that does not keep its bits, or a "
        "communication hook that reduces in sub-groups by design."
    )


def _rank_optimizer(evidence: Evidence) -> Iterator[str]:
    if evidence.is_start:
        yield "Ranks begin with another state of the optimizer: a checkpoint loaded on some of them alone."
        return
    yield f"{evidence.earlier_phases}something else after the previous step parts the ranks."
    yield (
        "Gradients clipped or edited on some ranks alone, a step left out, a write to the optimizer's state (or to "
        "weights, which weight decay carries there), or memory."
    )


def _rank_parameters(evidence: Evidence) -> Iterator[str]:
    if evidence.is_start:
        yield "Ranks begin with other weights: seeds with init_sync=False, or a checkpoint loaded on some ranks alone."
        return
    yield f"{evidence.earlier_phases}something else after the previous step parts the ranks."
    yield "A write to weights outside of step(), a step left out on some ranks, a clip of their own, or memory."


def _rank_buffers(_: Evidence) -> Iterator[str]:
    yield "Buffers of ranks part, often statistics of each rank's own data (BatchNorm, an average)."
    yield (
        'If that is meant, leave them out here, --local-buffers "*.running_*", and in the training, '
        'Checks(local_buffers=("*.running_*",)); else call broadcast_buffers().'
    )


BETWEEN_RANKS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "reduced_gradients": _rank_reduced_gradients,
    "settings": _rank_settings,
    "optimizer": _rank_optimizer,
    "parameters": _rank_parameters,
    "buffers": _rank_buffers,
}


def explain(evidence: Evidence) -> str:
    """The sentences which the evidence supports."""
    return " ".join(_sentences(evidence))


def _sentences(evidence: Evidence) -> Iterator[str]:
    if not evidence.is_start:
        yield from _previous_steps(evidence)
    table = BETWEEN_RANKS if evidence.kind == "ranks" else AT_START if evidence.is_start else BETWEEN_RUNS
    yield from table[evidence.first.phase](evidence)
    if evidence.kind == "sizes" and not evidence.is_start:
        yield _world_sizes(evidence)
    if evidence.kind != "ranks" and evidence.size is not None:
        yield from _size(evidence, evidence.size)


def _previous_steps(evidence: Evidence) -> Iterator[str]:
    step, previous = evidence.first.step, evidence.previous
    if previous is None:
        yield "Nothing before this step was compared, so the cause may lie earlier."
    elif previous == step - 1:
        yield f"All that was compared up to step {previous} agrees."
    else:
        yield f"Steps after {previous} and before this one were not compared, so the cause may lie in any of them."


def _world_sizes(evidence: Evidence) -> str:
    if evidence.reproducible and causes.TOTALS[0] not in evidence.causes:
        return (
            "Both add gradients in the order of a tree (reproducible=True): with a no_sync() block for each "
            "micro-batch the order of the sum is not the reason. A loss divided by the micro-batches of a rank would "
            "be one, and random numbers that follow from the rank."
        )
    return "Runs of other world sizes can be expected to hold the same bits only if sums are taken in the same order."


def _size(evidence: Evidence, size: float) -> Iterator[str]:
    if size > ROUNDING_LIMIT:
        yield f"Norms there differ by up to {size:.2g} relative: more than rounding usually makes at once."
        return
    yield f"Norms there differ by at most {size:.2g} relative: of rounding size, judged by norms alone."
    if (growth := evidence.growth) and growth.name:
        yield f"It grows beyond {GROWTH_LIMIT:.1%} at step {growth.step}: {growth.name}."
    elif growth:
        yield (
            f"Up to step {growth.last}, no norm of weights or reduced gradients differs by more than "
            f"{GROWTH_LIMIT:.1%}."
        )

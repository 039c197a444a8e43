"""Explanation of the first divergence: a table of sentences, each with its condition on the evidence. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff.causes import (
    DATA,
    FORWARDS,
    GENERATORS,
    MICRO_BATCHES,
    SAMPLE_SIZE,
    SHAPE,
    TOOK_PART,
    TOTALS,
)
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
    as in :class:`Comparison`. ``world_size``: of one run, to speak of a majority.
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
    world_size: int = 0

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

    @property
    def other_data(self) -> frozenset[str]:
        """Differences between the arguments of forward passes."""
        return self.causes & {DATA, SHAPE}

    @property
    def other_numbers(self) -> frozenset[str]:
        """Differences between the numbers of forward passes and of micro-batches."""
        return self.causes & {MICRO_BATCHES, FORWARDS}

    @property
    def other_amounts(self) -> frozenset[str]:
        """Differences between the amounts that the sum is divided by or made of."""
        return self.causes & {SAMPLE_SIZE, TOOK_PART, *TOTALS}

    @property
    def equal_data(self) -> bool:
        """Whether the forward passes were given equal data on both sides."""
        return self.inputs_known and not self.other_data and not self.other_numbers

    @property
    def equal_generators(self) -> bool:
        return self.generators_known and GENERATORS not in self.causes

    @property
    def adds_in_tree(self) -> bool:
        """Whether both runs added equal numbers of micro-batches in an order independent of the world size."""
        return self.reproducible and TOTALS[0] not in self.causes

    @property
    def is_rounding(self) -> bool:
        return self.size is not None and self.size <= ROUNDING_LIMIT

    @property
    def begin_with(self) -> str:
        """Beginning of a sentence about the start of one run, or of both."""
        if not self.starting_run:
            return "The runs begin with"
        return f"{self.starting_run} begins there, and the other run has trained up to there. It begins with"

    @property
    def numbers(self) -> str:
        """``forward passes and of micro-batches``."""
        return " and of ".join(sorted(self.other_numbers))

    @property
    def agreeing(self) -> int:
        """The number of ranks in the majority."""
        return self.world_size - len(self.first.ranks)

    @property
    def outside(self) -> str:
        """The ranks outside the majority."""
        return name_ranks(self.first.ranks)


Rows = tuple[str | tuple[Callable[[Evidence], object], str], ...]
"""Sentences, with attributes of the evidence ``e`` in braces. A sentence with a condition is told if it is true."""


def explain(evidence: Evidence) -> str:
    """The sentences that the evidence supports, in the order of the table."""
    rows = [row if isinstance(row, tuple) else (lambda _: True, row) for row in _rows(evidence)]
    return " ".join(sentence.format(e=evidence) for holds, sentence in rows if holds(evidence))


def _rows(evidence: Evidence) -> Rows:
    start, phase = evidence.is_start, evidence.first.phase
    before = () if start else _STEPS_BEFORE
    if evidence.kind == "ranks":
        return (*_MAJORITY, *before, (_RANKS_AT_START if start else _BETWEEN_RANKS)[phase])
    sizes = _WORLD_SIZES if evidence.kind == "sizes" and not start else ()
    return (*before, *(_RUNS_AT_START if start else _BETWEEN_RUNS)[phase], *sizes, *_SIZE)


_MAJORITY: Rows = (
    (lambda e: not e.agreeing, "No majority: nothing tells which ranks to look at."),
    (lambda e: e.agreeing, "{e.agreeing} of {e.world_size} ranks agree; a majority speaks against {e.outside}."),
)
_STEPS_BEFORE: Rows = (
    (lambda e: e.previous is None, "Nothing before this step was compared, so the cause may lie earlier."),
    (lambda e: e.previous == e.first.step - 1, "All that was compared up to step {e.previous} agrees."),
    (
        lambda e: e.previous is not None and e.previous < e.first.step - 1,
        "Steps after {e.previous} and before this one were not compared, so the cause may lie in any of them.",
    ),
)
_ONLY_SIDE: Rows = ((lambda e: e.only_side, "Only {e.only_side} holds {e.first.name}."),)

_RUNS_AT_START: dict[str, Rows] = {
    "settings": ("{e.begin_with} other settings of the optimizer: {e.values}.",),
    "optimizer": (
        (
            lambda e: e.only_side,
            "Only {e.only_side} holds it there: was the optimizer's state left out of a checkpoint, or of loading it?",
        ),
        (
            lambda e: not e.only_side,
            "{e.begin_with} another state of the optimizer: another checkpoint, or one loaded in one run only.",
        ),
    ),
    "parameters": (
        "{e.begin_with} other weights: another seed, another initialisation or another checkpoint.",
        (lambda e: "seed" in e.causes, "Their seeds differ."),
    ),
    "buffers": (
        (lambda e: "parameters" in e.compared, "Weights agree."),
        "{e.begin_with} other buffers: a checkpoint without them, or a forward pass before the start.",
    ),
}

_BETWEEN_RUNS: dict[str, Rows] = {
    "local_gradients": (
        "Local gradients are the first to differ: other inputs, another computation, or another state before it.",
        *_ONLY_SIDE,
        (lambda e: SHAPE in e.causes, "The forward passes were given micro-batches of another shape."),
        (lambda e: e.other_data == {DATA}, "The forward passes were given other data."),
        (lambda e: e.other_numbers, "The runs took another number of {e.numbers}."),
        (lambda e: GENERATORS in e.causes, "Random generators differ, so dropout may have drawn other masks."),
        (
            lambda e: not e.other_data and not e.inputs_known,
            "Whether the data differ cannot be told: not all inputs were recorded.",
        ),
        (lambda e: e.equal_data, "The forward passes were given equal data, so the data are ruled out."),
        (
            # Not with micro_batch_rng() (reproducible runs): its seeds are gone before the call records the generators.
            # Not with other data: equal generators may have drawn the mask for another tensor.
            lambda e: e.equal_generators and not e.other_data and not e.reproducible,
            "Random generators are equal, so dropout has drawn from the same numbers.",
        ),
        (
            lambda e: e.equal_data and e.equal_generators and not e.only_side,
            "Look at: other code or arguments of the model, loss or its scale, weights or buffers written since the "
            "step before was recorded, gradients left over (zero_grad) or edited before the call, other targets in a "
            "loss outside the module, other arithmetic (threads, kernels, versions, a kernel that is not "
            "deterministic).",
        ),
    ),
    "reduced_gradients": (
        (lambda e: e.other_amounts, "The ranks took other amounts, which the sum is divided by or made of."),
        (
            lambda e: not e.other_amounts and e.kind == "sizes",
            "Local gradients of other world sizes cannot be compared, so they or their sum may part the runs.",
        ),
        (
            lambda e: not e.other_amounts and e.kind == "runs" and "local_gradients" in e.compared,
            "All local gradients agree, so their reduction parts the runs: the order of the sum (buffer_size, backend, "
            "hosts), reduce_dtype, a communication hook, or a transport that does not keep its bits.",
        ),
        (
            lambda e: not e.other_amounts and e.kind == "runs" and "local_gradients" not in e.compared,
            "Local gradients were not recorded by both, so whether they or their sum part the runs cannot be told.",
        ),
        *_ONLY_SIDE,
        (lambda e: e.other_data, "The forward passes were given other data."),
    ),
    "settings": (
        "A setting of the optimizer parts the runs: {e.values}. Another schedule or another argument.",
        (lambda e: "reduced_gradients" in e.compared, "Gradients agree up to there."),
    ),
    "optimizer": (
        (
            "{e.earlier_phases}something else after the previous step parts the runs. Gradients clipped or edited "
            "before step(), a step left out or taken twice, a write to the optimizer's state (or to weights, which "
            "weight decay carries there), or other arithmetic of the optimizer."
        ),
        *_ONLY_SIDE,
    ),
    "parameters": (
        (
            lambda e: "optimizer" in e.compared,
            "{e.earlier_phases}only weights part the runs. A write to them outside of step(), a step left out or taken "
            "twice, other arithmetic, or memory.",
        ),
        (
            lambda e: "optimizer" not in e.compared,
            "{e.earlier_phases}what came between the call and the end of the step parts the runs. Gradients clipped or "
            "edited there, another learning rate if none was recorded, or a write to weights.",
        ),
        *_ONLY_SIDE,
    ),
    "buffers": (
        (lambda e: "parameters" in e.compared, "Only buffers part the runs."),
        (
            "Forward passes in training mode that made no gradients (evaluation without eval()), another momentum or "
            "code of the layer, or a write to them."
        ),
        *_ONLY_SIDE,
    ),
}

_BETWEEN_RANKS: dict[str, str] = {
    "reduced_gradients": (
        "Ranks left one call with other gradients: a transport or memory that does not keep its bits, or a "
        "communication hook that reduces in sub-groups by design."
    ),
    "settings": (
        "Ranks hold other settings of the optimizer: a scheduler that is ahead, or an argument that depends on rank."
    ),
    "optimizer": (
        "{e.earlier_phases}something else after the previous step parts the ranks. Gradients clipped or edited on "
        "some ranks alone, a step left out, a write to the optimizer's state (or to weights, which weight decay "
        "carries there), or memory."
    ),
    "parameters": (
        "{e.earlier_phases}something else after the previous step parts the ranks. A write to weights outside of "
        "step(), a step left out on some ranks, a clip of their own, or memory."
    ),
    "buffers": (
        "Buffers of ranks part, often statistics of each rank's own data (BatchNorm, an average). If that is "
        'meant, leave them out here, --local-buffers "*.running_*", and in the training, '
        'Checks(local_buffers=("*.running_*",)); else call broadcast_buffers().'
    ),
}
_RANKS_AT_START: dict[str, str] = {
    **_BETWEEN_RANKS,
    "optimizer": "Ranks begin with another state of the optimizer: a checkpoint loaded on some of them alone.",
    "parameters": (
        "Ranks begin with other weights: seeds with init_sync=False, or a checkpoint loaded on some ranks alone."
    ),
}

_WORLD_SIZES: Rows = (
    (
        lambda e: e.adds_in_tree,
        "Both add gradients in the order of a tree (reproducible=True): with a no_sync() block for each micro-batch "
        "the order of the sum is not the reason. A loss divided by the micro-batches of a rank would be one, and "
        "random numbers that follow from the rank.",
    ),
    (
        lambda e: not e.adds_in_tree,
        "Runs of other world sizes can be expected to hold the same bits only if sums are taken in the same order.",
    ),
)
_SIZE: Rows = (
    (
        lambda e: e.size is not None and not e.is_rounding,
        "Norms there differ by up to {e.size:.2g} relative: more than rounding usually makes at once.",
    ),
    (
        lambda e: e.is_rounding,
        "Norms there differ by at most {e.size:.2g} relative: of rounding size, judged by norms alone.",
    ),
    (
        lambda e: e.is_rounding and e.growth and e.growth.name,
        f"It grows beyond {GROWTH_LIMIT:.1%} at step {{e.growth.step}}: {{e.growth.name}}.",
    ),
    (
        lambda e: e.is_rounding and e.growth and not e.growth.name,
        "Up to step {e.growth.last}, no norm of weights or reduced gradients differs by more than "
        f"{GROWTH_LIMIT:.1%}.",
    ),
)

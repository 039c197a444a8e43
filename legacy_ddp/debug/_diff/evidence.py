"""Explanation of the first divergence: a table of sentences, each with its condition on the evidence. Pure."""

from dataclasses import dataclass
from typing import Literal

from legacy_ddp._text import list_some, listed, name_ranks
from legacy_ddp.debug._diff.causes import (
    DATA,
    FORWARDS,
    GENERATORS,
    MICRO_BATCHES,
    SAMPLE_SIZE,
    SHAPE,
    TAKEN,
    TOOK_PART,
    TOTALS,
    SettingDifference,
    chooses_implementation,
)
from legacy_ddp.debug._diff.pair import GROWTH_LIMIT, Growth
from legacy_ddp.debug._diff.result import ROUNDING_LIMIT, Divergence
from legacy_ddp.debug._operations.meaning import Rule, always, explain_by

Kind = Literal["runs", "sizes", "ranks"]
"""Two runs, two runs of different world sizes, or the ranks of one run."""

_PHASES_BEFORE = {"reduced_gradients": "reduced gradients", "settings": "settings", "optimizer": "optimizer state"}


@dataclass(frozen=True)
class Evidence:
    """Facts about the first divergence.

    ``compared``: phases recorded on both sides. ``previous``: the last compared step before the divergence, None
    without any. ``is_start``: the divergence is at the start of a run. ``starting_run``: A or B if only this run starts
    there. ``resumed``: label and start of the run that starts later. ``settings``, ``optimizer_steps``: as in
    :class:`SettingDifferences`. ``causes``: names of the possible causes. ``inputs_known``, ``generators_known``:
    inputs and random generators of the differing ranks were recorded. ``reproducible``: sums do not depend on the world
    size. ``size``: as in :class:`Comparison`. ``growth``: only for a difference of rounding size. ``world_size``: only
    for the ranks of one run.
    """

    kind: Kind
    first: Divergence
    compared: tuple[str, ...]
    is_start: bool
    previous: int | None
    starting_run: str = ""
    resumed: tuple[str, int] | None = None
    settings: tuple[SettingDifference, ...] = ()
    optimizer_steps: tuple[SettingDifference, ...] = ()
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
    def settings_there(self) -> str:
        """The settings that differ in the step of the first difference, as text; empty without any."""
        return list_some([item.name for item in self.settings if item.present])

    @property
    def settings_are_apart(self) -> bool:
        """Whether all of these settings change a step by rounding at most."""
        return all(item.is_apart for item in self.settings if item.present)

    @property
    def implementation(self) -> str:
        """The settings that may explain a difference of rounding size, if no other setting differs there."""
        names = [item.name for item in self.settings if item.present and chooses_implementation(item.name)]
        return list_some(names) if self.is_rounding and self.settings_are_apart else ""

    @property
    def settings_before(self) -> bool:
        return any(item.first < self.first.step for item in self.settings)

    @property
    def settings_after(self) -> str:
        """The settings that differ in the step after a start, as text; empty without any."""
        return list_some([item.name for item in self.settings if item.first > self.first.step])

    @property
    def earlier(self) -> str:
        """The steps in which the first divergence, a setting, differs; empty if it does not differ before."""
        found = (item for item in self.settings if item.name == self.first.name and item.first < self.first.step)
        return next((item.when for item in found), "")

    @property
    def untaken(self) -> str:
        """``The step of the optimizer was taken in A and not taken in B.``; empty if all sides took it."""
        item = next((item for item in self.optimizer_steps if item.present), None)
        if item is None:
            return ""
        value = next(iter(item.present.values()))
        if self.kind != "ranks":
            return f"The {item.name} was {value.a.value} in A and {value.b.value} in B."
        without = [rank for rank, found in item.present.items() if found.b.value != TAKEN] or [0]
        return f"The {item.name} was not taken on {name_ranks(without)}."

    @property
    def earlier_phases(self) -> str:
        """Beginning of a sentence: earlier phases of the step that agree, and those that were not recorded."""
        labels = {**_PHASES_BEFORE, **({"settings": "all other settings"} if self.settings_there else {})}
        phases = list(_PHASES_BEFORE)
        earlier = phases[: phases.index(self.first.phase)] if self.first.phase in phases else phases
        agree = [labels[phase] for phase in earlier if phase in self.compared]
        missing = [_PHASES_BEFORE[phase] for phase in earlier if phase not in self.compared and phase != "optimizer"]
        text = f"{' and '.join(missing)} were not recorded; " if missing else ""
        if agree:
            text += f"{listed(agree)} agree, so "
        return text[:1].upper() + text[1:]

    @property
    def other_data(self) -> frozenset[str]:
        return self.causes & {DATA, SHAPE}

    @property
    def other_numbers(self) -> frozenset[str]:
        return self.causes & {MICRO_BATCHES, FORWARDS}

    @property
    def other_amounts(self) -> frozenset[str]:
        return self.causes & {SAMPLE_SIZE, TOOK_PART, *TOTALS}

    @property
    def equal_data(self) -> bool:
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
        return self.world_size - len(self.first.ranks)

    @property
    def outside(self) -> str:
        return name_ranks(self.first.ranks)


Sentence = str | Rule
"""A text, or a row with the condition and the text. ``{c.values}`` stands for an attribute of the evidence."""
Group = Sentence | list[Sentence]
"""A sentence, or several sentences. Only the first that applies is used."""


def explain(evidence: Evidence) -> str:
    return " ".join(filter(None, (_told(group, evidence) for group in _groups(evidence))))


def _told(group: Group, evidence: Evidence) -> str:
    sentences = group if isinstance(group, list) else [group]
    return explain_by((item if isinstance(item, Rule) else Rule(always, item) for item in sentences), evidence).meaning


def _groups(evidence: Evidence) -> tuple[Group, ...]:
    start, phase = evidence.is_start, evidence.first.phase
    before = () if start else (_STEPS_BEFORE,)
    after = (_SETTINGS_AFTER,) if start else ()
    if evidence.kind == "ranks":
        return (_MAJORITY, *before, (_RANKS_AT_START if start else _BETWEEN_RANKS)[phase], *after)
    sizes = (_WORLD_SIZES,) if evidence.kind == "sizes" and not start else ()
    return (*before, *(_RUNS_AT_START if start else _BETWEEN_RUNS)[phase], *after, *sizes, *_SIZE)


_MAJORITY: Group = [
    Rule(lambda c: not c.agreeing, "No majority: nothing tells which ranks to look at."),
    "{c.agreeing} of {c.world_size} ranks agree; outside of the majority: {c.outside}.",
]
_STEPS_BEFORE: Group = [
    Rule(lambda c: c.previous is None, "Nothing before this step was compared, so the cause may lie earlier."),
    Rule(
        lambda c: c.previous == c.first.step - 1 and c.settings_before,
        "All tensors that were compared up to step {c.previous} agree, also where settings differ.",
    ),
    Rule(lambda c: c.previous == c.first.step - 1, "All that was compared up to step {c.previous} agrees."),
    "Steps after {c.previous} and before this one were not compared, so the cause may lie in any of them.",
]
_ONLY_SIDE = Rule(lambda c: c.only_side, "Only {c.only_side} holds {c.first.name}.")
_UNTAKEN = Rule(lambda c: c.untaken, "{c.untaken} A GradScaler skips a step, and so may a condition of the script.")
_OTHER_SETTINGS: Group = [
    Rule(lambda c: c.implementation, ""),  # the reason, which follows
    Rule(
        lambda c: c.settings_there and c.settings_are_apart,
        "Settings that differ in this step change it by rounding at most: {c.settings_there}.",
    ),
    Rule(lambda c: c.settings_there, "Settings that differ in this step: {c.settings_there}."),
]
_IMPLEMENTATION = Rule(
    lambda c: c.implementation,
    "{c.earlier_phases}the likely cause is another implementation of the step: {c.implementation}.",
)

_SETTINGS_AFTER = Rule(
    lambda c: c.settings_after, "In the next compared step settings differ, too: {c.settings_after}."
)

_RUNS_AT_START: dict[str, tuple[Group, ...]] = {
    "settings": ("{c.begin_with} other settings of the optimizer: {c.values}.",),
    "optimizer": (
        [
            Rule(
                lambda c: c.only_side,
                "Only {c.only_side} holds it there: was the optimizer's state left out of a checkpoint, or of loading "
                "it?",
            ),
            "{c.begin_with} another state of the optimizer: another checkpoint, or one loaded in one run only.",
        ],
    ),
    "parameters": (
        "{c.begin_with} other weights: another seed, another initialisation or another checkpoint.",
        Rule(lambda c: "seed" in c.causes, "Their seeds differ."),
    ),
    "buffers": (
        Rule(lambda c: "parameters" in c.compared, "Weights agree."),
        "{c.begin_with} other buffers: a checkpoint without them, or a forward pass before the start.",
    ),
}

_BETWEEN_RUNS: dict[str, tuple[Group, ...]] = {
    "local_gradients": (
        "Local gradients are the first to differ: other inputs, another computation, or another state before it.",
        _ONLY_SIDE,
        Rule(lambda c: SHAPE in c.causes, "The forward passes were given micro-batches of another shape."),
        Rule(lambda c: c.other_data == {DATA}, "The forward passes were given other data."),
        Rule(lambda c: c.other_numbers, "The runs took another number of {c.numbers}."),
        Rule(lambda c: GENERATORS in c.causes, "Random generators differ, so dropout may have drawn other masks."),
        Rule(
            lambda c: not c.other_data and not c.inputs_known,
            "Whether the data differ cannot be told: not all inputs were recorded.",
        ),
        Rule(lambda c: c.equal_data, "The forward passes were given equal data, so the data are ruled out."),
        Rule(
            # Not for reproducible runs: micro_batch_rng() removes its seeds before the call records the generators.
            # Not with other data: equal generators may have drawn the mask for another tensor.
            lambda c: c.equal_generators and not c.other_data and not c.reproducible,
            "Random generators are equal, so dropout has drawn from the same numbers.",
        ),
        Rule(
            lambda c: c.equal_data and c.equal_generators and not c.only_side,
            "Look at: other code or arguments of the model, loss or its scale, weights or buffers written since the "
            "step before was recorded, gradients left over (zero_grad) or edited before the call, other targets in a "
            "loss outside the module, other arithmetic (threads, kernels, versions, a kernel that is not "
            "deterministic).",
        ),
    ),
    "reduced_gradients": (
        [
            Rule(lambda c: c.other_amounts, "The ranks took other amounts, which the sum is divided by or made of."),
            Rule(
                lambda c: c.kind == "sizes",
                "Local gradients of other world sizes cannot be compared, so the difference may come from them or from "
                "their sum.",
            ),
            Rule(
                lambda c: "local_gradients" in c.compared,
                "All local gradients agree, so the difference comes from their reduction: the order of the sum "
                "(buffer_size, backend, hosts), reduce_dtype, a communication hook, or a transport that does not keep "
                "its bits.",
            ),
            (
                "Local gradients were not recorded by both, so nothing tells whether the difference comes from them or "
                "from their sum."
            ),
        ],
        _ONLY_SIDE,
        Rule(lambda c: c.other_data, "The forward passes were given other data."),
    ),
    "settings": (
        "A setting of the optimizer differs: {c.values}. Look for another schedule or another argument.",
        Rule(lambda c: c.earlier, "It differs {c.earlier}."),
        Rule(
            lambda c: c.resumed,
            "{c.resumed[0]} was resumed at step {c.resumed[1]}: was the state of a scheduler left out of a checkpoint, "
            "or of loading it?",
        ),
        Rule(lambda c: "reduced_gradients" in c.compared, "Gradients agree up to there."),
    ),
    "optimizer": (
        _OTHER_SETTINGS,
        [
            _UNTAKEN,
            _IMPLEMENTATION,
            (
                "{c.earlier_phases}the cause is something else after the previous step. Possible are gradients clipped "
                "or edited before step(), a step left out or taken twice, a write to the optimizer's state (or to "
                "weights, which weight decay carries there), and other arithmetic of the optimizer."
            ),
        ],
        _ONLY_SIDE,
    ),
    "parameters": (
        _OTHER_SETTINGS,
        [
            _UNTAKEN,
            _IMPLEMENTATION,
            Rule(
                lambda c: "optimizer" in c.compared,
                "{c.earlier_phases}only weights differ. Possible are a write to them outside of step(), a step left "
                "out or taken twice, other arithmetic, and memory.",
            ),
            Rule(
                lambda c: "settings" in c.compared,
                "{c.earlier_phases}the cause came between the call and the end of the step. Possible are gradients "
                "clipped or edited there, other arithmetic of the optimizer, and a write to weights.",
            ),
            (
                "{c.earlier_phases}the cause came between the call and the end of the step. Possible are gradients "
                "clipped or edited there, another learning rate if none was recorded, and a write to weights."
            ),
        ],
        _ONLY_SIDE,
    ),
    "buffers": (
        Rule(lambda c: "parameters" in c.compared, "Only buffers differ."),
        (
            "Possible are forward passes in training mode that made no gradients (evaluation without eval()), another "
            "momentum or code of the layer, and a write to buffers."
        ),
        _ONLY_SIDE,
    ),
}

_BETWEEN_RANKS: dict[str, Group] = {
    "reduced_gradients": (
        "Ranks left one call with other gradients: a transport or memory that does not keep its bits, or a "
        "communication hook that reduces in sub-groups by design."
    ),
    "settings": (
        "Ranks hold other settings of the optimizer: a scheduler that is ahead, or an argument that depends on rank."
    ),
    "optimizer": [
        _UNTAKEN,
        "{c.earlier_phases}the cause is something else after the previous step. Possible are gradients clipped or "
        "edited on some ranks only, a step left out, a write to the optimizer's state (or to weights, which weight "
        "decay carries there), and memory.",
    ],
    "parameters": [
        _UNTAKEN,
        "{c.earlier_phases}the cause is something else after the previous step. Possible are a write to weights "
        "outside of step(), a step left out on some ranks, gradients clipped on some ranks only, and memory.",
    ],
    "buffers": (
        "Buffers differ between ranks. Often they are statistics of each rank's own data (BatchNorm, an average). If "
        'that is meant, leave them out here, --local-buffers "*.running_*", and in the training, '
        'Checks(local_buffers=("*.running_*",)); else call broadcast_buffers().'
    ),
}
_RANKS_AT_START: dict[str, Group] = {
    **_BETWEEN_RANKS,
    "optimizer": "Ranks begin with another state of the optimizer: a checkpoint loaded on some of them only.",
    "parameters": (
        "Ranks begin with other weights: seeds with init_sync=False, or a checkpoint loaded on some ranks only."
    ),
}

_WORLD_SIZES: Group = [
    Rule(
        lambda c: c.adds_in_tree,
        "Both add gradients in the order of a tree (reproducible=True): with a no_sync() block for each micro-batch "
        "the order of the sum is not the reason. A loss divided by the micro-batches of a rank would be one, and "
        "random numbers that follow from the rank.",
    ),
    "Runs of other world sizes can be expected to hold the same bits only if sums are taken in the same order.",
]
_SIZE: tuple[Group, ...] = (
    [
        Rule(
            lambda c: c.is_rounding,
            "Norms there differ by at most {c.size:.2g} relative: of rounding size, judged by norms alone.",
        ),
        Rule(
            lambda c: c.size is not None,
            "Norms there differ by up to {c.size:.2g} relative: more than rounding usually makes at once.",
        ),
    ],
    [
        Rule(
            lambda c: c.growth and c.growth.name,
            f"It grows beyond {GROWTH_LIMIT:.1%} at step {{c.growth.step}}: {{c.growth.name}}.",
        ),
        Rule(
            lambda c: c.growth,
            "Up to step {c.growth.last}, no norm of weights or reduced gradients differs by more than "
            f"{GROWTH_LIMIT:.1%}.",
        ),
    ],
)

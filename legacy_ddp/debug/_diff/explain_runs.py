"""Sentences about a divergence between two runs, by phase. Pure."""

from collections.abc import Callable, Iterator

from legacy_ddp.debug._diff import call_diff
from legacy_ddp.debug._diff.evidence import Evidence


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
    data = evidence.causes & {call_diff.DATA, call_diff.SHAPE}
    batches = evidence.causes & {call_diff.MICRO_BATCHES, call_diff.FORWARDS}
    random = call_diff.GENERATORS in evidence.causes
    if call_diff.SHAPE in data:
        yield "The forward passes were given micro-batches of another shape."
    if data == {call_diff.DATA}:
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
    if evidence.causes & {call_diff.SAMPLE_SIZE, call_diff.TOOK_PART, *call_diff.TOTALS}:
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
    if evidence.causes & {call_diff.DATA, call_diff.SHAPE}:
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

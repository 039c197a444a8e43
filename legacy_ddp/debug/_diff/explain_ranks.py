"""Sentences about a divergence between the ranks of one run, by phase. Pure."""

from collections.abc import Callable, Iterator

from legacy_ddp.debug._diff.evidence import Evidence


def _settings(_: Evidence) -> Iterator[str]:
    yield "Ranks hold other settings of the optimizer: a scheduler that is ahead, or an argument that depends on rank."


def _reduced_gradients(_: Evidence) -> Iterator[str]:
    yield (
        "Ranks left one call with other gradients: a transport or memory that does not keep its bits, or a "
        "communication hook that reduces in sub-groups by design."
    )


def _optimizer(evidence: Evidence) -> Iterator[str]:
    if evidence.is_start:
        yield "Ranks begin with another state of the optimizer: a checkpoint loaded on some of them alone."
        return
    yield f"{evidence.earlier_phases}something else after the previous step parts the ranks."
    yield (
        "Gradients clipped or edited on some ranks alone, a step left out, a write to the optimizer's state (or to "
        "weights, which weight decay carries there), or memory."
    )


def _parameters(evidence: Evidence) -> Iterator[str]:
    if evidence.is_start:
        yield "Ranks begin with other weights: seeds with init_sync=False, or a checkpoint loaded on some ranks alone."
        return
    yield f"{evidence.earlier_phases}something else after the previous step parts the ranks."
    yield "A write to weights outside of step(), a step left out on some ranks, a clip of their own, or memory."


def _buffers(_: Evidence) -> Iterator[str]:
    yield "Buffers of ranks part, often statistics of each rank's own data (BatchNorm, an average)."
    yield (
        'If that is meant, leave them out here, --local-buffers "*.running_*", and in the training, '
        'Checks(local_buffers=("*.running_*",)); else call broadcast_buffers().'
    )


BETWEEN_RANKS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "reduced_gradients": _reduced_gradients,
    "settings": _settings,
    "optimizer": _optimizer,
    "parameters": _parameters,
    "buffers": _buffers,
}

"""The meaning of operations of a single sequence. Pure."""

from collections.abc import Mapping, Sequence

from legacy_ddp.debug._operations.describe import Labels, at, short
from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.operation import Operation

_REDUCED_DTYPES = ("bfloat16", "float16")
_MODE = "compare model.training, and train() and eval() of this module"


def explain_sequence(found: OperationDifference, labels: Labels, _: Mapping[str, object]) -> tuple[str, str]:
    """The meaning, and the next step."""
    meaning, next_step = _cause(found, labels)
    if found.has_effect is False:
        meaning = f"{meaning} All operations of both sides have equal values."
    if found.has_effect is None:
        meaning = f"{meaning} Data of each rank's own explain it only where code depends on data."
    return meaning, next_step


def _cause(found: OperationDifference, labels: Labels) -> tuple[str, str]:
    sides = dict(zip(labels, (found.a, found.b), strict=True))
    casts = {label: [item for item in side if _is_cast(item)] for label, side in sides.items()}
    random = {label: [item for item in side if item.generator] for label, side in sides.items()}
    only = [label for label, side in sides.items() if side]
    if label := _only(casts):
        dtype = casts[label][0].outputs[0].kind.partition(" ")[0]
        return (
            f"Other dtype: a cast to {dtype} {at(label)} alone (autocast, or a cast in the code).",
            "compare autocast around the forward pass",
        )
    if label := _only(random):
        return (
            f"Random numbers are drawn {at(label)} alone ({short(random[label][0])}): dropout in training mode against "
            "eval mode, another probability, or other code.",
            _MODE,
        )
    if any("batch_norm" in item.name for side in sides.values() for item in side):
        return "The normalisation takes another form: training mode against eval mode.", _MODE
    if len(only) == 1:
        return (
            f"Operations {at(only[0])} alone: other code, a hook, or another path for other values.",
            "look at the code and the hooks of this module",
        )
    return (
        "The sides run other operations here: other code or arguments, another mode (train, eval), or another version "
        "of torch.",
        "look at the code, the mode and the hooks of this module",
    )


def _only(found: Mapping[str, Sequence[Operation]]) -> str:
    """The label of the only side with operations; empty without operations, and for operations on both sides."""
    labels = [label for label, operations in found.items() if operations]
    return labels[0] if len(labels) == 1 else ""


def _is_cast(operation: Operation) -> bool:
    """Whether the operation turns a floating tensor into one of a reduced dtype."""
    if not operation.name.startswith("aten::_to_copy") or not operation.inputs or not operation.outputs:
        return False
    before, after = (values[0].kind.partition(" ")[0] for values in (operation.inputs, operation.outputs))
    return after in _REDUCED_DTYPES and before != after and before.startswith(("float", "bfloat"))

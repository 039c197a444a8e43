"""The meaning of a different input after equal operations. Pure."""

from collections.abc import Sequence

from legacy_ddp.debug._operations.describe import Labels, at, both, code_of, module_of, numbered, place
from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.operation import Operation

_NO_WRITER = "the input is no parameter, and no recorded operation of this step returned these bits"
_COPIES = "look at {}, and for copies of weights"
_NOT_RECORDED = "a kernel that is not recorded, as of torch.compile"


def explain_input(found: OperationDifference, labels: Labels) -> tuple[str, str]:
    """The meaning, and the next step."""
    if not found.differing_values:
        return "One side passes more tensors.", f"look at the arguments of {module_of(found.operation)}"
    names = _names(found)
    if names[0] != names[1]:
        return (
            f"Another tensor is passed: {_sides(names, labels)} (a copy, a cast, or a tensor kept from an earlier "
            "step).",
            _COPIES.format(code_of(found.operation)),
        )
    return _weight(found) if found.origin.parameter else _other_tensor(found, labels)


def explain_passed(found: OperationDifference, labels: Labels) -> tuple[str, str]:
    """The meaning, and the next step, for an input with equal bits that is another parameter, or none."""
    names = [side[0].parameters[found.passed[0]] for side in (found.a, found.b)]
    return (
        f"Another tensor with equal bits is passed: {_sides(names, labels)} (a copy, or a tensor kept from an earlier "
        "step). Its gradient goes elsewhere, and later writes to the parameter do not reach a copy.",
        _COPIES.format(code_of(found.operation)),
    )


def _sides(names: Sequence[str], labels: Labels) -> str:
    return both([repr(name) if name else "no parameter" for name in names], labels)


def has_unknown_source(found: OperationDifference) -> bool:
    """Whether a differing input is no parameter or buffer, and no recorded operation returned its bits."""
    if found.kind != "input" or not found.differing_values or any(_names(found)):
        return False
    return found.origin.writer_a is None and found.origin.writer_b is None


def _names(found: OperationDifference) -> list[str]:
    """The names of the first differing input on both sides; empty if it is no parameter or buffer."""
    return [side[0].parameters[found.differing[0]] for side in (found.a, found.b)]


def _weight(found: OperationDifference) -> tuple[str, str]:
    name, reader = found.origin.parameter, found.origin.operation_read
    if reader is None:
        return (
            f"The weight or buffer {name!r} came into this step with other bits, or was written inside of the step "
            "before this operation, which no recorded operation did (NumPy, a second thread, an extension).",
            "compare the steps before (record them too; the checkpoint, the optimizer), and look for code that writes "
            "to weights during a step",
        )
    return (
        f"The weight or buffer {name!r} agreed in {numbered(reader.number)}, and changed before "
        f"{numbered(found.operation.number)}, which no recorded operation did: a second thread, a stale pointer, or "
        "memory.",
        "look for threads and extensions that write to weights during a step",
    )


def _other_tensor(found: OperationDifference, labels: Labels) -> tuple[str, str]:
    origin = found.origin
    writers = origin.operation_a, origin.operation_b
    known = [(label, _writer(writer)) for label, writer in zip(labels, writers, strict=True) if writer]
    if origin.is_argument:
        return (
            "Other data: the differing input is an argument of the model's forward pass.",
            "compare the batches (sampler, seed of the data, order)",
        )
    if not known:
        return _data(found)
    if len(known) == 2:
        texts = [f"{writer} {at(label)}" for label, writer in known]
        return (
            f"Another tensor is passed: the output of {' and of '.join(texts)}.",
            f"look at {code_of(found.operation)}",
        )
    label, writer = known[0]
    other = next(item for item in labels if item != label)
    return (
        f"The input is the output of {writer} {at(label)}. It has changed since {at(other)}, which no "
        "recorded operation did (a second thread, a stale pointer, memory), or it is another tensor, kept from an "
        "earlier step.",
        "look for threads, extensions and kept tensors that share memory with this input",
    )


def _writer(operation: Operation) -> str:
    """``operation 6, forward of 1.act (aten::relu),``."""
    return f"{numbered(operation.number)}, {place(operation)},"


def _data(found: OperationDifference) -> tuple[str, str]:
    a, b = found.differing_values[0]
    if a.kind != b.kind:
        return (
            f"Data of another dtype or shape: {a.kind} and {b.kind}.",
            "compare the batches, and dtype and shape of the tensors made from them",
        )
    view = " The input is a strided view: an earlier output, written to by another thread, may also be its source."
    return (
        f"Unknown source: {_NO_WRITER}. Possible are a batch (or a target), a tensor kept from an earlier step, and "
        f"{_NOT_RECORDED}.{view if a.layout else ''}",
        "compare the batches (sampler, seed of the data, order, targets); look for kept tensors; run without "
        "torch.compile, and diff again",
    )

"""The meaning of the first difference of two sequences of operations, and the next step. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from legacy_ddp.debug._operations import explain_input, explain_sequence
from legacy_ddp.debug._operations.describe import Labels, aspects_of, both, code_of, listed, module_of, place, short
from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.operation import Operation

Facts = Mapping[str, tuple[str, str]]
"""Facts of the environment with another value on each side: name, and the value of either side."""

# Facts that choose the kernel of an operation, or the order of its sums.
_KERNEL_FACTS = (
    *("threads", "torch", "cpu", "devices", "mkldnn", "float32 matmul precision", "deterministic algorithms"),
    *("cuda", "cudnn", "cudnn.benchmark", "cudnn.deterministic", "CUBLAS_WORKSPACE_CONFIG", "platform"),
)
# Kernels that may add to one element from several threads (torch.use_deterministic_algorithms lists them).
_UNORDERED = ("index_add", "index_put", "scatter_add", "scatter_reduce", "embedding_dense_backward", "embedding_bag")
CROSS_CHECK = "legacy_ddp.debug.cross_check() repeats the step on another rank and compares the elements"


@dataclass(frozen=True)
class Explanation:
    """``meaning``: one or two sentences. ``next_step``: a phrase."""

    meaning: str
    next_step: str


def explain(found: OperationDifference, labels: Labels = ("A", "B"), facts: Facts | None = None) -> Explanation:
    """The likely cause of a difference. ``facts``: differences of the environments of both sides."""
    if found.kind == "input":
        return Explanation(*explain_input.explain_input(found, labels))
    return Explanation(*_KINDS[found.kind](found, labels, facts or {}))


def _output(found: OperationDifference, labels: Labels, facts: Facts) -> tuple[str, str]:
    a, b = found.a[0], found.b[0]
    kernel = [name for name in _KERNEL_FACTS if name in facts]
    if a.generator != b.generator:
        return _generator(found)
    if a.settings != b.settings:
        return (
            "Other settings: the operation was called with other arguments.",
            f"look at the arguments and the mode (train, eval) of {module_of(a)}",
        )
    if [value.kind for value in a.outputs] != [value.kind for value in b.outputs]:
        return (
            "Other dtype or shape of a result of equal inputs: autocast, a default dtype, or other code.",
            f"compare autocast and the default dtype around {module_of(a)}",
        )
    if _layouts(a) != _layouts(b):
        return (
            "Other kernel: the inputs have other strides, with which torch may take another kernel or add in another "
            "order.",
            f"give {module_of(a)} inputs of one memory format in both, with contiguous(), and diff again",
        )
    if kernel:
        sides = "; ".join(f"{name} {both(facts[name], labels)}" for name in kernel[:3])
        return (
            f"Other kernel, or another order of its sums: {sides}.",
            "run both with equal values of these, and diff again",
        )
    if any(part in a.name for part in _UNORDERED):
        return (
            f"A kernel that is not deterministic: {short(a)} may add to an element from several threads, in any order.",
            f"torch.use_deterministic_algorithms(True), and diff again; {CROSS_CHECK}",
        )
    return (
        "The same kernel gave another result for the same bits: a kernel that is not deterministic, a faulty custom "
        "operation, memory or hardware.",
        CROSS_CHECK,
    )


def _generator(found: OperationDifference) -> tuple[str, str]:
    drawn = [item for gap in found.earlier for item in (*gap.a, *gap.b) if item.generator]
    if drawn:
        return (
            f"Random generator at another place: one side alone drew random numbers before, in {place(drawn[0])}.",
            f"look at the code that calls {short(drawn[0])} there",
        )
    return (
        "Random generator at another place: another seed, or another number of draws before this step.",
        "compare the seeds, and the draws between the start and this step",
    )


def _form(found: OperationDifference, labels: Labels, _: Facts) -> tuple[str, str]:
    nouns = aspects_of(found)
    if found.passed:
        return explain_input.explain_passed(found, labels)
    if found.has_effect is None:
        return (
            f"{labels[0]} and {labels[1]} ran this operation with other {listed(nouns)}: another mode (train, "
            "eval), autocast, or another configuration. Data of each rank's own explain it only where code depends on "
            "data.",
            f"compare mode, autocast and arguments of {module_of(found.a[0])} on these ranks",
        )
    if found.tensors_differ:
        return (
            f"No operation has other values, and tensors of the step differ. Other {listed(nouns)} are the only "
            "recorded difference; a write that is no recorded operation is possible, too (a thread, compiled code).",
            f"look at {code_of(found.a[0])}, and at the code after backward()",
        )
    return (
        f"No value differs. Other {listed(nouns)} may lead to another kernel on another machine.",
        "nothing to mend, as long as all bits agree",
    )


def _layouts(operation: Operation) -> list[str]:
    return [value.layout for value in operation.inputs]


_KINDS: dict[str, Callable[[OperationDifference, Labels, Facts], tuple[str, str]]] = {
    "output": _output,
    "sequence": explain_sequence.explain_sequence,
    "order": explain_sequence.explain_order,
    "form": _form,
}

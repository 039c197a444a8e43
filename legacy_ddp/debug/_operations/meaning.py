"""Tables of explanations: the meaning of the first difference of two sequences of operations, and the next step.

Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from legacy_ddp._text import listed
from legacy_ddp.debug._operations.operation import (
    Labels,
    Operation,
    OperationDifference,
    Value,
    aspects,
    at,
    both,
    code_of,
    module_of,
    numbered,
    place,
    short,
)

Facts = Mapping[str, tuple[str, str]]
"""Facts of the environment that differ between the sides: by name, the values of both."""

# Facts that choose the kernel of an operation, or the order of its sums.
_KERNEL_FACTS = (
    *("threads", "torch", "cpu", "devices", "mkldnn", "float32 matmul precision", "deterministic algorithms"),
    *("cuda", "cudnn", "cudnn.benchmark", "cudnn.deterministic", "CUBLAS_WORKSPACE_CONFIG", "platform"),
)
# Kernels that may add to one element from several threads (torch.use_deterministic_algorithms lists them).
_UNORDERED = ("index_add", "index_put", "scatter_add", "scatter_reduce", "embedding_dense_backward", "embedding_bag")
_REDUCED_DTYPES = ("bfloat16", "float16")
_OF_A_DROPOUT = ("empty_like", "new_empty", "bernoulli_", "div_", "mul", "native_dropout")


@dataclass(frozen=True)
class Explanation:
    """``meaning``: one or two sentences. ``next_step``: a phrase."""

    meaning: str
    next_step: str


class Rule(NamedTuple):
    """A row of a table. In the texts ``{c.here.name}`` stands for an attribute of the case."""

    applies: Callable[[Any], object]
    meaning: str
    next_step: str = ""


def always(_: object) -> bool:
    return True


def explain_by(rows: Iterable[Rule], case: object) -> Explanation:
    """The texts of the first row that applies to the case; empty texts if none does."""
    row = next((row for row in rows if row.applies(case)), Rule(always, ""))
    return Explanation(row.meaning.format(c=case), row.next_step.format(c=case))


def explain(found: OperationDifference, labels: Labels, facts: Facts) -> Explanation:
    """The likely cause of a difference, and the next step."""
    return explain_by(_ROWS[found.kind], _Case(found, labels, facts))


@dataclass(frozen=True)
class _Named:
    """An operation with its texts. ``side``: the only side with the operation, as ``in A``."""

    operation: Operation
    side: str = ""

    @property
    def name(self) -> str:
        return short(self.operation)

    @property
    def number(self) -> str:
        return numbered(self.operation.number)

    @property
    def place(self) -> str:
        return place(self.operation)

    @property
    def module(self) -> str:
        return module_of(self.operation)

    @property
    def code(self) -> str:
        return code_of(self.operation)


@dataclass(frozen=True)
class _Case:
    """A difference, with the attributes that the rows ask for."""

    found: OperationDifference
    labels: Labels
    facts: Facts

    @property
    def here(self) -> _Named:
        return _Named(self.found.operation)

    @property
    def a(self) -> Operation:
        return self.found.a[0]

    @property
    def b(self) -> Operation:
        return self.found.b[0]

    @property
    def names(self) -> list[str]:
        """The names of the parameters that A and B pass as one input.

        This is the first input with different parameters, else the first with different values. An empty name stands
        for a tensor that is no parameter.
        """
        position = (self.found.passed or self.found.differing)[0]
        return [side.parameters[position] for side in (self.a, self.b)]

    @property
    def passed(self) -> str:
        """``'a.weight' in A, no parameter in B``."""
        return both([repr(name) if name else "no parameter" for name in self.names], self.labels)

    @property
    def values(self) -> tuple[Value, Value]:
        """The first differing input, of A and of B."""
        return self.found.differing_values[0]

    @property
    def parameter(self) -> str:
        """The name of a differing input that is one parameter or buffer on both sides, else empty."""
        return self.found.origin.parameter

    @property
    def reader(self) -> _Named | None:
        """An earlier operation that read this parameter with equal bits."""
        reader = self.found.origin.operation_read
        return _Named(reader) if reader else None

    @property
    def writers(self) -> list[str]:
        """``operation 6, forward of 1.act (aten::relu), in A``, for each side with a recorded writer of the input."""
        writers = zip(self.labels, (self.found.origin.operation_a, self.found.origin.operation_b), strict=True)
        return [f"{numbered(item.number)}, {place(item)}, {at(label)}" for label, item in writers if item]

    @property
    def side_without_writer(self) -> str:
        return at(self.labels[self.found.origin.operation_b is None])

    @property
    def earlier_draw(self) -> _Named | None:
        """The first earlier random operation that only one side ran."""
        earlier = (item for gap in self.found.earlier for item in (*gap.a, *gap.b))
        return next((_Named(item) for item in earlier if item.generator), None)

    @property
    def kernel_facts(self) -> str:
        names = [name for name in _KERNEL_FACTS if name in self.facts]
        return "; ".join(f"{name} {both(self.facts[name], self.labels)}" for name in names[:3])

    @property
    def aspects(self) -> str:
        return listed(aspects(self.a, self.b))

    @property
    def sides(self) -> dict[str, Sequence[Operation]]:
        """The operations of each side that has some, by ``in A``."""
        return {at(label): side for label, side in zip(self.labels, (self.found.a, self.found.b), strict=True) if side}

    @property
    def side(self) -> str:
        return next(iter(self.sides))

    @property
    def cast(self) -> _Named | None:
        """A cast to a reduced dtype, if only one side casts, and has no other operations with a digest."""
        side, casts = self._only(_is_cast)
        others = [item for item in self.sides.get(side, ()) if not _is_cast(item)]
        is_all = all(value.digest is None for item in others for value in item.outputs)
        return _Named(casts[0], side) if casts and is_all else None

    @property
    def dtype(self) -> str:
        return self.cast.operation.outputs[0].kind.partition(" ")[0] if self.cast else ""

    @property
    def compiled(self) -> _Named | None:
        """The first operation of compiled code of a side, if the other side runs none."""
        side, compiled = self._only(_is_compiled)
        return _Named(compiled[0], side) if compiled else None

    @property
    def draw(self) -> _Named | None:
        """The first random operation of a side, if the other side runs none."""
        side, draws = self._only(_is_draw)
        return _Named(draws[0], side) if draws else None

    @property
    def dropout(self) -> _Named | None:
        """The random operation of a dropout, if one side ran nothing, and the other side ran this dropout alone."""
        side, draws = self._only(_is_draw)
        if len(self.sides) > 1 or len(draws) != 1 or not draws[0].module:
            return None
        own = [item.module == draws[0].module and item.base_name in _OF_A_DROPOUT for item in self.sides[side]]
        return _Named(draws[0], side) if all(own) else None

    @property
    def normalisation(self) -> _Named | None:
        """An operation of batch normalisation, if both sides have one."""
        norms = [next((item for item in group if "batch_norm" in item.name), None) for group in self.sides.values()]
        return _Named(norms[0]) if len(norms) == 2 and norms[0] and norms[1] else None

    @property
    def suspects(self) -> str:
        """The code that may be the reason for operations that only one side has."""
        first = self.found.operation
        if first.stage == "after backward":
            return "the code after backward(): gradients that it scales, clips or edits"
        what = "the code, the mode and the hooks" if len(self.sides) > 1 else "the code and the hooks"
        return f"{what} of {first.module or 'the model, and at the code outside of it'}"

    @property
    def modules(self) -> str:
        return " and ".join(dict.fromkeys((module_of(self.a), module_of(self.b))))

    @property
    def effect(self) -> str:
        """A sentence if no values of operations of both sides differ, otherwise empty."""
        if self.found.has_effect:
            return ""
        equal = " All operations that both sides ran have equal values"
        if not self.found.tensors_differ:
            return f"{equal}."
        rest = "their order is" if self.found.kind == "order" else "operations that only one side has are"
        return f"{equal}: {rest} the only recorded difference, and the likely cause of the tensors that differ."

    def _only(self, has_trait: Callable[[Operation], bool]) -> tuple[str, list[Operation]]:
        """The only side with operations that have the trait, and these operations; empty if both or none have some."""
        found = [(side, [item for item in group if has_trait(item)]) for side, group in self.sides.items()]
        found = [(side, group) for side, group in found if group]
        return found[0] if len(found) == 1 else ("", [])


def has_unknown_source(found: OperationDifference) -> bool:
    """Whether a differing input is no parameter or buffer, and no recorded operation returned its bits."""
    if found.kind != "input" or not found.differing_values or any(_Case(found, ("A", "B"), {}).names):
        return False
    return found.origin.writer_a is None and found.origin.writer_b is None


def _is_draw(operation: Operation) -> bool:
    return bool(operation.generator)


def _is_compiled(operation: Operation) -> bool:
    """Whether compiled code calls the operation: it has ``out=``, or runs in a module wrapped by torch.compile."""
    return operation.name.rpartition(".")[2] == "out" or "_orig_mod" in operation.module.split(".")


def _is_cast(operation: Operation) -> bool:
    """Whether the operation turns a floating tensor into one of a reduced dtype."""
    if not operation.name.startswith("aten::_to_copy") or not operation.inputs or not operation.outputs:
        return False
    before, after = (values[0].kind.partition(" ")[0] for values in (operation.inputs, operation.outputs))
    return after in _REDUCED_DTYPES and before != after and before.startswith(("float", "bfloat"))


CROSS_CHECK = "legacy_ddp.debug.cross_check() repeats the step on another rank and compares the elements"
_COPIES = "look at {c.here.code}, and for copies of weights"
_MODE = "compare model.training, and train() and eval() of {}"
_UNKNOWN_SOURCE = (
    "Unknown source: the input is no parameter, and no recorded operation of this step returned these bits. Possible "
    "are a batch (or a target), a tensor kept from an earlier step, and a kernel that is not recorded, such as "
    "one of torch.compile."
)
_FIND_SOURCE = (
    "compare the batches (sampler, seed of the data, order, targets); look for kept tensors; run without "
    "torch.compile, and diff again"
)

_INPUT = (
    Rule(
        lambda c: not c.found.differing_values,
        "One side passes more tensors.",
        "look at the arguments of {c.here.module}",
    ),
    Rule(
        lambda c: c.names[0] != c.names[1],
        "Another tensor is passed: {c.passed} (a copy, a cast, or a tensor kept from an earlier step).",
        _COPIES,
    ),
    Rule(
        lambda c: c.parameter and not c.reader,
        "The weight or buffer {c.parameter!r} came into this step with other bits, or was written inside of the "
        "step before this operation, which no recorded operation did (NumPy, a second thread, an extension).",
        "compare the steps before (record them too; the checkpoint, the optimizer), and look for code that writes to "
        "weights during a step",
    ),
    Rule(
        lambda c: c.parameter,
        "The weight or buffer {c.parameter!r} agreed in {c.reader.number}, and changed before {c.here.number}, which "
        "no recorded operation did: a second thread, a stale pointer, or memory.",
        "look for threads and extensions that write to weights during a step",
    ),
    Rule(
        lambda c: c.found.origin.is_argument,
        "Other data: the differing input is an argument of the model's forward pass.",
        "compare the batches (sampler, seed of the data, order)",
    ),
    Rule(
        lambda c: not c.writers and c.values[0].kind != c.values[1].kind,
        "Data of another dtype or shape: {c.values[0].kind} and {c.values[1].kind}.",
        "compare the batches, and dtype and shape of the tensors made from them",
    ),
    Rule(
        lambda c: not c.writers and c.values[0].layout,
        f"{_UNKNOWN_SOURCE} The input is a strided view: an earlier output, written to by another thread, may also be "
        "its source.",
        _FIND_SOURCE,
    ),
    Rule(lambda c: not c.writers, _UNKNOWN_SOURCE, _FIND_SOURCE),
    Rule(
        lambda c: len(c.writers) == 2,
        "Another tensor is passed: the output of {c.writers[0]} and of {c.writers[1]}.",
        "look at {c.here.code}",
    ),
    Rule(
        always,
        "The input is the output of {c.writers[0]}. It has changed since {c.side_without_writer}, which no recorded "
        "operation did (a second thread, a stale pointer, memory), or it is another tensor, kept from an earlier step.",
        "look for threads, extensions and kept tensors that share memory with this input",
    ),
)

_OUTPUT = (
    Rule(
        lambda c: c.a.generator != c.b.generator and c.earlier_draw,
        "Random generator at another place: only one side drew random numbers before, in {c.earlier_draw.place}.",
        "look at the code that calls {c.earlier_draw.name} there",
    ),
    Rule(
        lambda c: c.a.generator != c.b.generator,
        "Random generator at another place: another seed, or another number of draws before this step.",
        "compare the seeds, and the draws between the start and this step",
    ),
    Rule(
        lambda c: c.a.settings != c.b.settings,
        "Other settings: the operation was called with other arguments.",
        "look at the arguments and the mode (train, eval) of {c.here.module}",
    ),
    Rule(
        lambda c: [value.kind for value in c.a.outputs] != [value.kind for value in c.b.outputs],
        "Other dtype or shape of a result of equal inputs: autocast, a default dtype, or other code.",
        "compare autocast and the default dtype around {c.here.module}",
    ),
    Rule(
        lambda c: [value.layout for value in c.a.inputs] != [value.layout for value in c.b.inputs],
        "Other kernel: the inputs have other strides, with which torch may take another kernel or add in another "
        "order.",
        "give {c.here.module} inputs of one memory format in both, with contiguous(), and diff again",
    ),
    Rule(
        lambda c: c.kernel_facts,
        "Other kernel, or another order of its sums: {c.kernel_facts}.",
        "run both with equal values of these, and diff again",
    ),
    Rule(
        lambda c: any(part in c.a.name for part in _UNORDERED),
        "A kernel that is not deterministic: {c.here.name} may add to an element from several threads, in any order.",
        f"torch.use_deterministic_algorithms(True), and diff again; {CROSS_CHECK}",
    ),
    Rule(
        always,
        "The same kernel gave another result for the same bits: a kernel that is not deterministic, a faulty custom "
        "operation, memory or hardware.",
        CROSS_CHECK,
    ),
)

_FORM = (
    Rule(
        lambda c: c.found.passed,
        "Another tensor with equal bits is passed: {c.passed} (a copy, or a tensor kept from an earlier step). Its "
        "gradient goes elsewhere, and later writes to the parameter do not reach a copy.",
        _COPIES,
    ),
    Rule(
        lambda c: c.found.tensors_differ,
        "No operation has other values, and tensors of the step differ. Other {c.aspects} are the only recorded "
        "difference; a write that is no recorded operation is possible, too (a thread, compiled code).",
        "look at {c.here.code}, and at the code after backward()",
    ),
    Rule(
        always,
        "No value differs. Other {c.aspects} may lead to another kernel on another machine.",
        "nothing to mend, as long as all bits agree",
    ),
)

_SEQUENCE = (
    Rule(
        lambda c: c.cast,
        "Other dtype: a cast to {c.dtype} only {c.cast.side} (autocast, or a cast in the code).{c.effect}",
        "compare autocast around the forward pass",
    ),
    Rule(
        lambda c: c.compiled,
        "Compiled code only {c.compiled.side}: {c.compiled.place}. Kernels that torch.compile generates are no "
        "recorded operations, and may round otherwise.{c.effect}",
        "run both with torch.compile, or both without, and diff again",
    ),
    Rule(
        lambda c: c.dropout,
        "Random numbers are drawn only {c.dropout.side} ({c.dropout.name}): dropout in training mode against eval "
        "mode, another probability, or other code.{c.effect}",
        _MODE.format("{c.dropout.module}"),
    ),
    Rule(
        lambda c: c.normalisation,
        "The normalisation takes another form: training mode against eval mode.{c.effect}",
        _MODE.format("{c.normalisation.module}"),
    ),
    Rule(
        lambda c: len(c.sides) == 2,
        "The sides run other operations here: other code or arguments, another mode (train, eval), or another version "
        "of torch.{c.effect}",
        "look at {c.suspects}",
    ),
    Rule(
        lambda c: c.draw,
        "Operations only {c.side}, among them a random draw ({c.draw.name}): other code, a hook, or another path for "
        "other values.{c.effect}",
        "look at {c.suspects}",
    ),
    Rule(
        always,
        "Operations only {c.side}: other code, a hook, or another path for other values.{c.effect}",
        "look at {c.suspects}",
    ),
)

_ORDER = (
    Rule(
        always,
        "Modules or functions are called in another order.{c.effect}",
        "look at the order of calls in the code around {c.modules}",
    ),
)

_ROWS = {"input": _INPUT, "output": _OUTPUT, "form": _FORM, "sequence": _SEQUENCE, "order": _ORDER}

"""The meaning of operations of a single sequence, and of a different order. Pure."""

from collections.abc import Callable, Mapping, Sequence

from legacy_ddp.debug._operations.describe import Labels, at, module_of, place, short
from legacy_ddp.debug._operations.difference import OperationDifference
from legacy_ddp.debug._operations.operation import Operation

_REDUCED_DTYPES = ("bfloat16", "float16")
_OF_A_DROPOUT = ("empty_like", "new_empty", "bernoulli_", "div_", "mul", "native_dropout")
_MODE = "compare model.training, and train() and eval() of {}"

Sides = Mapping[str, Sequence[Operation]]


def explain_sequence(found: OperationDifference, labels: Labels, _: Mapping[str, object]) -> tuple[str, str]:
    """The meaning, and the next step."""
    sides = {label: side for label, side in zip(labels, (found.a, found.b), strict=True) if side}
    meaning, next_step = next(told for cause in _CAUSES if (told := cause(sides)))
    return f"{meaning}{_effect(found)}", next_step


def explain_order(found: OperationDifference, _: Labels, __: Mapping[str, object]) -> tuple[str, str]:
    """The meaning, and the next step, for the same operations in different orders."""
    modules = dict.fromkeys(module_of(side[0]) for side in (found.a, found.b))
    return (
        f"Modules or functions are called in another order.{_effect(found)}",
        f"look at the order of calls in the code around {' and '.join(modules)}",
    )


def _effect(found: OperationDifference) -> str:
    """A sentence where no values differ, or no values were compared; otherwise empty."""
    if found.has_effect is None:
        return " Data of each rank's own explain it only where code depends on data."
    if found.has_effect:
        return ""
    equal = " All operations that both sides ran have equal values"
    if not found.tensors_differ:
        return f"{equal}."
    rest = "their order is" if found.kind == "order" else "operations of one side alone are"
    return f"{equal}: {rest} the only recorded difference, and the likely cause of the tensors that differ."


def _cast(sides: Sides) -> tuple[str, str] | None:
    label, group = _only(sides, _is_cast)
    if not group or not all(_is_cast(item) or _is_view(item) for item in group):
        return None
    dtype = next(item for item in group if _is_cast(item)).outputs[0].kind.partition(" ")[0]
    return (
        f"Other dtype: a cast to {dtype} {at(label)} alone (autocast, or a cast in the code).",
        "compare autocast around the forward pass",
    )


def _compiled(sides: Sides) -> tuple[str, str] | None:
    label, group = _only(sides, _is_compiled)
    if not group:
        return None
    name = place(next(item for item in group if _is_compiled(item)))
    return (
        f"Compiled code {at(label)} alone: {name}. Kernels that torch.compile generates are no recorded operations, "
        "and may round otherwise.",
        "run both with torch.compile, or both without, and diff again",
    )


def _dropout(sides: Sides) -> tuple[str, str] | None:
    label, group = _only(sides, _is_draw)
    draws = [item for item in group if _is_draw(item)]
    if len(sides) > 1 or len(draws) != 1 or not draws[0].module:
        return None
    if any(item.module != draws[0].module or _base(item) not in _OF_A_DROPOUT for item in group):
        return None
    return (
        f"Random numbers are drawn {at(label)} alone ({short(draws[0])}): dropout in training mode against eval mode, "
        "another probability, or other code.",
        _MODE.format(draws[0].module),
    )


def _normalisation(sides: Sides) -> tuple[str, str] | None:
    norms = [[item for item in group if "batch_norm" in item.name] for group in sides.values()]
    if len(norms) < 2 or not all(norms):
        return None
    return (
        "The normalisation takes another form: training mode against eval mode.",
        _MODE.format(module_of(norms[0][0])),
    )


def _other_code(sides: Sides) -> tuple[str, str]:
    (label, group), *more = sides.items()
    if more:
        return (
            "The sides run other operations here: other code or arguments, another mode (train, eval), or another "
            "version of torch.",
            _look_at(group[0], "the code, the mode and the hooks"),
        )
    draw = next((f", among them a random draw ({short(item)})" for item in group if _is_draw(item)), "")
    return (
        f"Operations {at(label)} alone{draw}: other code, a hook, or another path for other values.",
        _look_at(group[0], "the code and the hooks"),
    )


_CAUSES: tuple[Callable[[Sides], tuple[str, str] | None], ...] = (
    *(_cast, _compiled, _dropout, _normalisation),
    _other_code,
)


def _look_at(operation: Operation, what: str) -> str:
    if operation.stage == "after backward":
        return "look at the code after backward(): gradients that it scales, clips or edits"
    return f"look at {what} of {operation.module or 'the model, and at the code outside of it'}"


def _only(sides: Sides, has_trait: Callable[[Operation], bool]) -> tuple[str, Sequence[Operation]]:
    """The side with operations of the trait; empty if no side or both sides have operations of the trait."""
    found = [(label, group) for label, group in sides.items() if any(map(has_trait, group))]
    return found[0] if len(found) == 1 else ("", ())


def _is_draw(operation: Operation) -> bool:
    return bool(operation.generator)


def _is_compiled(operation: Operation) -> bool:
    """Whether compiled code calls the operation: with ``out=``, or in a module wrapped by torch.compile."""
    return operation.name.rpartition(".")[2] == "out" or "_orig_mod" in operation.module.split(".")


def _is_view(operation: Operation) -> bool:
    return all(value.digest is None for value in operation.outputs)


def _is_cast(operation: Operation) -> bool:
    """Whether the operation turns a floating tensor into one of a reduced dtype."""
    if not operation.name.startswith("aten::_to_copy") or not operation.inputs or not operation.outputs:
        return False
    before, after = (values[0].kind.partition(" ")[0] for values in (operation.inputs, operation.outputs))
    return after in _REDUCED_DTYPES and before != after and before.startswith(("float", "bfloat"))


def _base(operation: Operation) -> str:
    """The name without namespace and overload: ``bernoulli_``."""
    return operation.name.rpartition("::")[2].partition(".")[0]

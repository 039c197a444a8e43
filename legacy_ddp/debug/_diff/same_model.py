"""Check of two traces: both must be of one model, because different models have nothing to compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._trace.read import RankTrace

_MAX_NAMED = 3
# torch.compile(module) is a module around the module, which names its parameters so; module.compile() is not.
_COMPILED = "_orig_mod."


def check_same_model(pair: Pair, a: Path, b: Path) -> None:
    """Compare names, dtypes and shapes of parameters in the first common step with recorded parameters.

    Raises:
        TraceError: the parameters differ; the text names the first few.
    """
    left, right = _kinds(pair, pair.a), _kinds(pair, pair.b)
    shared = left.keys() & right.keys()
    reshaped = [
        f"{name} ({left[name]} in A, {right[name]} in B)"
        for name in left
        if name in shared and _differ(left, right, name)
    ]
    found = [
        _first_few("only in A: ", [name for name in left if name not in shared]),
        _first_few("only in B: ", [name for name in right if name not in shared]),
        _first_few("of another kind: ", reshaped),
    ]
    if any(found):
        raise TraceError(
            f"A ({a}) and B ({b}) hold other parameters: got {'; '.join(filter(None, found))}; expected the same in "
            f"both; {_advice(left, right)}"
        )


def _advice(left: Mapping[str, str], right: Mapping[str, str]) -> str:
    a, b = ({name.replace(_COMPILED, ""): kind for name, kind in kinds.items()} for kinds in (left, right))
    if a == b:
        return (
            f"the names differ by {_COMPILED!r} of torch.compile(module) alone; use module.compile(), which keeps names"
        )
    return "compare runs of one model"


def _differ(a: Mapping[str, str], b: Mapping[str, str], name: str) -> bool:
    return bool(a[name] and b[name] and a[name] != b[name])


def _kinds(pair: Pair, trace: RankTrace) -> dict[str, str]:
    """Kinds of parameters by name; names from the environment, without kinds, if no step has parameters."""
    for step in pair.steps:
        if pair.a.names(step, "parameters") and pair.b.names(step, "parameters"):
            names = trace.names(step, "parameters")
            return dict(zip(names.names, names.kinds, strict=True)) if names else {}
    return {f"parameter {name!r}": "" for name in trace.environment.parameters}


def _first_few(title: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{title}{', '.join(names[:_MAX_NAMED])}{more}" if names else ""

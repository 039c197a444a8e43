"""Are two traces of one model? Refused if not: of two models nothing can be compared."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._trace.read import RankTrace

_MAX_NAMED = 3


def check_same_model(pair: Pair, a: Path, b: Path) -> None:
    """Compare names, dtypes and shapes of parameters where both were recorded first.

    Raises:
        TraceError: they differ; with the first few that do.
    """
    left, right = _kinds(pair, pair.a), _kinds(pair, pair.b)
    shared = left.keys() & right.keys()
    reshaped = [
        f"{name} ({left[name]} in A, {right[name]} in B)"
        for name in left
        if name in shared and _differ(left, right, name)
    ]
    found = [
        _some("only in A: ", [name for name in left if name not in shared]),
        _some("only in B: ", [name for name in right if name not in shared]),
        _some("of another kind: ", reshaped),
    ]
    if any(found):
        raise TraceError(
            f"A ({a}) and B ({b}) hold other parameters: got {'; '.join(filter(None, found))}; expected the same in "
            "both; compare runs of one model"
        )


def _differ(a: Mapping[str, str], b: Mapping[str, str], name: str) -> bool:
    return bool(a[name] and b[name] and a[name] != b[name])


def _kinds(pair: Pair, trace: RankTrace) -> dict[str, str]:
    """Kinds of parameters by name at the first step in common; without kinds where none were recorded."""
    for step in pair.steps:
        if pair.a.names(step, "parameters") and pair.b.names(step, "parameters"):
            names = trace.names(step, "parameters")
            return dict(zip(names.names, names.kinds, strict=True)) if names else {}
    return {f"parameter {name!r}": "" for name in trace.environment.parameters}


def _some(title: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{title}{', '.join(names[:_MAX_NAMED])}{more}" if names else ""

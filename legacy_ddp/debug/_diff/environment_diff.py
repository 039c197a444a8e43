"""What differs around two trainings, in versions, flags and machines? Causes, never a verdict. Pure."""

from collections.abc import Sequence

from legacy_ddp._compare import MISSING, name_ranks
from legacy_ddp.debug._diff.result import Cause
from legacy_ddp.debug._trace.records import Environment

Pairs = Sequence[tuple[Environment, Environment]]

NEVER = ("host", "pid", "started")

# Likeliest first; what is not listed comes after them, and what hardly ever matters last.
_ORDER = (
    *("seed", "torch", "legacy_ddp", "reproducible", "reduce_dtype", "default dtype", "devices", "backend", "threads"),
    *("float32 matmul precision", "deterministic algorithms", "cudnn.benchmark", "cudnn.deterministic"),
    *("CUBLAS_WORKSPACE_CONFIG", "mkldnn", "cpu", "cuda", "cudnn", "nccl", "buffer_size", "optimizer", "ignore"),
    *("interop threads",),
)
_HARDLY = ("python", "platform", "gradient_as_bucket_view", "checks")


def in_order(facts: Sequence[str]) -> list[str]:
    """Facts, the likeliest to explain a difference first."""

    def place(fact: str) -> int:
        if fact in _ORDER:
            return _ORDER.index(fact)
        return len(_ORDER) + 1 + _HARDLY.index(fact) if fact in _HARDLY else len(_ORDER)

    return sorted((fact for fact in dict.fromkeys(facts) if fact not in NEVER), key=place)


def of_equal_ranks(pairs: Pairs) -> list[Cause]:
    """Facts that rank r of A has otherwise than rank r of B; ``pairs`` are in rank order."""
    causes = []
    for fact in in_order([fact for a, b in pairs for fact in (*a.facts, *b.facts)]):
        held = {a.rank: (a.facts.get(fact, MISSING), b.facts.get(fact, MISSING)) for a, b in pairs}
        differing = {rank: values for rank, values in held.items() if values[0] != values[1]}
        if differing:
            causes.append(_cause(fact, differing, len(held)))
    return causes


def of_whole_runs(a: Sequence[Environment], b: Sequence[Environment]) -> tuple[list[Cause], list[str]]:
    """Facts that all ranks of A share, and all of B, and not with each other; and those that ranks do not share."""
    causes, mixed = [], []
    for fact in in_order([fact for environment in (*a, *b) for fact in environment.facts]):
        left, right = (list({item.facts.get(fact, MISSING): None for item in run}) for run in (a, b))
        if len(left) > 1 or len(right) > 1:
            mixed.append(fact)
        elif left != right:
            causes.append(Cause(fact, (("A", left[0]), ("B", right[0]))))
    return [Cause("world size", (("A", str(len(a))), ("B", str(len(b))))), *causes], mixed


def _cause(fact: str, differing: dict[int, tuple[str, str]], size: int) -> Cause:
    rank, (left, right) = next(iter(differing.items()))
    words = [] if len(differing) == size else [f"on {name_ranks(differing)}"]
    if len(set(differing.values())) > 1:
        words.append(f"shown for rank {rank}")
    return Cause(fact, (("A", left), ("B", right)), ", ".join(words))

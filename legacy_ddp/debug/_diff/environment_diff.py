"""Differences of versions, flags and machines between two runs. They are causes, never a verdict. Pure."""

from collections.abc import Sequence

from legacy_ddp._compare import MISSING, name_ranks
from legacy_ddp.debug._diff.result import Cause
from legacy_ddp.debug._trace.records import Environment

Pairs = Sequence[tuple[Environment, Environment]]

EXCLUDED = ("host", "pid", "started")

# Likeliest first. Unlisted facts come next, and the least likely facts last.
_LIKELIEST = (
    *("seed", "commit", "torch", "legacy_ddp", "reproducible", "reduce_dtype", "default dtype", "devices"),
    *("backend", "transport", "threads", "float32 matmul precision", "deterministic algorithms", "cudnn.benchmark"),
    *("cudnn.deterministic", "CUBLAS_WORKSPACE_CONFIG", "mkldnn", "cpu", "cuda", "cudnn", "nccl", "buffer_size"),
    *("optimizer", "ignore", "interop threads"),
)
_LEAST_LIKELY = ("argv", "python", "platform", "gradient_as_bucket_view", "checks")


def by_likelihood(facts: Sequence[str]) -> list[str]:
    """The distinct facts, likeliest cause first, without the excluded facts."""

    def position(fact: str) -> int:
        if fact in _LIKELIEST:
            return _LIKELIEST.index(fact)
        return len(_LIKELIEST) + (1 + _LEAST_LIKELY.index(fact) if fact in _LEAST_LIKELY else 0)

    return sorted((fact for fact in dict.fromkeys(facts) if fact not in EXCLUDED), key=position)


def causes_by_rank(pairs: Pairs) -> list[Cause]:
    """Facts which differ between rank r of A and rank r of B; ``pairs`` are in rank order."""
    causes = []
    for fact in by_likelihood([fact for a, b in pairs for fact in (*a.facts, *b.facts)]):
        values = {a.rank: (a.facts.get(fact, MISSING), b.facts.get(fact, MISSING)) for a, b in pairs}
        differing = {rank: sides for rank, sides in values.items() if sides[0] != sides[1]}
        if differing:
            causes.append(_cause(fact, differing, len(values)))
    return causes


def causes_by_run(a: Sequence[Environment], b: Sequence[Environment]) -> tuple[list[Cause], list[str]]:
    """Facts with one value in all of A and another value in all of B; and facts with several values in a run."""
    causes, mixed = [], []
    for fact in by_likelihood([fact for environment in (*a, *b) for fact in environment.facts]):
        left, right = (list({item.facts.get(fact, MISSING): None for item in run}) for run in (a, b))
        if len(left) > 1 or len(right) > 1:
            mixed.append(fact)
        elif left != right:
            causes.append(Cause(fact, (("A", left[0]), ("B", right[0]))))
    return [Cause("world size", (("A", str(len(a))), ("B", str(len(b))))), *causes], mixed


def _cause(fact: str, differing: dict[int, tuple[str, str]], world_size: int) -> Cause:
    rank, (left, right) = next(iter(differing.items()))
    where = [] if len(differing) == world_size else [f"on {name_ranks(differing)}"]
    if len(set(differing.values())) > 1:
        where.append(f"shown for rank {rank}")
    return Cause(fact, (("A", left), ("B", right)), ", ".join(where))

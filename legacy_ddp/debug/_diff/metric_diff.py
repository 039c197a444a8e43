"""Metrics of two runs, call by call. They follow from the training: a difference is shown, and is no verdict. Pure."""

from legacy_ddp._text import plain
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import MetricDifference


def metric_differences(pair: Pair) -> tuple[MetricDifference, ...]:
    """The first difference of each metric, in the order of the steps. Values are compared exactly; NaN equals NaN.

    Every rank has the same sums: a pair of ranks stands for both runs. Parses one short line per step and file.
    """
    firsts: dict[str, tuple[int, float | str | None, float | str | None]] = {}
    counts: dict[str, int] = {}
    calls = 0
    for step in pair.steps:
        a, b = pair.a.call(step), pair.b.call(step)
        if a is None or b is None:
            continue
        calls += 1
        for name in dict.fromkeys([*a.metrics, *b.metrics]):
            left, right = a.metrics.get(name), b.metrics.get(name)
            if repr(left) != repr(right):
                firsts.setdefault(name, (step, _plain(left), _plain(right)))
                counts[name] = counts.get(name, 0) + 1
    return tuple(MetricDifference(name, *first, counts[name], calls) for name, first in firsts.items())


def _plain(value: float | None) -> float | str | None:
    return None if value is None else plain(value)
